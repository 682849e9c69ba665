"""What ``generate`` and ``chat`` do with one request: an engine runs it, and its answers are printed."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import typer
from transformers import PreTrainedTokenizerBase

from mini_engine.attention.allocator import pages_needed
from mini_engine.cli.tables import print_logprobs
from mini_engine.engine import Engine
from mini_engine.llm import make_engine
from mini_engine.outputs import Delta, RequestOutput, table_as_json
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams


def engine_for(
    driver: SamplingDriver, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], params: SamplingParams
) -> Engine:
    """Return an engine whose KV pool has room for the samples of one request. Mutates the driver's configuration.

    The default pool has room for the longest request that the model takes, and zeroing so much memory takes seconds.
    """
    longest = min(len(prompt_ids) + params.max_new_tokens, driver.config.positions(driver.model.config))
    pages = pages_needed(longest, driver.config.page_size) * params.num_samples
    driver.config = replace(driver.config, max_running_requests=params.num_samples, num_pages=pages)
    return make_engine(driver, tokenizer.backend_tokenizer)


def stream_answer(
    driver: SamplingDriver,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    show: Callable[[Delta], None],
) -> RequestOutput:
    """Generate one answer, ``show`` what is new of it as it comes, and return it whole.

    Warns if a grammar's answer ended before it was complete. Raises ``ValueError`` for a request that cannot be run.
    """
    with closing(engine_for(driver, tokenizer, prompt_ids, params)) as engine:
        name = engine.add_request(prompt_ids, params)
        output = engine.entries[name].output
        for delta in engine.deltas_of(name):
            if delta.error is not None and params.grammar is None:
                raise ValueError(f"token {len(output.token_ids) + 1} cannot be chosen: {delta.error}")
            if delta.error is not None:
                raise ValueError(delta.error)
            show(delta)
    if output.is_grammar_complete is False:
        typer.secho(
            f"warning: the answer is not complete: it ended by {output.finish_reason!r}; raise --max-new-tokens",
            fg="yellow",
            err=True,
        )
    return output


def complete_samples(
    driver: SamplingDriver, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], params: SamplingParams
) -> list[RequestOutput]:
    """Generate all samples of a request side by side. Raises ``ValueError`` if none of them can be run."""
    with closing(engine_for(driver, tokenizer, prompt_ids, params)) as engine:
        (answers,) = engine.generate([prompt_ids], params)
    if all(answer.error is not None for answer in answers):
        raise ValueError(answers[0].error)
    return answers


def seconds_of(answer: RequestOutput) -> dict[str, float]:
    """Return the seconds to the first token (prefill), the seconds of the rest and the decode rate."""
    assert answer.times is not None, "only a refused request has no times"
    first = answer.times.tokens[0]
    last = answer.times.tokens[-1]
    rate = (len(answer.token_ids) - 1) / (last - first) if last > first else 0.0
    return {"prefill_s": first - answer.times.added, "decode_s": last - first, "decode_tokens_per_s": rate}


def report(answer: RequestOutput) -> dict[str, Any]:
    """Return the JSON form of an answer."""
    known: dict[str, Any] = {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
    }
    if answer.error is not None:
        known["error"] = answer.error
    if answer.logprobs:
        known["logprobs"] = [table_as_json(table) for table in answer.logprobs]
    return known | answer.grammar_as_json()


def print_answer_json(answer: RequestOutput, load_s: float) -> None:
    """Print one answer as a JSON object."""
    timings = {"load_s": load_s, **seconds_of(answer)}
    typer.echo(json.dumps({"prompt_ids": answer.prompt_ids, **report(answer), "timings": timings}))


def print_samples_json(answers: Sequence[RequestOutput], load_s: float, total_s: float) -> None:
    """Print several answers of a prompt as a JSON object."""
    samples = [{**report(answer), "cumulative_logprob": answer.cumulative_logprob} for answer in answers]
    timings = {"load_s": load_s, "total_s": total_s}
    typer.echo(json.dumps({"prompt_ids": answers[0].prompt_ids, "samples": samples, "timings": timings}))


def print_samples(tokenizer: PreTrainedTokenizerBase, answers: Sequence[RequestOutput]) -> None:
    """Print several answers of a prompt, each under a heading."""
    for answer in answers:
        index = int(answer.request_id)  # an engine numbers its requests, and these are its only ones
        typer.secho(f"sample {index + 1}, finished by {answer.finish_reason}", dim=True, err=True)
        typer.echo(answer.text)
        show_logprobs(tokenizer, answer)


def show_logprobs(tokenizer: PreTrainedTokenizerBase, answer: RequestOutput) -> None:
    """Print the log-probabilities of an answer, if it has any."""
    if answer.logprobs:
        print_logprobs(tokenizer, answer.logprobs)


def print_summary(answer: RequestOutput) -> None:
    """Print counts and rates of an answer to standard error."""
    seconds = seconds_of(answer)
    drafts = f", {answer.num_accepted} of {answer.num_drafted} drafted tokens came" if answer.num_drafted else ""
    typer.secho(
        f"{len(answer.prompt_ids)} prompt tokens in {seconds['prefill_s']:.2f} s, {len(answer.token_ids)} tokens at "
        f"{seconds['decode_tokens_per_s']:.0f} per second, finished by {answer.finish_reason}{drafts}",
        dim=True,
        err=True,
    )
