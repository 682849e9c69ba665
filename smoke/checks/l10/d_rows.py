"""The checks of rows that are drafted (L10.D): which rows a step has, when a token counts, and what is sampled next.

Owns: steps that are made by hand, and requests that get made-up tokens, stop, or are given more than one. No model.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoke.checks.l5.a_request import output_of
from smoke.checks.l5.spec_scheduling import Person
from smoke.checks.l10.machine import Row, build_step, draw_rows
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
STEPS = 40  # that are drawn

EDGES: dict[str, list[Row]] = {
    "no chunk": [],
    "no draft": [Row(3, 2, 4, 1), Row(5, 0, 0, 5)],
    "a prompt and its draft": [Row(5, 0, 0, 5, (501, 502))],
    "a draft behind another request's": [Row(3, 2, 4, 1, (501,)), Row(2, 4, 5, 1, (502, 503))],
    "two drafts around a piece of a prompt": [Row(3, 1, 3, 1, (501, 502)), Row(9, 0, 2, 3), Row(4, 1, 4, 1, (503,))],
    "a draft over the end of a page": [Row(3, 4, 6, 1, (501, 502, 503))],
}


def steps(seed: int) -> dict[str, list[Row]]:
    """Return the chunks of many steps."""
    drawn = {f"step {number}": draw_rows(random.Random(f"step {seed} {number}")) for number in range(STEPS)}
    return {**EDGES, **drawn}


# with_drafts --------------------------------------------------------------------------------------------------------


def rows_probe(seed: int) -> Values:
    """Ask for the step with its drafts, and tell what each of its chunks gives to the model."""
    from mini_engine.engine_core import packed
    from mini_engine.sampler.params import SamplingParams
    from mini_engine.scheduler.drafts import with_drafts

    values = Values()
    for name, rows in steps(seed).items():
        gone = object()
        batch = build_step(rows, [gone])
        chunks = list(batch.chunks)
        for chunk in chunks:
            chunk.request.params = SamplingParams(max_new_tokens=50, logprobs=2, prompt_logprobs=1)
        outputs = [list(chunk.request.output_ids) for chunk in chunks]
        wide = with_drafts(batch)
        added = wide.chunks[len(chunks) :]
        values[name] = {
            "its own chunks first": len(wide.chunks) >= len(chunks)
            and all(one is other for one, other in zip(wide.chunks, chunks, strict=False)),
            "rows of drafts": [[*fed(packed(chunk)), bool(chunk.samples)] for chunk in added],
            "rows": int(wide.num_tokens),
            "logits": len(wide.sampling),
            "who was preempted": [each is gone for each in wide.preempted],
            "the step itself": [len(batch.chunks), batch.num_tokens],
            "outputs afterwards": [list(chunk.request.output_ids) for chunk in chunks] == outputs,
            "reports": [report(chunk.request.params) for chunk in added],
            "copies": [chunk.num_copied for chunk in added],
        }
    return values


def fed(sequence: Any) -> list[Any]:
    """Return what the model gets of a chunk: tokens, the position of the first, and the pages."""
    return [
        [int(token) for token in sequence.token_ids],
        int(sequence.num_computed_tokens),
        [int(p) for p in sequence.pages],
    ]


def report(params: Any) -> list[Any]:
    """Return which log-probabilities are asked for."""
    return [params.logprobs, params.prompt_logprobs]


def rows_spec(seed: int) -> Values:
    """Count on behind what is known: token by token, position by position, on the request's pages."""
    values = Values()
    for name, rows in steps(seed).items():
        drafted = [
            [[token], row.known + place, [100 * index + page for page in reversed(range(row.pages))], True]
            for index, row in enumerate(rows)
            for place, token in enumerate(row.draft)
        ]
        count = sum(row.count for row in rows)
        values[name] = {
            "its own chunks first": True,
            "rows of drafts": drafted,
            "rows": count + len(drafted),
            "logits": sum(row.samples for row in rows) + len(drafted),
            "who was preempted": [True],
            "the step itself": [len(rows), count],
            "outputs afterwards": True,
            "reports": [[None, None]] * len(drafted),
            "copies": [0] * len(drafted),
        }
    return values


REGISTRY.add(
    "L10.D.rows",
    "A step with drafts has its own chunks first and then a row for each drafted token, in order: at the next "
    "position, on its request's pages, with logits and without reports. The requests themselves know nothing of it.",
    rows_probe,
    bitwise(rows_spec),
)

# is_confirmed -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Come:
    """What came after a step with a draft: so many of its tokens, then other ones, and why the request ended if so."""

    draft: tuple[int, ...]
    right: int
    others: tuple[int, ...]
    state: str = "running"


def come_cases(seed: int) -> dict[str, Come]:
    """Return all small cases: drafts of up to 4 tokens, with equal ones among them."""
    rng = random.Random(f"come {seed}")
    cases: dict[str, Come] = {}
    for length in range(5):
        for right in range(length + 1):
            for others in ((), (7,), (7, 8)):
                for state in ("running", "stop", "length"):
                    draft = tuple(rng.choice([1, 2]) for _ in range(length))
                    come = Come(draft, right, others, state)
                    cases[f"case {len(cases)}: of the draft {draft} {right} came, then {others}; {state}"] = come
    again = {
        "a later token of the draft comes instead of the first": Come((1, 2, 3), 0, (2,)),
        "the right token comes, and more is appended that is drafted too": Come((1, 2, 3), 1, (2, 3)),
    }
    return {**cases, **again}


def come_probe(seed: int) -> Values:
    """Ask at every place of the draft and behind it, after a step of one token and after one of a prompt."""
    from mini_engine.scheduler.drafts import is_confirmed

    values = Values()
    for name, come in come_cases(seed).items():
        for row in (Row(3, 2, 4, 1, come.draft), Row(6, 0, 2, 4, come.draft)):
            (chunk,) = build_step([row]).chunks
            request = chunk.request
            request.output_ids += [*come.draft[: come.right], *come.others]
            request.num_computed_tokens = request.num_tokens - 1
            if come.state != "running":
                end(request, come.state)
            asked = [bool(is_confirmed(chunk, place)) for place in range(len(come.draft) + 2)]
            values[f"{name}, a chunk of length {row.count}"] = asked
    return values


def end(request: Any, reason: str) -> None:
    """End a request as the scheduler does. Mutates."""
    from mini_engine.scheduler.request import RequestState

    request.state = RequestState.FINISHED
    request.finish_reason = reason
    request.pages = []


def come_spec(seed: int) -> Values:
    """Count a token if the draft up to it is all that has come since the step, and the request goes on."""
    values = Values()
    for name, come in come_cases(seed).items():
        since = [*come.draft[: come.right], *come.others]
        asked = [
            place < len(come.draft) and since == list(come.draft[: place + 1]) and come.state == "running"
            for place in range(len(come.draft) + 2)
        ]
        values |= {f"{name}, a chunk of length {count}": asked for count in (1, 4)}
    return values


REGISTRY.add(
    "L10.D.confirmed",
    "A row of a draft counts if the token before it is the newest one of its request, as it was drafted, and the "
    "request goes on: not after an end, not after another token, not after one too many.",
    come_probe,
    bitwise(come_spec),
)

# steps_ahead --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """A chunk, the tokens that its request samples one after the other, when it ends, and what is forced when.

    ``ends``: its number of tokens at the end. ``forced``: the next one is appended behind the token of this number.
    """

    row: Row
    tokens: tuple[int, ...]
    ends: int
    forced: int


LONG = Life(Row(4, 1, 4, 1, (501, 502, 503, 504)), (501, 502, 503, 504, 7), 50, 50)
TOGETHER: dict[str, list[Life]] = {
    "the token that is forced was drafted": [Life(Row(3, 1, 3, 1, (501, 502)), (501, 502, 7, 7), 50, 1), LONG],
    "it was drafted, behind a wrong one": [Life(Row(3, 1, 3, 1, (501, 502)), (7, 502, 7, 7), 50, 1), LONG],
    "it was drafted, at the end": [LONG, Life(Row(3, 1, 3, 1, (501, 502, 503)), (501, 502, 503, 7, 7), 50, 2)],
}


def lives(seed: int) -> dict[str, list[Life]]:
    """Draw what becomes of the requests of each step."""
    found = dict(TOGETHER)
    for name, rows in steps(seed).items():
        rng = random.Random(f"life {seed} {name}")
        found[name] = []
        for row in rows:
            right = rng.randint(0, len(row.draft)) if rng.random() < 0.6 else len(row.draft)
            others = [rng.choice([*row.draft, 7]) for _ in range(9)]
            tokens = (*row.draft[:right], *others)
            ends = rng.randint(1, 5) if rng.random() < 0.3 else 50
            found[name].append(Life(row, tokens, ends, rng.randint(1, 4) if rng.random() < 0.2 else 50))
    return found


def ahead_probe(seed: int) -> Values:
    """Sample and update step after step, and note what is asked for; the requests are looked at in the end."""
    from mini_engine.scheduler.drafts import steps_ahead

    values = Values()
    for name, own in lives(seed).items():
        batch = build_step([life.row for life in own])
        whose = {chunk.request.request_id: life for chunk, life in zip(batch.chunks, own, strict=True)}
        for chunk in batch.chunks:
            grow(chunk, whose)
        asked = []
        for ahead, rows in steps_ahead(batch):
            asked.append(
                [
                    [
                        [c.request.request_id, int(c.start), int(c.num_tokens), bool(c.samples), list(c.draft)]
                        for c in ahead.chunks
                    ],
                    [int(row) for row in rows],
                ]
            )
            for chunk in ahead.chunks:
                grow(chunk, whose)
        values[name] = {
            "steps": asked,
            "requests": [
                [list(map(int, chunk.request.output_ids)), int(chunk.request.num_computed_tokens)]
                for chunk in batch.chunks
            ],
        }
    return values


def grow(chunk: Any, whose: dict[str, Life]) -> None:
    """Do what the engine does after a chunk: what is computed is noted, a token comes, a few are forced, or it ends."""
    request, life = chunk.request, whose[chunk.request.request_id]
    request.num_computed_tokens = chunk.start + chunk.num_tokens
    if not chunk.samples:
        return
    count = request.num_output_tokens - life.row.outputs
    request.output_ids.append(life.tokens[count])
    if count + 1 == life.forced:
        request.output_ids.append(life.tokens[count + 1])
    if count + 1 == life.ends:
        end(request, "stop")


def ahead_spec(seed: int) -> Values:
    """Live through each request alone: a token more for each one that was drafted, until something else happens."""
    values = Values()
    for name, own in lives(seed).items():
        before = [sum(len(life.row.draft) for life in own[:index]) for index in range(len(own))]
        saved = [accepted(life) for life in own]
        asked: list[Any] = []
        for place in range(max(saved, default=0)):
            going = [index for index, count in enumerate(saved) if count > place]
            chunks = [[f"r{index}", own[index].row.known + place, 1, True, []] for index in going]
            asked.append([chunks, [before[index] + place for index in going]])
        ends = [ended(index, life, count) for index, (life, count) in enumerate(zip(own, saved, strict=True))]
        values[name] = {"steps": asked, "requests": ends}
    return values


def accepted(life: Life) -> int:
    """Return how many tokens of a draft come: all equal ones, up to an end and up to where more is appended."""
    count = 0
    while (
        life.row.samples
        and count < len(life.row.draft)
        and life.tokens[count] == life.row.draft[count]
        and count + 1 not in (life.ends, life.forced)
    ):
        count += 1
    return count


def ended(index: int, life: Life, saved: int) -> list[Any]:
    """Return the output of a request and how many tokens are computed."""
    person = Person(f"r{index}", life.row.prompt, outputs=life.row.outputs)
    if not life.row.samples:
        return [output_of(person), life.row.start + life.row.count]
    new: Sequence[int] = life.tokens[: saved + 1]
    more = life.tokens[saved + 1 : saved + 2] if saved + 1 == life.forced else ()
    return [[*output_of(person), *new, *more], life.row.known + saved]


REGISTRY.add(
    "L10.D.ahead",
    "After a step come the rows of the drafts, place by place: of each request that has got the token of that place, "
    "with its own row, until another token comes, more is appended, or it ends.",
    ahead_probe,
    bitwise(ahead_spec),
)
