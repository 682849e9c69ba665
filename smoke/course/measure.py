"""What a lesson changes, measured on a student's engine: one load without the lesson's idea, and the same with it.

``python -m smoke.course.measure FOLDER LESSON [MODEL]`` prints both as JSON. It runs in a process of its own, because
nothing of the engine may be imported before the student's modules are laid over it.

The first column of a load is a count, so it is the same on every machine. Tokens per second come from a clock.
"""

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_engine.overlay import install_overlay, overlay_files

if TYPE_CHECKING:  # imported in the loads, after the overlay
    from mini_engine.config import EngineConfig
    from mini_engine.model import Qwen3

NEW_TOKENS = 24
TURNS = 3  # of two sides that are timed
BEGINNINGS = [
    "Once upon a time there was a fox named Mila",
    "Tom",
    "Every morning the bear and the owl walked to the river to look at",
    "One day, a cat found a red ball.",
]
NAMES = ["Mila", "Tom", "Ida", "Ruva", "Upy", "Ugo", "Bila", "Xyky"]
OPENING = (
    "There was a village by a wide river. In spring the children built boats of bark and raced them to the bridge. "
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
}


ASKED = [f"{name} has an orange umbrella. Ben has a purple trumpet. What does {name} have?" for name in NAMES]


@dataclass(frozen=True)
class Side:
    """One way to do a load: its name, and its figures by column. The first is what the lesson changes."""

    name: str
    figures: dict[str, float]


@dataclass(frozen=True)
class Load:
    """What is measured for a lesson: a title, whether less of the first column is better, and how it is run."""

    title: str
    less_is_better: bool
    run: Callable[[Path | None], tuple[Side, Side]]

    def gain(self, before: float, after: float) -> float:
        """Return how many times better ``after`` is than ``before``, in the first column. Nothing counts as one."""
        return before / after if self.less_is_better else after / max(before, 1)


def pages(folder: Path | None) -> tuple[Side, Side]:
    """L2: four stories. The model sees every text whole for each token, or packed rows over a pool of pages."""
    from mini_engine.config import EngineConfig
    from mini_engine.llm import load_model

    config = EngineConfig()
    model = load_model(model_folder(folder), config)
    prompts = encoded(folder, BEGINNINGS)
    rows, seconds = timed(lambda: each_text_whole(model, prompts))
    packed, faster = timed(lambda: packed_rows(model, prompts, config.page_size))
    tokens = len(prompts) * NEW_TOKENS
    return (
        Side("every text whole, for each token", {"rows computed": rows, "tokens/s": tokens / seconds}),
        Side("packed rows over pages", {"rows computed": packed, "tokens/s": tokens / faster}),
    )


def each_text_whole(model: "Qwen3", prompts: Sequence[Sequence[int]]) -> int:
    """Generate greedily with L1 alone; return how many rows went through the layers."""
    import torch

    from mini_engine.attention.dense import DenseAttention, sdpa_attention

    rows = 0
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            rows += len(ids)
            last = torch.tensor([len(ids) - 1])
            with torch.inference_mode():
                logits = model(torch.tensor(ids), torch.arange(len(ids)), DenseAttention(sdpa_attention), last)
            ids.append(int(logits[0].argmax()))
    return rows


def packed_rows(model: "Qwen3", prompts: Sequence[Sequence[int]], page_size: int) -> int:
    """Generate the same with L2, all prompts side by side; return how many rows went through the layers."""
    import torch

    from mini_engine.attention.allocator import PageAllocator, pages_needed
    from mini_engine.attention.metadata import SequenceChunk, pack_batch
    from mini_engine.attention.paged import PagedAttention
    from mini_engine.attention.pool import KVPool

    needed = [pages_needed(len(prompt) + NEW_TOKENS, page_size) for prompt in prompts]
    allocator = PageAllocator(sum(needed))
    pool = KVPool(model.config, allocator.num_pages, page_size, model.embedding.dtype)
    taken = [allocator.allocate(count) for count in needed]
    texts, computed, rows = [list(prompt) for prompt in prompts], [0] * len(prompts), 0
    for _ in range(NEW_TOKENS):
        chunks = [SequenceChunk(t[done:], done, own) for t, done, own in zip(texts, computed, taken, strict=True)]
        batch = pack_batch(chunks, page_size)
        rows += len(batch.input_ids)
        with torch.inference_mode():
            attention = PagedAttention(pool, batch.metadata)
            logits = model(batch.input_ids, batch.positions, attention, batch.logit_rows)
        computed = [len(text) for text in texts]
        for text, row in zip(texts, logits, strict=True):
            text.append(int(row.argmax()))
    return rows


def keys_and_values(folder: Path | None) -> tuple[Side, Side]:
    """L3: one story with a long beginning, with and without its keys and values kept.

    A decode step reads every weight once, so its tokens per second are also bytes of weights per second.
    """
    from mini_engine.config import EngineConfig
    from mini_engine.driver import GreedyDriver
    from mini_engine.llm import load_model

    config = EngineConfig()
    model = load_model(model_folder(folder), config)
    (prompt,) = encoded(folder, [OPENING * 2])
    numbers = sum(math.prod(shape) for shape in model.config.weight_shapes().values())  # a tied table is the head
    read = 4 * numbers  # bytes

    def side(name: str, keep: bool) -> Side:
        """Generate; a token after the first costs one row if keys and values are kept, else the whole text."""
        times = [time.perf_counter()]
        for _ in GreedyDriver(model, config, use_kv_cache=keep).steps(prompt, NEW_TOKENS):
            times.append(time.perf_counter())
        after = range(1, NEW_TOKENS)
        rows = len(prompt) + sum(1 if keep else len(prompt) + token for token in after)
        prefill, decode = len(prompt) / (times[1] - times[0]), len(after) / (times[-1] - times[1])
        rates = {"prompt tokens/s": prefill, "tokens/s": decode, "weights GB/s": read * decode / 1e9}
        return Side(name, {"rows computed": rows, **rates})

    return side("the whole text again for each token", keep=False), side(
        "prefill once, then one row a token", keep=True
    )


def samples(folder: Path | None) -> tuple[Side, Side]:
    """L4: eight answers to one prompt, the likeliest token each time, or drawn."""
    from mini_engine.config import EngineConfig
    from mini_engine.llm import load_driver
    from mini_engine.sampler.params import SamplingParams

    driver = load_driver(folder, EngineConfig())
    (prompt,) = encoded(folder, BEGINNINGS[:1])

    def side(name: str, asked: Sequence[SamplingParams]) -> Side:
        """Generate eight answers."""
        answers, seconds = timed(lambda: [own for each in asked for own in driver.complete(prompt, each)])
        different = len({tuple(answer.token_ids) for answer in answers})
        return Side(name, {"different stories": different, "tokens/s": 8 * NEW_TOKENS / seconds})

    greedy = SamplingParams(max_new_tokens=NEW_TOKENS)  # eight of them in one request are refused: they are one answer
    drawn = SamplingParams(max_new_tokens=NEW_TOKENS, n=8, temperature=0.8, seed=0)
    return side("the likeliest token, eight times", [greedy] * 8), side("eight rows drawn together", [drawn])


def batches(folder: Path | None) -> tuple[Side, Side]:
    """L5: eight requests of different lengths, one after the other or together."""
    from mini_engine.sampler.params import SamplingParams

    texts = [f"{BEGINNINGS[place % 4]} and {name}" for place, name in enumerate(NAMES)]
    asked = [SamplingParams(max_new_tokens=6 * (place + 1), ignore_eos=True) for place in range(8)]
    return in_turns(
        partial(served, folder, "one after the other", texts, asked, max_running_requests=1),
        partial(served, folder, "together", texts, asked, max_running_requests=8),
    )


def prefixes(folder: Path | None) -> tuple[Side, Side]:
    """L6: eight requests that begin alike, without and with a cache of prefixes."""
    from mini_engine.sampler.params import SamplingParams

    texts = [OPENING + name for name in NAMES]
    asked = [SamplingParams(max_new_tokens=4)] * 8
    run = partial(served, folder, texts=texts, asked=asked, first="prompt tokens computed")
    return in_turns(
        partial(run, name="every prompt from its beginning"),
        partial(run, name="what was seen is kept", prefix_cache="radix"),
    )


def served(
    folder: Path | None, name: str, texts: Sequence[Any], asked: Sequence[Any], first: str = "steps", **options: Any
) -> Side:
    """Run requests through an engine with ``options``. ``texts``: prompts, or chats."""
    from mini_engine.config import EngineConfig
    from mini_engine.llm import LLM

    llm = LLM(folder, config=EngineConfig(**options))
    answers, seconds = timed(lambda: llm.generate(texts, list(asked), progress=False))
    log = llm.engine.log
    made = sum(len(answer.token_ids) for answer in answers)
    rows = sum(num for step in log for _, _, num in step.chunks)
    decoded = made - len(answers)  # the first token of an answer comes from the prompt's own row
    counts = {"steps": len(log), "prompt tokens computed": rows - decoded}
    return Side(name, {first: counts[first], "tokens/s": made / seconds})


def grammars(folder: Path | None) -> tuple[Side, Side]:
    """L7: eight answers that should be JSON of a schema, asked for in words or with masks."""
    from mini_engine.config import EngineConfig
    from mini_engine.llm import LLM
    from mini_engine.sampler.params import SamplingParams

    llm = LLM(folder, config=EngineConfig(max_running_requests=8, grammar_backend="fsm"))
    texts = [f"The name and the age of {name}, as JSON: " for name in NAMES]

    def side(name: str, **params: Any) -> Side:
        """Answer, and count the answers that are what was asked for."""
        asked = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=48, **params) for seed in range(8)]
        answers, seconds = timed(lambda: llm.generate(texts, asked, progress=False))
        made = sum(len(answer.token_ids) for answer in answers)
        masks = sum(answer.grammar_stats.num_masks for answer in answers if answer.grammar_stats)
        valid = sum(is_valid(answer.text) for answer in answers)
        return Side(name, {"valid answers": valid, "masks": masks, "tokens/s": made / seconds})

    return side("asked for in words"), side("with masks", json_schema=SCHEMA)


def is_valid(text: str) -> bool:
    """Whether a text is JSON of ``SCHEMA``."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def kernels(folder: Path | None) -> tuple[Side, Side]:
    """L8: one decode step. Every operation reads its input from memory and writes its result back."""
    from mini_engine.config import EngineConfig

    return (
        Side("torch, an operation at a time", {"operations in a step": operations(folder, EngineConfig())}),
        Side("kernels", {"operations in a step": operations(folder, EngineConfig(compute="triton"))}),
    )


def operations(folder: Path | None, config: "EngineConfig") -> int:
    """Return how many operations a decode step starts: torch's, without views, and launches of kernels."""
    from unittest.mock import patch

    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    from mini_engine.llm import load_driver

    count = 0

    class Counted(TorchDispatchMode):
        """Counts what computes; a view only names memory anew."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal count
            count += not any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
            return func(*args, **(kwargs or {}))

    def launched(original: Callable[..., Any]) -> Callable[..., Any]:
        """Count a launch as one operation, whatever it does inside."""

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            before = count
            result = original(self, *args, **kwargs)
            count = before + 1
            return result

        return run

    steps = load_driver(folder, config).steps(encoded(folder, BEGINNINGS)[1], 3)
    next(steps)
    next(steps)  # what is made once is made
    with (
        patch.object(GridExecutor, "__call__", launched(GridExecutor.__call__)),
        patch.object(JITFunction, "run", launched(JITFunction.run)),
        Counted(),
    ):
        next(steps)
    return count


def copies(folder: Path | None) -> tuple[Side, Side]:
    """L10: answers that quote their question, one after the other, without and with drafts."""
    from mini_engine.sampler.params import SamplingParams

    chats = [[{"role": "user", "content": question}] for question in ASKED]
    asked = [SamplingParams(max_new_tokens=2 * NEW_TOKENS)] * len(chats)
    return in_turns(
        partial(served, folder, "a token a step", chats, asked),
        partial(served, folder, "what followed the last time is drafted", chats, asked, drafts="ngram"),
    )


def weights(folder: Path | None) -> tuple[Side, Side]:
    """L11: a story with weights in bfloat16, and with the same weights in 8 bits."""
    from mini_engine.sampler.params import SamplingParams

    (prompt,) = encoded(folder, BEGINNINGS[:1])
    asked = SamplingParams(max_new_tokens=2 * NEW_TOKENS)

    def side(name: str, quantize: str) -> Side:
        """Load the model, add up the memory of its tensors, and tell a story."""
        from mini_engine.config import EngineConfig
        from mini_engine.llm import load_driver

        before = tensor_bytes()
        driver = load_driver(folder, EngineConfig(dtype="bfloat16", quantize=quantize))  # type: ignore[arg-type]
        held = (tensor_bytes() - before) // 1000
        (answer,), seconds = timed(lambda: driver.complete(prompt, asked))
        return Side(name, {"kB of weights": held, "tokens/s": len(answer.token_ids) / seconds})

    return in_turns(
        partial(side, "two bytes a weight", "off"),
        partial(side, "a byte a weight, and a scale for each row", "int8"),
    )


def ranks(folder: Path | None) -> tuple[Side, Side]:
    """L12: a story by one process, and by two that have half of every layer each."""
    from mini_engine.processes.gloo import run_ranks
    from mini_engine.processes.one_rank import tell

    (prompt,) = encoded(folder, BEGINNINGS[:1])

    def side(name: str, size: int) -> Side:
        """Tell a story; the start of the processes is not timed apart."""
        told, seconds = timed(lambda: run_ranks(size, tell, prompt, NEW_TOKENS, model_folder(folder)))
        most = max(held for _, held in told)
        return Side(name, {"kB of weights a process": most // 1000, "tokens/s": NEW_TOKENS / seconds})

    return in_turns(partial(side, "one process", 1), partial(side, "two processes, each with half of every layer", 2))


def tensor_bytes() -> int:
    """Return the bytes of all tensors that Python holds, each memory once."""
    from torch import Tensor, strided

    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is Tensor and each.layout is strided]
    memories = [each.untyped_storage() for each in tensors]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


LOADS = {
    "L2": Load("four stories, 24 tokens each", True, pages),
    "L3": Load("24 tokens after a long beginning", True, keys_and_values),
    "L4": Load("eight answers to one prompt", False, samples),
    "L5": Load("eight requests of 6 to 48 tokens", True, batches),
    "L6": Load("eight prompts that begin alike", True, prefixes),
    "L7": Load("eight answers in JSON", False, grammars),
    "L8": Load("one decode step", True, kernels),
    "L10": Load("eight answers that quote their question", True, copies),
    "L11": Load("a story by a model in bfloat16", True, weights),
    "L12": Load("a story by one model", True, ranks),
}


def in_turns(before: Callable[[], Side], after: Callable[[], Side]) -> tuple[Side, Side]:
    """Run both in turn, several times, and return the fastest of each: a busy machine slows now one, now the other."""
    turns = [(before(), after()) for _ in range(TURNS)]
    first, second = (max(own, key=lambda side: side.figures["tokens/s"]) for own in zip(*turns, strict=True))
    return first, second


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what ``call`` returns, and its seconds."""
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def model_folder(folder: Path | None) -> Path:
    """Return the checkpoint's folder; the embedded model's without one."""
    from mini_engine.checkpoint import resolve_folder

    return resolve_folder(folder)


def encoded(folder: Path | None, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts."""
    from mini_engine.checkpoint import load_tokenizer
    from mini_engine.prompts import encode_prompt

    tokenizer = load_tokenizer(model_folder(folder))
    return [encode_prompt(tokenizer, text) for text in texts]


def main(folder: str, lesson: str, model: str = "") -> None:
    """Measure a lesson's load and print its sides, and the lesson's tasks that are the reference's."""
    overlay = install_overlay(Path(folder), overlay_files(Path(folder)), fill=True)
    sides = LOADS[lesson].run(Path(model) if model else None)
    not_written = sorted(task for task in overlay.filled if task.startswith(lesson))
    print(json.dumps({"sides": [asdict(side) for side in sides], "missing": not_written}))


if __name__ == "__main__":
    main(*sys.argv[1:])
