"""llama.cpp as a peer of the benchmarks: it serves a model of transformers written as a GGUF file.

The file has the numbers of the model, rounded to one format: every matrix, the table of embeddings too. Norms and
the routers of experts stay in float32, as llama.cpp has them. The 8 and 4 bits are those of the package ``gguf``.
"""

import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import typer
from torch import Tensor
from transformers import PreTrainedModel

from mini_engine.bench.machine import share_read

NAME = "llama.cpp"
PACKAGES = ("xllamacpp", "gguf")  # its prebuilt wheel, and the writer of its files
FORMATS = {"float32": ("F32",), "bfloat16": ("BF16", "Q8_0", "Q4_0")}  # dtype of ours -> what it is compared with
FAMILIES = {"qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE", "llama": "LLAMA"}  # model_type -> name in ``gguf.MODEL_ARCH``
FIELDS = {  # of a GGUF file -> attribute of the configuration, where it has it
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def version() -> str:
    """Return the version of the wheel and what it uses of the CPU. Raises ``typer.BadParameter`` without packages."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise typer.BadParameter(f"--peer {NAME} needs {' and '.join(missing)}; pip install 'mini-engine[peers]'")
    import xllamacpp

    return f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip()}"


def write_gguf(model: PreTrainedModel, file: Path, form: str) -> int:
    """Write ``model`` to ``file`` with matrices in ``form``; return the bytes that a decode step must read.

    Every token of the vocabulary is written as its id in digits, so that ids can be read off a text.
    """
    import gguf

    config = model.config
    family = gguf.MODEL_ARCH[FAMILIES[config.model_type]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[family])
    write_config(writer, config)
    names = gguf.get_tensor_name_map(family, config.num_hidden_layers)
    read = 0.0
    for name, weight in tensors(model):
        is_plain = weight.ndim < 2 or name.endswith(".gate.weight")
        kind = gguf.GGMLQuantizationType["F32" if is_plain else form]
        numbers = gguf.quants.quantize(weight.detach().float().contiguous().numpy(), kind)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", numbers, raw_dtype=kind)
        read += numbers.nbytes * share_read(name, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(read)


def write_config(writer: Any, config: Any) -> None:
    """Write the shape of a model, and a vocabulary of digits."""
    for field, attribute in FIELDS.items():
        if hasattr(config, attribute):
            getattr(writer, f"add_{field}")(getattr(config, attribute))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([str(token_id) for token_id in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)  # 1: a token like any other


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters under the names of a checkpoint, as llama.cpp wants them."""
    config = model.config
    for name, weight in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):  # [experts, 2 * I, H]
            gate, up = weight.chunk(2, dim=1)
            yield name.replace("gate_up_proj", "gate_proj"), gate
            yield name.replace("gate_up_proj", "up_proj"), up
        elif config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # A Llama's columns are turned in neighbouring pairs there, not in pairs of the two halves of a head.
            yield name, weight.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).reshape(weight.shape)
        else:
            yield name, weight


class LlamaCpp:
    """A model in a GGUF file, served by llama.cpp in this process.

    The server also listens on a free port of this machine alone, which nothing here uses.
    """

    def __init__(self, file: Path, context: int, threads: int) -> None:
        """Load ``file`` for requests of at most ``context`` tokens. Raises ``RuntimeError`` if llama.cpp refuses it."""
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx = context
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0  # prompts would be kept for later requests
        params.fit_params = False  # it would load the file twice to see whether it fits
        params.verbosity = -1
        self.server = xllamacpp.Server(params)

    def generate(self, prompt: Sequence[int], new_tokens: int) -> tuple[float, list[float], list[int]]:
        """Generate greedily; return when it began, when each token arrived (``time.perf_counter``), and the ids.

        Raises ``RuntimeError`` if llama.cpp refuses the request or gives another number of tokens.
        """
        arrived: list[tuple[float, dict[str, Any]]] = []
        request = {
            "prompt": list(prompt),
            "n_predict": new_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "stream": True,
        }
        began = time.perf_counter()
        self.server.handle_completions(request, lambda chunk: arrived.append((time.perf_counter(), chunk)))
        refusals = [chunk for _, chunk in arrived if "choices" not in chunk]
        if refusals:
            raise RuntimeError(f"llama.cpp refused a request of {len(prompt)} + {new_tokens} tokens: {refusals[0]}")
        tokens = [(moment, text) for moment, chunk in arrived if (text := chunk["choices"][0]["text"])]
        if len(tokens) != new_tokens:
            raise RuntimeError(f"llama.cpp gave {len(tokens)} of {new_tokens} tokens, in pieces of text {tokens[-3:]}")
        return began, [moment for moment, _ in tokens], [int(text) for _, text in tokens]


class Apart(BaseManager):
    """A process of its own for ``LlamaCpp``. In one process OpenMP would count its threads with those of torch.

    There would be more than cores, so that none of them, on either side, would wait awake for its work.
    """


Apart.register("LlamaCpp", LlamaCpp)


def serve_apart(file: Path, context: int, threads: int) -> Any:
    """Return ``LlamaCpp`` in a process of its own, which lives as long as what is returned. Raises as it does."""
    process = Apart(ctx=get_context("spawn"))
    process.start()
    server = process.LlamaCpp(file, context, threads)  # type: ignore[attr-defined]
    server.process = process
    return server
