"""The checks of L4.H, second half: rows that cannot be sampled, the generator, seeds and reports.

Owns: which rows are drawn and how, which rows end in an error, and what a row can ask to have reported.
The stages and their order are in ``h_pipeline.py``.
"""

import math
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l4 import spec_distribution as distribution
from smoke.checks.l4 import spec_histories as histories
from smoke.checks.l4.g_rows import EOS, VOCAB, Line, make_batch
from smoke.checks.l4.h_pipeline import PAST, ids_of, is_drawn, log_row, make_sampler, mixed_lines, wide_logits
from smoke.checks.l4.spec_histories import Past
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()

# Rows that cannot be sampled ----------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[dict[str, Any], float | None, tuple[str, ...]]] = {
    "a greedy row": ({}, None, ()),
    "NaN, greedy": ({}, math.nan, ("NaN",)),
    "a seeded row": ({"temperature": 1.0, "seed": 3}, None, ()),
    "NaN, drawn": ({"temperature": 1.0, "top_p": 0.9}, math.nan, ("NaN",)),
    "all minus infinity": ({"temperature": 0.7, "seed": 4, "top_k": 3}, -math.inf, ("no token",)),
    "plus infinity": ({}, math.inf, ("infinity",)),
    "beyond float32": ({"temperature": 0.01, "seed": 4}, 3e38, ("temperature",)),
    "an unseeded row": ({"temperature": 3.0}, None, ()),
    "another unseeded row": ({"temperature": 3.0, "top_p": 0.95}, None, ()),
    "a third unseeded row": ({"temperature": 3.0}, None, ()),
    "everything banned": ({"allowed_token_ids": [5], "bad_words": [[5]]}, None, ("bad_words", "no token")),
    "a row with penalties": ({"repetition_penalty": 1.5, "temperature": 1.3, "seed": 9}, None, ()),
}


def fault_logits(seed: int) -> Tensor:
    """Draw logits and spoil some rows: one NaN, all minus infinity, one plus infinity."""
    logits = wide_logits(len(FAULTS), seed)
    for row, (_, spoiler, _) in enumerate(FAULTS.values()):
        if spoiler is not None:
            logits[row, slice(None) if spoiler == -math.inf else 7] = spoiler
    return logits


def fault_probe(seed: int) -> Values:
    """Sample valid and invalid rows together, and the valid ones among themselves."""
    logits = fault_logits(seed)
    lines = [Line(PAST, params) for params, _, _ in FAULTS.values()]
    batch = make_batch(lines)
    output = make_sampler(seed)(logits, batch)
    sound = [row for row, (_, _, words) in enumerate(FAULTS.values()) if not words]
    alone = make_sampler(seed)(logits[sound], make_batch([lines[row] for row in sound]))
    return {
        "ids": ids_of(output),
        "ids without the invalid rows": ids_of(alone),
        "errors": {name: str(output.errors[row]) for row, name in enumerate(FAULTS) if row in output.errors},
        "the batch's drawn rows afterwards": [int(row) for row in batch.random_rows],
        "two invalid rows alone": ids_of(make_sampler(seed)(logits[3:5], make_batch(lines[3:5]))),
    }


def fault_verdict(seed: int, got: Values) -> list[Failure]:
    """Rows with an error say why; the others get what they get without them."""
    sound = iter(got["ids without the invalid rows"])
    expected = [-1 if words else next(sound) for _, _, words in FAULTS.values()]
    failures = differences(expected, got["ids"], None, "ids, -1 in invalid rows")
    failures += differences(
        [name for name, (_, _, words) in FAULTS.items() if words], list(got["errors"]), None, "rows with an error"
    )
    drawn = [row for row, (params, _, _) in enumerate(FAULTS.values()) if "temperature" in params]
    afterwards = "the batch's drawn rows afterwards"
    failures += differences(drawn, got[afterwards], None, afterwards)
    failures += differences([-1, -1], got["two invalid rows alone"], None, "two invalid rows alone: ids")
    for name, (_, _, words) in FAULTS.items():
        message = got["errors"].get(name, "")
        if not all(word in message for word in words):
            failures.append(Failure(f"error of the row '{name}'", "", f"words like {' and '.join(words)}", message))
    return failures


REGISTRY.add(
    "L4.H.errors",
    "A row with NaN, with plus infinity or without any token ends in an error that names fault and stage; no other row "
    "notices.",
    fault_probe,
    fault_verdict,
)


# Randomness ---------------------------------------------------------------------------------------------------------

DRAWN = log_row(0.4, 0.3, 0.15, 0.1, 0.05)
DRAWS = 4000
MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"temperature": 50.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 9.0, "top_p": 0.5},
)


def generator_probe(seed: int) -> Values:
    """Watch the generator over batches of all kinds, and draw one distribution many times."""
    greedy = Line(PAST, {})
    seeded = Line(PAST, {"temperature": 1.0, "seed": 0})
    free = Line(PAST, {"temperature": 1.0})
    sampler = make_sampler(seed)
    before = sampler.generator.get_state().clone()
    logits = wide_logits(4, seed)
    sampler(logits, make_batch([greedy, seeded, seeded, greedy]))
    untouched = bool(torch.equal(before, sampler.generator.get_state()))
    rows = torch.full((DRAWS, VOCAB), -math.inf)
    rows[:, : len(DRAWN)] = torch.tensor(DRAWN)
    once, again = make_sampler(seed), make_sampler(seed)
    company = make_batch([greedy, free, seeded, free])
    alone = make_batch([free, free])
    mixed = ids_of(once(logits, company))
    one = make_batch([free])
    broad = torch.full((20, 1 << 18), -math.inf)  # more logits than are drawn from at a time
    broad[:, : len(DRAWN)] = torch.tensor(DRAWN)
    own = [Line(PAST, MIXED[row % len(MIXED)]) for row in range(len(broad))]
    first, second = make_sampler(seed), make_sampler(seed)
    return {
        "numbers of 24 bits": short_numbers(seed),
        "20 rows of 262,144 tokens": ids_of(first(broad, make_batch(own))),
        "262,144 tokens, one row after the other": [ids_of(second(broad[:1], make_batch([line])))[0] for line in own],
        "the generator after greedy and seeded rows": "as before" if untouched else "has moved",
        "unseeded rows in company": [mixed[1], mixed[3], *ids_of(once(logits[:2], alone))],
        "unseeded rows alone": ids_of(again(logits[[1, 3]], alone)) + ids_of(again(logits[:2], alone)),
        "many rows": ids_of(make_sampler(seed)(rows, make_batch([free] * DRAWS))),
        "one row, many times": [ids_of(once(rows[:1], one))[0] for _ in range(DRAWS // 8)],
    }


def short_numbers(seed: int) -> int:
    """Count the numbers that unseeded rows are drawn by and that float32 could hold; another way to draw has none."""
    from mini_engine.sampler.batch import TorchOps

    numbers: list[float] = []

    class Noting(TorchOps):
        def draw_uniform(self, logits: Tensor, uniform: Tensor) -> Tensor:
            numbers.extend(uniform.tolist())
            return TorchOps.draw_uniform(logits, uniform)

    make_sampler(seed, ops=Noting())(wide_logits(9, seed), make_batch([Line(PAST, {"temperature": 1.0})] * 9))
    return sum((number * 2**24).is_integer() for number in numbers)


def generator_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the right shares, and for a generator that only unseeded rows move."""
    failures = differences("as before", got["the generator after greedy and seeded rows"], None, "the generator")
    failures += differences(
        got["unseeded rows alone"], got["unseeded rows in company"], None, "unseeded rows in company"
    )
    one_by_one = got["262,144 tokens, one row after the other"]
    failures += differences(one_by_one, got["20 rows of 262,144 tokens"], None, "20 rows of 262,144 tokens")
    failures += differences(0, got["numbers of 24 bits"], None, "uniform numbers that have 24 bits, and not 53")
    for name in ("many rows", "one row, many times"):
        distance = distribution.chi_square(got[name], list(DRAWN))
        if not distance < 33:  # 4 degrees of freedom: one right sampler in a million is further away
            failures.append(
                Failure(f"{name} drawn from [.4, .3, .15, .1, .05]", "chi-square", "below 33", f"{distance}")
            )
    return failures


REGISTRY.add(
    "L4.H.generator",
    "Unseeded rows are drawn with their own probabilities by the sampler's generator, which seeded and greedy rows do "
    "not move.",
    generator_probe,
    generator_verdict,
)


def advance_lines(seed: int) -> list[Line]:
    """Return two seeded rows that differ in nothing but the length of their past."""
    params = {"temperature": 1.0, "seed": seed + 77}
    return [Line(Past((1,)), params), Line(Past((1, 2, 3), (4,)), params)]


def advance_probe(seed: int) -> Values:
    """Sample the same flat logits ten times, advancing the batch in between."""
    batch = make_batch(advance_lines(seed))
    logits = torch.zeros(2, VOCAB)
    sampler = make_sampler()
    log = []
    for _ in range(10):
        log.append(ids_of(sampler(logits, batch)))
        batch.cumulate(log[-1])
    return {"ids": log}


def advance_verdict(seed: int, got: Values) -> list[Failure]:
    """Hash seed, position and id."""
    flat = [0.0] * VOCAB
    rows = advance_lines(seed)
    lengths = [len(line.past.prompt) + len(line.past.output) for line in rows]
    expected = [
        [distribution.seeded(flat, rows[0].params["seed"], length + step - 1) for length in lengths]
        for step in range(10)
    ]
    return differences(expected, got["ids"], None, "ids of ten steps")


REGISTRY.add(
    "L4.H.positions",
    "A seeded row's noise is that of the position of its last token, and moves on with every token.",
    advance_probe,
    advance_verdict,
)


# Reports ------------------------------------------------------------------------------------------------------------


def report_lines(seed: int) -> list[Line]:
    """Return rows that want the chosen token's log-probability, before or after all stages, or not at all.

    Every third row is greedy, so each kind has one.
    """
    kinds = ({"logprobs": 0}, {"logprobs": 0, "logprobs_mode": "processed"}, {"logprobs": None})
    lines = [Line(line.past, {**line.params, **kinds[row // 3]}) for row, line in enumerate(mixed_lines(seed)[:9])]
    return [*lines[:3], *lines[4:], lines[3]]


def report_probe(seed: int) -> Values:
    """Report, with and without a trace."""
    from mini_engine.sampler.trace import SamplingTrace

    lines = report_lines(seed)
    logits = wide_logits(len(lines), seed)
    output = make_sampler(seed)(logits, make_batch(lines))
    trace = SamplingTrace()
    traced = make_sampler(seed, trace=trace)(logits, make_batch(lines))
    return {
        "ids": ids_of(output),
        "ids with a trace": ids_of(traced),
        "log-probabilities": [None if entries is None else float(entries[0].logprob) for entries in output.logprobs],
        "tokens left by the last stage": [int(trace.stages(row)[-1].support) for row in range(len(lines))],
        "the caller's logits": logits,
        **plain_reports(seed),
    }


PLAIN = {"temperature": 0.6, "top_k": 3, "seed": 5, "logprobs": 2, "logprobs_mode": "processed"}


def plain_reports(seed: int) -> Values:
    """Report rows that no processor changes, after all filters, with the caller's logits, in two dtypes."""
    values: Values = {}
    for dtype in ("float32", "bfloat16"):
        logits = wide_logits(4, seed, dtype)
        output = make_sampler(seed)(logits, make_batch([Line(PAST, PLAIN)] * 4))
        values[f"{dtype} without processors, ids"] = ids_of(output)
        values[f"{dtype} without processors"] = [float(entries[0].logprob) for entries in output.logprobs]
        values[f"the caller's {dtype} logits, without processors"] = logits
    return values


def report_verdict(seed: int, got: Values) -> list[Failure]:
    """Work out the log-probabilities from the raw or the final row."""
    lines = report_lines(seed)
    logits = wide_logits(len(lines), seed)
    reported: list[float | None] = []
    left = []
    for row, line, token in zip(logits.tolist(), lines, got["ids"], strict=True):
        final = histories.processed(row, line.past, line.params, EOS)
        final = histories.filtered(final, line.params) if is_drawn(line) else final
        left.append(sum(1 for value in final if value > -math.inf))
        shown = final if line.params.get("logprobs_mode") == "processed" else row
        reported.append(None if line.params["logprobs"] is None else distribution.log_softmax(shown)[token])
    failures = differences(got["ids"], got["ids with a trace"], None, "ids with a trace")
    failures += differences(reported, got["log-probabilities"], 1e-5, "log-probabilities of the chosen tokens")
    failures += differences(left, got["tokens left by the last stage"], None, "tokens left, by the trace")
    for dtype in ("float32", "bfloat16"):
        plain = wide_logits(4, seed, dtype)
        rows = [distribution.log_softmax(histories.filtered(row, PLAIN)) for row in plain.tolist()]
        name = f"{dtype} without processors"
        found = [row[token] for row, token in zip(rows, got[f"{name}, ids"], strict=True)]
        failures += differences(found, got[name], 1e-5, f"log-probabilities of the chosen tokens, {name}")
        name = f"the caller's {dtype} logits, without processors"
        failures += differences(plain, got[name], None, name)
    return failures + differences(logits, got["the caller's logits"], None, "the caller's logits")


REGISTRY.add(
    "L4.H.reports",
    "Log-probabilities are of the raw logits or of what was left after all stages, as each row asks; a trace shows the "
    "stages and changes nothing.",
    report_probe,
    report_verdict,
    needs=("L4.I",),
)
