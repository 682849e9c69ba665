"""The composition root: from the name of a model to an engine that is ready to run.

``LLM`` is the short way in: texts, chats or ids go in, answers come out. It is an ``Engine`` over a ``SamplingDriver``
over a model, and the functions here build these three.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from tokenizers import Tokenizer

from mini_engine.attention.pool import slot_bytes
from mini_engine.checkpoint import (
    load_config,
    load_eos_ids,
    load_tokenizer,
    load_weights,
    resolve_folder,
    stored_defaults,
)
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.constraints import Constraints
from mini_engine.device import check_device, free_memory
from mini_engine.engine import Engine
from mini_engine.fast.quantized_files import open_quantized
from mini_engine.grammar.service import GrammarService
from mini_engine.model import Qwen3
from mini_engine.other_names import explanation
from mini_engine.outputs import Delta, RequestOutput
from mini_engine.prompts import Prompt, each_prompt, encode_prompt, is_chat, is_list
from mini_engine.radix_cache import RadixCache
from mini_engine.ranks.split import Group, Shards, Split, SplitProjections, check_size
from mini_engine.receipt import Receipts
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.drafts import Drafter
from mini_engine.ways import make_allocator, way_of
from mini_engine.weights import Weights

GENERATION_CONFIGS = ("auto", "none")  # whether a checkpoint's stored defaults of requests are taken


class LLM:
    """A model, its tokenizer and an engine.

    ``LLM()`` runs the embedded model; ``LLM("folder")`` and ``LLM("Qwen/Qwen3-0.6B")`` run a checkpoint. Without a
    ``config`` the engine is set up for many requests at a time: ``EngineConfig.serving(**options)``. With
    ``config=EngineConfig()`` every option is off.

    ``chat_params`` are the parameters of a chat that is given none: what the checkpoint's ``generation_config.json``
    stores. Texts and ids are greedy.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        generation_config: str = "auto",
        drafter: Callable[[], Drafter] | None = None,
        **options: Any,
    ) -> None:
        """Load ``model`` and its tokenizer; shows a progress bar on a terminal.

        ``generation_config``: "none" for chats that are greedy, whatever the checkpoint stores. ``drafter`` goes with
        drafts="own": it is called for each request and returns what guesses its tokens (``scheduler/drafts.py``).
        Raises ``ValueError`` for a faulty checkpoint, for an unknown or invalid option, and for ``config`` and options
        together.
        """
        if config is not None and options:
            raise ValueError(f"both config and {', '.join(options)} are given; put all options into config")
        unknown = options.keys() - {each.name for each in fields(EngineConfig)}
        if unknown:
            wrong = f"{min(unknown)} is not an option of EngineConfig; see help(EngineConfig)"
            raise ValueError(explanation(min(unknown), "EngineConfig") or wrong)
        config = config or EngineConfig.serving(**options)
        check_device(config.device)
        folder = resolve_folder(model)
        self.chat_params = SamplingParams(**load_defaults(folder, generation_config))
        self.tokenizer = load_tokenizer(folder)
        driver = load_driver(folder, config)
        self.engine = make_engine(driver, self.tokenizer.backend_tokenizer, drafter=drafter)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        think: bool = True,
        continue_final_message: bool = False,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer all ``prompts``, many at a time, and return the answers in the order of the prompts.

        A prompt is a text, a chat (a list of messages), a list of token ids, or the mapping with "input_ids" that
        transformers makes of one of them. A single one need not stand in a list; a mapping may hold a batch. A text
        gets the special tokens that the tokenizer puts around one. ``params`` are for all prompts, or a list with
        those of each. ``None``: ``chat_params`` for a chat, greedy for anything else. ``think``: let a model that can
        think do so, in chats. ``continue_final_message``: the answer goes on with the last message of each chat, which
        is the assistant's. ``progress``: show a bar; by default on a terminal, if there is more than one prompt.

        Each prompt has ``n`` answers, which follow one another, also where it cannot be encoded or run: then they have
        ``finish_reason`` "error" and say why in ``error``. The others go on. Raises ``ValueError`` if there are not as
        many ``params`` as prompts, or other ones than ``SamplingParams``.
        """
        each = each_prompt(prompts)
        given = params_of(params, len(each))
        own_params = [own or self.default_params(prompt) for own, prompt in zip(given, each, strict=True)]
        ids, refused = dict[int, list[int]](), dict[int, list[RequestOutput]]()
        for place, prompt in enumerate(each):
            try:
                ids[place] = encode_prompt(self.tokenizer, prompt, think, continue_final_message)
            except ValueError as error:
                refused[place] = [RequestOutput(f"refused {place}", [], finish_reason="error", error=str(error))]
        shown = sys.stderr.isatty() and len(ids) > 1 if progress is None else progress
        answered = self.engine.generate(list(ids.values()), [own_params[place] for place in ids], shown)
        answers = refused | dict(zip(ids, answered, strict=True))
        return [answer for place, own in enumerate(own_params) for answer in repeated(answers[place], own.n)]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        think: bool = True,
        continue_final_message: bool = False,
    ) -> Iterator[Delta]:
        """Yield what is new of one answer as it comes: ``delta.text`` can be printed at once.

        The options are those of ``generate``. Closing the iterator ends the request. Raises ``ValueError`` for a prompt
        that cannot be run.
        """
        (own,) = params_of(params, 1)
        ids = encode_prompt(self.tokenizer, prompt, think, continue_final_message)
        return self.engine.stream(ids, own or self.default_params(prompt))

    def default_params(self, prompt: Prompt) -> SamplingParams:
        """Return the parameters of a prompt that is given none."""
        if is_chat(prompt):
            return self.chat_params
        if self.chat_params != SamplingParams():
            warnings.warn(
                "the checkpoint stores defaults that are taken for chats alone; this text is decoded greedily (give it "
                "params=llm.chat_params to take them, or any other to be sure)",
                stacklevel=3,
            )
        return SamplingParams()

    def close(self) -> None:
        """End what still runs."""
        self.engine.close()
        self.engine.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def params_of(params: Any, count: int) -> list[SamplingParams | None]:
    """Return the parameters of each of ``count`` prompts. Raises ``ValueError`` for another number, or for others."""
    each: list[Any] = list(params) if is_list(params) else [params] * count
    for place, own in enumerate(each):
        if not isinstance(own, SamplingParams | None):
            raise ValueError(f"the parameters of prompt {place} are {own!r}; give SamplingParams(…)")
    if len(each) != count:
        raise ValueError(f"{count} prompts and {len(each)} parameters; give one for all or one for each")
    return each


def repeated(answers: list[RequestOutput], count: int) -> list[RequestOutput]:
    """Return ``count`` answers: a prompt that was refused has one, so it is repeated."""
    return answers + [replace(answers[-1]) for _ in range(count - len(answers))]


def load_defaults(folder: Path, choice: str) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that ``folder`` stores as defaults; none for the ``choice`` "none".

    Raises ``ValueError`` for another choice than "auto" or "none", and for a stored value that no request can have.
    """
    if choice not in GENERATION_CONFIGS:
        raise ValueError(f"generation_config is {choice!r}; choose one of {', '.join(GENERATION_CONFIGS)}")
    stored = stored_defaults(folder) if choice == "auto" else {}
    try:
        SamplingParams(**stored)
    except ValueError as error:
        raise ValueError(
            f"{folder} stores defaults that cannot be taken: {error}; correct them there, or take none with the "
            "generation config 'none'"
        ) from error
    return stored


def load_model(folder: Path, engine: EngineConfig, progress: bool = False, group: Group | None = None) -> Qwen3:
    """Read the checkpoint in ``folder`` and build the model, or this process's part of it if there is a ``group``.

    Raises ``ValueError`` naming the file at fault, for a device that is not there, for a ``max_model_len`` above the
    model's positions, and for a part that would have other bits.
    """
    check_device(engine.device)
    config = load_config(folder)
    engine.positions(config)
    quantized = open_quantized(folder, config, engine)
    weights, engine = quantized or (load_weights(folder, config, engine, progress), engine)
    if group is None:
        return build_model(config, weights, engine)
    shards = Shards(weights, Split(config, group, engine.tensor_parallel_mode == "sum"))
    weights.pieces = {name: piece.place for name, piece in shards.pieces.items()}
    return build_model(shards.split.config, shards, engine)


def build_model(config: ModelConfig, weights: Weights, engine: EngineConfig) -> Qwen3:
    """Build the model of the way to compute that ``engine`` asks for.

    Empties ``weights``. Raises ``ValueError`` if the way needs a library that is not installed, or does not have what
    the model's family computes.
    """
    if engine.compute not in config.family.ways:
        raise ValueError(
            f"compute is {engine.compute!r}, which does not compute the family {config.model_type!r}; choose one of "
            f"{', '.join(config.family.ways)}"
        )
    return way_of(engine).model(config, weights, engine)


def make_driver(
    model: Qwen3, engine: EngineConfig, eos_token_ids: frozenset[int] = frozenset(), **parts: Any
) -> SamplingDriver:
    """Return the driver of a model that ``build_model`` made for the same ``engine``.

    ``parts``: another ``sampler`` or ``head``, as ``SamplingDriver`` takes them. Raises ``ValueError`` if
    ``batch_invariant`` is asked for and this machine cannot keep it, and for a ``max_model_len`` above the model's
    positions.
    """
    engine = fitted(model, engine)
    way = way_of(engine)
    if isinstance(model.projections, SplitProjections):
        model.projections.check_heads(
            lambda own: way.attention(engine, SimpleNamespace(config=own, embedding=model.embedding)), engine.dtype
        )
    if way.sampler is not None and "sampler" not in parts:
        parts["sampler"] = way.sampler(model)
    return SamplingDriver(model, engine, eos_token_ids, attention=way.attention(engine, model), **parts)


def fitted(model: Qwen3, engine: EngineConfig) -> EngineConfig:
    """Return the configuration with a default KV pool that the memory has room for, once ``model`` is there.

    Where the default is larger, ``num_pages`` becomes what fits, and so does a ``max_model_len`` that is not given; a
    warning says so. A tenth of the free memory is left for what is computed. A ``max_model_len`` that does not fit is
    left to the pool to refuse.

    Raises ``ValueError`` for a ``max_model_len`` above the model's positions.
    """
    longest = engine.positions(model.config)
    if engine.num_pages is not None:
        return engine
    ranks = engine.tensor_parallel  # that share this machine's memory
    page = slot_bytes(model.config, model.embedding.dtype) * engine.page_size * ranks  # bytes
    pages = max(1, int(free_memory(engine.device) * 0.9) // page)
    room = pages * engine.page_size  # positions
    if pages >= engine.pool_pages(model.config) or room < (engine.max_model_len or 1):
        return engine
    most = min(longest, room)
    warnings.warn(
        f"the KV pool has {pages} pages (num_pages), and a request at most {most} of the model's "
        f"{model.config.max_position_embeddings} positions (max_model_len): more does not fit into the memory that is "
        "free; set one of the two to decide yourself",
        stacklevel=2,
    )
    return replace(engine, max_model_len=most, num_pages=pages)


def make_engine(
    driver: SamplingDriver,
    tokenizer: Tokenizer | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    constraints: Constraints | None = None,
    drafter: Callable[[], Drafter] | None = None,
) -> Engine:
    """Return an engine with all parts that ``driver.config`` asks for; without a ``tokenizer`` there is no text.

    ``clock`` returns seconds. ``constraints``: others than the grammars of ``grammar_backend``. ``drafter``: called for
    each request with drafts="own".
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
        drafter=drafter,
    )
    if driver.folder is not None:
        engine.begin_receipts = Receipts(engine, driver.folder).begin
    return engine


def load_driver(model: str | Path | None = None, engine: EngineConfig | None = None) -> SamplingDriver:
    """Load ``model`` (``None``: the embedded one; a folder; a hub id) and return a driver.

    Its ``steps`` and ``generate`` are the greedy driver's, ``stream`` and ``complete`` take sampling parameters.

    Shows a progress bar on a terminal. Raises ``ValueError`` for a faulty checkpoint, and where ``batch_invariant`` is
    asked for and this machine cannot keep it, and for a device that is not there. With ``tensor_parallel`` it returns
    at rank 0 alone: each other rank computes for it until the process ends.
    """
    engine = engine or EngineConfig()
    folder = resolve_folder(model)
    eos = load_eos_ids(folder)
    if engine.tensor_parallel > 1:
        from mini_engine.ranks.processes import join  # torch.distributed, which one process does without
        from mini_engine.ranks.worker import lead_or_follow

        check_size(engine.tensor_parallel, load_config(folder))  # before any rank is started
        ranks = join(folder, engine)
        with ranks.guarded():
            part = load_model(folder, engine, sys.stderr.isatty() and ranks.rank == 0, ranks)
            return lead_or_follow(make_driver(part, engine, eos), folder, engine, ranks)
    driver = make_driver(load_model(folder, engine, progress=sys.stderr.isatty()), engine, eos)
    driver.folder = folder
    return driver
