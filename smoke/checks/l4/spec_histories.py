"""Specs of L4's processors: what a row's whole past says about its next token, in Python numbers.

Owns: penalties, constraints, thinking budget, repeated n-grams and the order of all stages, for one row at a time.
There is no state here and nothing that advances: every answer is worked out anew from the complete history, which is
what the engine's tables and counters must never differ from. Must not know: batches, the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smoke.checks.l4.spec_distribution import BANNED, Row, min_p_ids, only, top_k_ids, top_p_ids

Options = Mapping[str, Any]  # arguments of ``SamplingParams``


@dataclass(frozen=True)
class Past:
    """What a request was given and what it has generated."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()

    def after(self, token_ids: Sequence[int]) -> "Past":
        """Return the past with more output."""
        return Past(self.prompt, (*self.output, *token_ids))


def penalised(row: Row, past: Past, options: Options) -> Row:
    """Ask of every id of the vocabulary whether and how often it came; repetition, frequency, presence, in this order.

    Repetition looks at prompt and output, the other two at the output alone.
    """
    repetition = options.get("repetition_penalty", 1.0)
    frequency = options.get("frequency_penalty", 0.0)
    presence = options.get("presence_penalty", 0.0)
    out = []
    for token, logit in enumerate(row):
        times = sum(1 for seen in past.output if seen == token)
        value = logit
        if times or token in past.prompt:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * times
        if times:
            value -= presence
        out.append(value)
    return out


def stop_set(options: Options, eos: Sequence[int]) -> set[int]:
    """Collect the ids that end a request."""
    stops = set(options.get("stop_token_ids", ()))
    return stops if options.get("ignore_eos", False) else stops.union(eos)


def long_enough(row: Row, past: Past, options: Options, eos: Sequence[int]) -> Row:
    """Ban the stop ids while the output is shorter than asked for."""
    short = len(past.output) < options.get("min_new_tokens", 0)
    return [BANNED if short and token in stop_set(options, eos) else value for token, value in enumerate(row)]


def biased(row: Row, past: Past, options: Options) -> Row:
    """Add each id's bias."""
    bias = options.get("logit_bias") or {}
    return [value + bias.get(token, 0.0) for token, value in enumerate(row)]


def allowed_only(row: Row, past: Past, options: Options) -> Row:
    """Ban what is not on the list, if there is one."""
    allowed = options.get("allowed_token_ids")
    return [value if allowed is None or token in allowed else BANNED for token, value in enumerate(row)]


def without_bad_words(row: Row, past: Past, options: Options) -> Row:
    """Try every id, and ban it if the output then ends in a bad word."""
    words = [list(word) for word in options.get("bad_words", ())]

    def completes(token: int) -> bool:
        longer = [*past.output, token]
        return any(longer[-len(word) :] == word for word in words)

    return [BANNED if completes(token) else value for token, value in enumerate(row)]


def without_disallowed(row: Row, past: Past, options: Options) -> Row:
    """Ban the ids of ``disallowed_tokens``."""
    arguments = (options.get("logits_processors") or {}).get("disallowed_tokens", {})
    return [BANNED if token in arguments.get("token_ids", ()) else value for token, value in enumerate(row)]


def within_budget(row: Row, past: Past, arguments: Options) -> Row:
    """Look for the last start marker; force the end if no end marker and too many tokens follow it."""
    tokens = [*past.prompt, *past.output]
    starts = [place for place, token in enumerate(tokens) if token == arguments["start"]]
    thought = tokens[starts[-1] + 1 :] if starts else [arguments["end"]]
    if arguments["end"] in thought or len(thought) < arguments["budget"]:
        return list(row)
    newline = arguments.get("newline")
    if newline is not None and (not past.output or past.output[-1] != newline):
        return [0.0 if token == newline else BANNED for token in range(len(row))]
    return [0.0 if token == arguments["end"] else BANNED for token in range(len(row))]


def without_repeats(row: Row, past: Past, arguments: Options) -> Row:
    """Try every id, and ban it if the last n tokens then stand in the window a second time."""
    size = arguments["ngram_size"]
    window = arguments.get("window_size")
    tokens = [*past.prompt, *past.output]
    tokens = tokens if window is None else tokens[max(0, len(tokens) - window) :]
    known = {tuple(tokens[first : first + size]) for first in range(len(tokens) - size + 1)}
    spared = arguments.get("whitelist_token_ids", ())
    return [
        BANNED if tuple([*tokens, token][-size:]) in known and token not in spared else value
        for token, value in enumerate(row)
    ]


def processed(row: Row, past: Past, options: Options, eos: Sequence[int]) -> Row:
    """Take a row through every processor that the options switch on, in the order of the pipeline."""
    row = penalised(row, past, options)
    row = long_enough(row, past, options, eos)
    stages: tuple[Callable[[Row, Past, Options], Row], ...] = (
        biased,
        allowed_only,
        without_bad_words,
        without_disallowed,
    )
    for stage in stages:
        row = stage(row, past, options)
    return row


def filtered(row: Row, options: Options) -> Row:
    """Take a processed row through temperature, top-k, top-p of what is left, and min-p of what is left then."""
    row = [value / options["temperature"] for value in row]
    row = only(row, top_k_ids(row, options.get("top_k", 0)))
    row = only(row, top_p_ids(row, options.get("top_p", 1.0)))
    return only(row, min_p_ids(row, options.get("min_p", 0.0)))


def greedy(row: Row) -> int:
    """Return the lowest id among the likeliest."""
    return row.index(max(row))
