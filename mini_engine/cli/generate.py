"""``mini-engine generate``: one prompt, one streamed answer or several samples."""

import sys
import time
from typing import Annotated

import typer
from transformers import PreTrainedTokenizerBase

from mini_engine.cli.answers import (
    complete_samples,
    print_answer_json,
    print_samples,
    print_samples_json,
    print_summary,
    show_logprobs,
    stream_answer,
)
from mini_engine.cli.grammar import Grammar
from mini_engine.cli.options import Answers, Computing, Drawing, MaxNewTokens, Model, Shaping, make_params, with_groups
from mini_engine.cli.start import input_errors, start
from mini_engine.cli.tables import print_trace
from mini_engine.outputs import Delta
from mini_engine.prompts import encode_chat, encode_text
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.trace import SamplingTrace


@with_groups
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; '-' reads it from standard input.")],
    *,
    model: Model = None,
    max_new_tokens: MaxNewTokens = 200,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the chat template.")] = False,
    think: Annotated[bool, typer.Option(help="With --chat: let the model think before it answers.")] = True,
    prefill: Annotated[str | None, typer.Option(help="With --chat: the answer begins with this text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print, for every token, the distribution after every stage.")
    ] = False,
    answers: Answers,
    drawing: Drawing,
    shaping: Shaping,
    grammar: Grammar,
    computing: Computing,
) -> None:
    """Continue PROMPT and stream the text: greedily, or as the sampling options say."""
    with input_errors():
        if not chat and (not think or prefill is not None):
            name = "--no-think" if prefill is None else "--prefill"
            raise ValueError(f"{name} only means something with --chat; add --chat or leave it out")
        if trace and (as_json or answers.n > 1 or answers.best_of):
            raise ValueError("--trace prints tables for one streamed answer; leave out --json, --n and --best-of")
        limits = grammar.params(thinks=chat and think and prefill is None)
        params = make_params(answers, drawing, shaping, max_new_tokens=max_new_tokens, **limits)
        began = time.perf_counter()
        config = computing.config(**grammar.engine_options())
        driver, tokenizer = start(model, computing.engine, config, params)
        driver.sampler.trace = SamplingTrace() if trace else None
        load_s = time.perf_counter() - began
        text = sys.stdin.read() if prompt == "-" else prompt
        ids = chat_ids(tokenizer, text, think, prefill) if chat else encode_text(tokenizer, text)
        if params.num_samples > 1:
            show_samples(driver, tokenizer, ids, params, load_s if as_json else None)
        elif as_json:
            print_answer_json(stream_answer(driver, tokenizer, ids, params, lambda _: None), load_s)
        else:
            before = (prefill or "") if chat else text
            show_answer(driver, tokenizer, ids, params, "" if trace else before)


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str, think: bool, prefill: str | None) -> list[int]:
    """Return the ids of a chat of one question, and of the ``prefill`` that its answer begins with."""
    begun = [] if prefill is None else [{"role": "assistant", "content": prefill}]
    return encode_chat(tokenizer, [{"role": "user", "content": text}, *begun], think, prefill is not None)


def show_samples(
    driver: SamplingDriver,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    params: SamplingParams,
    load_s: float | None,
) -> None:
    """Generate several answers and print them as text, or as JSON if ``load_s`` is given."""
    began = time.perf_counter()
    samples = complete_samples(driver, tokenizer, ids, params)
    if load_s is None:
        print_samples(tokenizer, samples)
    else:
        print_samples_json(samples, load_s, time.perf_counter() - began)


def show_answer(
    driver: SamplingDriver, tokenizer: PreTrainedTokenizerBase, ids: list[int], params: SamplingParams, before: str
) -> None:
    """Print ``before``, then one answer as it comes, or its traces if the sampler has one; then what it took."""
    stages = driver.sampler.trace

    def show(delta: Delta) -> None:
        if stages is None:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        elif delta.token_id is not None:
            print_trace(stages, tokenizer, delta.token_id)

    sys.stdout.write(before)
    answer = stream_answer(driver, tokenizer, ids, params, show)
    typer.echo()
    show_logprobs(tokenizer, answer)
    print_summary(answer)
