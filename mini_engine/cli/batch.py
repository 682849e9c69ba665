"""``mini-engine batch``: a file of requests through the engine, many at a time; each answer is written as it ends."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mini_engine.cli import options
from mini_engine.cli.batch_lines import LineReader
from mini_engine.cli.batch_run import LEAST_WINDOW, run_file
from mini_engine.cli.grammar import Grammar
from mini_engine.cli.options import Answers, Drawing, Shaping, make_params, with_groups
from mini_engine.cli.start import input_errors, start
from mini_engine.config import EngineConfig
from mini_engine.device import check_device
from mini_engine.engine import Engine
from mini_engine.llm import make_engine
from mini_engine.radix_cache import EVICTIONS
from mini_engine.scheduler.policy import POLICIES


@dataclass(frozen=True)
class Serving:
    """How many requests at a time are computed."""

    running: Annotated[int, typer.Option(help="So many requests share a step.")] = 32
    tokens_per_step: Annotated[int, typer.Option(help="Rows of a step; longer prompts are computed in chunks.")] = 512
    policy: Annotated[
        str, typer.Option(help=f"Who of the next {LEAST_WINDOW} or more lines is let in first: {', '.join(POLICIES)}.")
    ] = "fcfs"
    preemption: Annotated[bool, typer.Option(help="Start on an estimate; send back when pages run out.")] = True
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16
    num_pages: Annotated[int | None, typer.Option(help="Pages in the pool.")] = None
    max_model_len: options.MaxModelLen = None
    prefix_cache: Annotated[bool, typer.Option(help="Keep what was computed for requests that begin alike.")] = False
    eviction: Annotated[str, typer.Option(help=f"With it, who goes first: {', '.join(EVICTIONS)}.")] = "lru"
    dtype: options.DtypeOption = "float32"
    device: options.Device = "cpu"
    compute: options.ServingCompute = None
    quantize: options.QuantizeOption = "off"
    batch_invariant: options.BatchInvariant = False
    drafts: options.DraftsOption = "off"
    tensor_parallel: options.TensorParallel = 1
    tensor_parallel_mode: options.TensorParallelMode = "gather"
    engine: options.Engine = None

    def config(self, grammar: Grammar) -> EngineConfig:
        """Build the configuration. Raises ``ValueError`` as it does."""
        chosen = {"compute": self.compute, "grammar_backend": grammar.grammar_backend}
        return EngineConfig.serving(
            dtype=self.dtype,
            device=self.device,
            batch_invariant=self.batch_invariant,
            max_running_requests=self.running,
            max_tokens_per_step=self.tokens_per_step,
            policy=self.policy,
            preemption=self.preemption,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_model_len=self.max_model_len,
            prefix_cache="radix" if self.prefix_cache else None,
            eviction=self.eviction,
            wait_for_prefix=32 if self.prefix_cache else None,
            jump_forward=grammar.jump_forward,
            drafts=self.drafts,
            quantize=self.quantize,
            tensor_parallel=self.tensor_parallel,
            tensor_parallel_mode=self.tensor_parallel_mode,
            **{name: value for name, value in chosen.items() if value is not None},
        )


@with_groups
def batch(
    file: Annotated[str, typer.Argument(help="Requests, one on each line; '-' is standard input.")],
    *,
    output: Annotated[Path | None, typer.Option(help="File of the answers; standard output if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip the lines that --output has answers for.")] = False,
    ordered: Annotated[bool, typer.Option("--ordered", help="Write answers in the order of FILE.")] = False,
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = 200,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap texts in the chat template.")] = False,
    think: Annotated[bool, typer.Option(help="In chats: let the model think before it answers.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends an answer; several times for more.")
    ] = None,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Add to answers what they depended on, for mini-engine replay.")
    ] = False,
    answers: Answers,
    drawing: Drawing,
    shaping: Shaping,
    grammar: Grammar,
    serving: Serving,
) -> None:
    """Answer every request of FILE, many at a time, one JSON line for each as it ends. Ctrl-C loses nothing."""
    with input_errors():
        config = serving.config(grammar)
        check_device(config.device)  # before a file of answers is made
        limits = grammar.params(thinks=think)
        limits |= {"max_new_tokens": max_new_tokens, "stop": stop, "receipt": receipt}
        base = make_params(answers, drawing, shaping, **limits)

        def load() -> tuple[Engine, LineReader]:
            driver, tokenizer = start(model, serving.engine, config, base)
            return make_engine(driver, tokenizer.backend_tokenizer), LineReader(tokenizer, base, chat, think)

        run_file(load, file, output, resume, ordered)
