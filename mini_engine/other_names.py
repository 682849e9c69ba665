"""What other engines call our options, so that their names are answered with ours."""

from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

Made = TypeVar("Made")

OURS = {
    # of a request
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "repeat_penalty": "repetition_penalty",
    "num_return_sequences": "n",
    "top_logprobs": "logprobs",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "sequence_bias": "logit_bias",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    # of the engine
    "n_ctx": "max_model_len",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "max_num_seqs": "max_running_requests",
    "n_parallel": "max_running_requests",
    "max_num_batched_tokens": "max_tokens_per_step",
    "chunked_prefill_size": "max_tokens_per_step",
    "n_batch": "max_tokens_per_step",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
    "schedule_policy": "policy",
    "scheduling_policy": "policy",
    "enable_prefix_caching": "prefix_cache",
    "radix_eviction_policy": "eviction",
    "guided_decoding_backend": "grammar_backend",
    "torch_dtype": "dtype",
    "device_map": "device",
    "quantization": "quantize",
    "attn_implementation": "compute",
    "attention_backend": "compute",
    "enable_deterministic_inference": "batch_invariant",
    "tensor_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
}
WITHOUT = {  # what no option of ours does, and what to do
    "do_sample": "a temperature above 0 samples, and 0 is greedy; set temperature",
    "skip_special_tokens": "an answer's text has no special tokens, and token_ids has them; leave it out",
    "disable_radix_cache": "the prefix cache is off unless prefix_cache='radix'; leave it out",
    "disable_cuda_graph": "there are no CUDA graphs; leave it out",
    "enforce_eager": "there are no CUDA graphs, so every step is eager; leave it out",
    "gpu_memory_utilization": "the KV pool has as many pages as num_pages says; set that, or max_model_len",
    "mem_fraction_static": "the KV pool has as many pages as num_pages says; set that, or max_model_len",
    "max_total_tokens": "the KV pool has num_pages pages of page_size tokens; set num_pages",
    "load_in_8bit": "weights are rounded as they are loaded; set quantize='int8'",
    "load_in_4bit": "weights are rounded as they are loaded; set quantize='int4'",
    "n_gpu_layers": "a model runs on one device; set device",
    "n_threads": "torch has as many threads as torch.set_num_threads says; call that",
    "trust_remote_code": "no code of a checkpoint is run; leave it out",
    "model_path": "the model is the first argument of LLM; give it there",
    "tokenizer": "the tokenizer is the one in the model's folder; leave it out",
}
OWNERS: dict[str, str] = {}  # each field of a class that ``knows_other_names`` -> the class


def explanation(name: str, owner: str) -> str | None:
    """Return what an option of ``owner`` is called here, or where it is set; ``None`` for an unknown name."""
    if name in WITHOUT:
        return f"{name} is no option here: {WITHOUT[name]}"
    ours = OURS.get(name, name)
    home = OWNERS.get(ours, owner)
    if ours != name:
        return f"{name} is called {ours} here" + (f", a field of {home}" if home != owner else "")
    return f"{name} is a field of {home}, not of {owner}; give it there" if home != owner else None


def knows_other_names(made: type[Made]) -> type[Made]:
    """Make a dataclass raise ``ValueError`` with our name for an option of another engine or of another class."""
    OWNERS.update((each.name, made.__name__) for each in fields(made))  # type: ignore[arg-type]
    build = made.__init__

    @wraps(build)
    def init(self: Made, *values: Any, **options: Any) -> None:
        try:
            build(self, *values, **options)
        except TypeError as error:
            known = (explanation(name, made.__name__) for name in options if OWNERS.get(name) != made.__name__)
            for reason in filter(None, known):
                raise ValueError(reason) from error
            raise

    made.__init__ = init  # type: ignore[method-assign, assignment]
    return made
