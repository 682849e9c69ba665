"""The composition root: from the name of a model to an engine that is ready to run.

``LLM`` is the short way in: texts, chats or ids go in, answers come out. It is an ``Engine`` over a ``SamplingDriver``
over a model, and the functions here build these three.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from importlib import import_module
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from tokenizers import Tokenizer
from torch import Tensor

from mini_engine.attention.allocator import PageAllocator
from mini_engine.checkpoint import load_config, load_eos_ids, load_tokenizer, load_weights, resolve_folder
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.constraints import Constraints
from mini_engine.engine import Engine
from mini_engine.fast.fused import FusedQwen3
from mini_engine.fast.pages import PlacedAllocator
from mini_engine.fast.products import make_projections
from mini_engine.fast.select import select_attention
from mini_engine.grammar.service import GrammarService
from mini_engine.invariant.attention import query_rows
from mini_engine.model import Qwen3
from mini_engine.outputs import Delta, RequestOutput
from mini_engine.prompts import Prompt, encode_prompt, is_chat
from mini_engine.radix_cache import RadixCache
from mini_engine.receipt import Receipts
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.scheduler import Allocator


class LLM:
    """A model, its tokenizer and an engine.

    ``LLM()`` runs the embedded model; ``LLM("folder")`` and ``LLM("Qwen/Qwen3-0.6B")`` run a checkpoint. Without a
    ``config`` the engine is set up for many requests at a time: ``EngineConfig.serving(**options)``. With
    ``config=EngineConfig()`` every option is off.
    """

    def __init__(self, model: str | Path | None = None, *, config: EngineConfig | None = None, **options: Any) -> None:
        """Load ``model`` and its tokenizer; shows a progress bar on a terminal.

        Raises ``ValueError`` for a faulty checkpoint, for an unknown or invalid option, and for ``config`` and options
        together.
        """
        if config is not None and options:
            raise ValueError(f"both config and {', '.join(options)} are given; put all options into config")
        unknown = options.keys() - {each.name for each in fields(EngineConfig)}
        if unknown:
            raise ValueError(f"{min(unknown)} is not an option of EngineConfig; see help(EngineConfig)")
        folder = resolve_folder(model)
        self.tokenizer = load_tokenizer(folder)
        driver = load_driver(folder, config or EngineConfig.serving(**options))
        self.engine = make_engine(driver, self.tokenizer.backend_tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        think: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer all ``prompts``, many at a time, and return the answers in the order of the prompts.

        A prompt is a text, a chat (a list of messages) or a list of token ids; a single one need not stand in a list.
        ``params`` are for all prompts, or a list with those of each; ``None`` is greedy. With ``n`` answers for each
        prompt, those of one prompt follow one another. ``think``: let a model that can think do so, in chats.
        ``progress``: show a bar; by default on a terminal, if there is more than one prompt.

        An answer to a prompt that cannot be encoded or run has ``finish_reason`` "error" and says why in ``error``; the
        others go on. Raises ``ValueError`` if there are not as many ``params`` as prompts.
        """
        each: Sequence[Prompt] = [prompts] if is_single(prompts) else prompts  # type: ignore[assignment, list-item]
        own_params = [params or SamplingParams()] * len(each) if not isinstance(params, Sequence) else list(params)
        if len(own_params) != len(each):
            raise ValueError(f"{len(each)} prompts and {len(own_params)} parameters; give one for all or one for each")
        ids, refused = dict[int, list[int]](), dict[int, list[RequestOutput]]()
        for place, prompt in enumerate(each):
            try:
                ids[place] = encode_prompt(self.tokenizer, prompt, think)
            except ValueError as error:
                refused[place] = [RequestOutput(f"refused {place}", [], finish_reason="error", error=str(error))]
        shown = sys.stderr.isatty() and len(ids) > 1 if progress is None else progress
        answered = self.engine.generate(list(ids.values()), [own_params[place] for place in ids], shown)
        answers = refused | dict(zip(ids, answered, strict=True))
        return [answer for place in range(len(each)) for answer in answers[place]]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, think: bool = True) -> Iterator[Delta]:
        """Yield what is new of one answer as it comes: ``delta.text`` can be printed at once.

        Closing the iterator ends the request. Raises ``ValueError`` for a prompt that cannot be run.
        """
        return self.engine.stream(encode_prompt(self.tokenizer, prompt, think), params or SamplingParams())

    def close(self) -> None:
        """End what still runs."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of prompts."""
    return isinstance(prompts, str) or is_chat(prompts) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def load_model(folder: Path, engine: EngineConfig, progress: bool = False) -> Qwen3:
    """Read the checkpoint in ``folder`` and build the model. Raises ``ValueError`` naming the file at fault."""
    config = load_config(folder)
    return build_model(config, load_weights(folder, config, engine, progress), engine)


def build_model(config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig) -> Qwen3:
    """Build the model that ``engine`` asks for: over kernels, fused if its weights are packed, else the plain one.

    Consumes the dictionary. Raises ``ValueError`` if kernels are asked for and their library is not installed.
    """
    if engine.compute in KERNEL_MODULES:
        model: Qwen3 = kernels_module(engine.compute).build_kernel_model(config, weights, engine)
        return model
    kind = FusedQwen3 if engine.packs_weights else Qwen3
    return kind(config, weights, make_projections(engine))


def make_driver(
    model: Qwen3, engine: EngineConfig, eos_token_ids: frozenset[int] = frozenset(), **parts: Any
) -> SamplingDriver:
    """Return the driver of a model that ``build_model`` made for the same ``engine``.

    ``parts``: another ``sampler`` or ``head``, as ``SamplingDriver`` takes them; not with Triton kernels.
    Raises ``ValueError`` if ``batch_invariant`` is asked for and this machine cannot keep it.
    """
    if engine.compute in KERNEL_MODULES:
        driver: SamplingDriver = kernels_module(engine.compute).make_kernel_driver(
            model, engine, eos_token_ids, **parts
        )
        return driver
    cfg = model.config
    if engine.batch_invariant:
        query_rows(cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, model.embedding.dtype)
    return SamplingDriver(model, engine, eos_token_ids, attention=select_attention(engine, cfg), **parts)


def make_engine(
    driver: SamplingDriver,
    tokenizer: Tokenizer | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    constraints: Constraints | None = None,
) -> Engine:
    """Return an engine with all parts that ``driver.config`` asks for; without a ``tokenizer`` there is no text.

    ``clock`` returns seconds. ``constraints``: others than the grammars of ``grammar_backend``. Raises ``ValueError``
    for an unknown grammar backend.
    """
    config = driver.config
    if constraints is None and config.grammar_backend != "none":
        constraints = GrammarService(config, tokenizer, driver.vocabulary, clock)
    engine = Engine(
        driver,
        tokenizer,
        clock=clock,
        allocator=make_allocator(config),
        prefix_cache=None if config.prefix_cache is None else RadixCache(config.page_size, config.eviction),
        constraints=constraints,
    )
    if driver.folder is not None:
        engine.begin_receipts = Receipts(engine, driver.folder).begin
    return engine


def make_allocator(config: EngineConfig) -> Callable[[int], Allocator]:
    """Return what makes the allocator of a pool of so many pages.

    The faster forms of attention read a sequence in place where its pages follow one another, so pages are placed.
    """
    if config.packs_weights:
        return lambda num_pages: PlacedAllocator(num_pages, num_pages // config.max_running_requests)
    return PageAllocator


# compute -> the module with its model and driver, its library in words and as a module, the extra that installs it
KERNEL_MODULES = {
    "triton": ("mini_engine.kernels.driver", "Triton (built for Linux alone)", "triton", "kernels"),
    "compiled": ("mini_engine.fast.compiled.driver", "Numba", "numba", "compiled"),
}


def kernels_module(compute: str) -> ModuleType:
    """Import what computes with kernels, and with it their library, which an engine without them does without.

    Raises ``ValueError`` if the library is not installed.
    """
    module, title, library, extra = KERNEL_MODULES[compute]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise ValueError(
            f"compute={compute!r} needs {title}, which is not installed; pip install 'mini-engine[{extra}]', or choose "
            "another way to compute"
        ) from None


def load_driver(model: str | Path | None = None, engine: EngineConfig | None = None) -> SamplingDriver:
    """Load ``model`` (``None``: the embedded one; a folder; a hub id) and return a driver.

    Its ``steps`` and ``generate`` are the greedy driver's, ``stream`` and ``complete`` take sampling parameters.

    Shows a progress bar on a terminal. Raises ``ValueError`` for a faulty checkpoint, and where ``batch_invariant`` is
    asked for and this machine cannot keep it.
    """
    engine = engine or EngineConfig()
    folder = resolve_folder(model)
    driver = make_driver(load_model(folder, engine, progress=sys.stderr.isatty()), engine, load_eos_ids(folder))
    driver.folder = folder
    return driver
