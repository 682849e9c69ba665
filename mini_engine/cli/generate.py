"""``mini-engine generate``: one prompt, one streamed answer or several samples."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
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
from mini_engine.outputs import Delta, RequestOutput
from mini_engine.prompts import encode_chat, encode_prompt
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
        bool, typer.Option("--trace", help="Print, for every token, the distribution after every stage; no drafts.")
    ] = False,
    receipt: Annotated[
        Path | None, typer.Option(help="Write what the answer depended on to this file, for mini-engine replay.")
    ] = None,
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
        limits = grammar.params(thinks=chat and think and prefill is None) | {"receipt": receipt is not None}
        params = make_params(answers, drawing, shaping, max_new_tokens=max_new_tokens, **limits)
        if receipt is not None:
            write_receipts(receipt, [])  # it may be no place to write to, and a model takes long to load
        began = time.perf_counter()
        config = computing.config(**grammar.engine_options())
        driver, tokenizer = start(model, computing.engine, config, params)
        driver.sampler.trace = SamplingTrace() if trace else None
        load_s = time.perf_counter() - began
        text = sys.stdin.read() if prompt == "-" else prompt
        ids = chat_ids(tokenizer, text, think, prefill) if chat else encode_prompt(tokenizer, text)
        if params.num_samples > 1:
            given = show_samples(driver, tokenizer, ids, params, load_s if as_json else None)
        elif as_json:
            given = [stream_answer(driver, tokenizer, ids, params, lambda _: None)]
            print_answer_json(given[0], load_s)
        else:
            before = (prefill or "") if chat else text
            given = [show_answer(driver, tokenizer, ids, params, "" if trace else before)]
        if receipt is not None:
            write_receipts(receipt, given)


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
) -> list[RequestOutput]:
    """Generate several answers, print them as text, or as JSON if ``load_s`` is given, and return them."""
    began = time.perf_counter()
    samples = complete_samples(driver, tokenizer, ids, params)
    if load_s is None:
        print_samples(tokenizer, samples)
    else:
        print_samples_json(samples, load_s, time.perf_counter() - began)
    return samples


def show_answer(
    driver: SamplingDriver, tokenizer: PreTrainedTokenizerBase, ids: list[int], params: SamplingParams, before: str
) -> RequestOutput:
    """Print ``before``, one answer as it comes, or its traces if the sampler has one, and what it took. Return it."""
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
    return answer


def write_receipts(file: Path, answers: Sequence[RequestOutput]) -> None:
    """Write the receipts of answers, one a line. Raises ``ValueError`` if that cannot be."""
    try:
        lines = [json.dumps(answer.receipt) + "\n" for answer in answers if answer.receipt is not None]
        file.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be written ({error}); give another --receipt") from error
