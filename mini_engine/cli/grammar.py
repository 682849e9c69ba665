"""``generate`` with a grammar: the options that give one, and the engine that keeps to it.

Owns: how a grammar is named on a command line, and an engine's answer in the form that ``generate`` prints. Must not
know: how grammars work.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from transformers import PreTrainedTokenizerBase

from mini_engine.llm import make_engine
from mini_engine.outputs import RequestOutput
from mini_engine.sampler.driver import FinishReason, SampledGeneration, SampledStep, SamplingDriver
from mini_engine.sampler.params import SamplingParams

GRAMMAR_PANEL = "What the answer must be"
Regex = Annotated[
    str | None,
    typer.Option(help="The whole answer matches this regular expression.", rich_help_panel=GRAMMAR_PANEL),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(help="The answer is JSON that is valid under the schema in this file.", rich_help_panel=GRAMMAR_PANEL),
]
Choices = Annotated[
    str | None, typer.Option(help="The answer is one of these, such as yes,no,maybe.", rich_help_panel=GRAMMAR_PANEL)
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--grammar-backend",
        help="fsm, llguidance, xgrammar or outlines; by default the first of three that takes the grammar.",
        rich_help_panel=GRAMMAR_PANEL,
    ),
]
JumpForward = Annotated[
    bool,
    typer.Option("--jump-forward", help="Append what the grammar forces without asking the model.",
                 rich_help_panel=GRAMMAR_PANEL),
]  # fmt: skip


def grammar_options(regex: str | None, json_schema: Path | None, choices: str | None) -> dict[str, str]:
    """Return the sampling parameter that the options ask for, none if they ask for none.

    Raises ``ValueError`` for more than one of them, a file that cannot be read and an empty choice.
    """
    given = {"--regex": regex, "--json-schema": json_schema, "--choices": choices}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} are given; an answer has one grammar, so leave one")
    if regex is not None:
        return {"regex": regex}
    if json_schema is not None:
        try:
            return {"json_schema": json_schema.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--json-schema {json_schema} cannot be read ({error}); give a file with a schema"
            ) from error
    if choices is not None:
        options = [choice.strip() for choice in choices.split(",")]
        if not all(options):
            raise ValueError(f"--choices is {choices!r}, and one of them is empty; separate them by single commas")
        return {"regex": "|".join(map(re.escape, options))}
    return {}


def engine_options(grammar: dict[str, str], backend: str | None, jump_forward: bool, samples: int) -> dict[str, Any]:
    """Return the changes to the engine's configuration. Raises ``ValueError`` for options that mean nothing here."""
    if grammar:
        return {
            "grammar_backend": backend or "auto", "jump_forward": jump_forward, "max_running_requests": samples
        }  # fmt: skip
    if backend is not None or jump_forward:
        name = "--grammar-backend" if backend is not None else "--jump-forward"
        raise ValueError(
            f"{name} changes nothing without --regex, --json-schema or --choices; add one, or leave it out"
        )
    return {}


def stream_valid(
    driver: SamplingDriver, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], params: SamplingParams
) -> Iterator[SampledStep]:
    """Yield the tokens of one answer that keeps to its grammar. Warns if it ended before it was complete.

    Log-probabilities of a forced token come a step later than the token, which is kept back until then.
    """
    engine = make_engine(driver, tokenizer.backend_tokenizer)
    name = engine.add_request(prompt_ids, params)
    output = engine.entries[name].output
    steps: list[SampledStep] = []
    given = 0
    for delta in engine.deltas_of(name):
        if delta.error is not None:
            raise ValueError(delta.error)
        if delta.token_id is not None:
            logits = torch.empty(0) if delta.logits is None else delta.logits
            reason = cast(FinishReason | None, delta.finish_reason)
            steps.append(SampledStep(0, delta.token_id, logits, finish_reason=reason))
        ready = len(steps) if params.logprobs is None else len(output.logprobs)
        for place in range(given, ready):
            yield steps[place] if params.logprobs is None else replace(steps[place], logprobs=output.logprobs[place])
        given = ready
    if output.is_grammar_complete is False:
        typer.secho(
            f"warning: the answer is not complete: it ended by {output.finish_reason!r}; raise --max-new-tokens",
            fg="yellow", err=True,
        )  # fmt: skip


def complete_valid(
    driver: SamplingDriver, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], params: SamplingParams
) -> list[SampledGeneration]:
    """Generate several answers that keep to their grammar. Raises ``ValueError`` if one of them cannot be run."""
    (answers,) = make_engine(driver, tokenizer.backend_tokenizer).generate([prompt_ids], params)
    for answer in answers:
        if answer.error is not None:
            raise ValueError(answer.error)
    return [SampledGeneration(list(steps_of(index, answer))) for index, answer in enumerate(answers)]


def steps_of(index: int, answer: RequestOutput) -> Iterator[SampledStep]:
    """Yield a finished answer token by token, without logits, which are not kept."""
    tables: Sequence[Any] = answer.logprobs or [None] * len(answer.token_ids)
    for place, (token, table) in enumerate(zip(answer.token_ids, tables, strict=True), start=1):
        reason = cast(FinishReason, answer.finish_reason) if place == len(answer.token_ids) else None
        yield SampledStep(index, token, torch.empty(0), table, finish_reason=reason)
