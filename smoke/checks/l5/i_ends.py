"""The checks of L5.I: how a request ends: reasons, text, deltas, aborts, errors.

Owns: requests that are given their tokens by hand, without a step, and what they must tell, from ``spec_text.py``.
Needs of L5 what admits, frees and decodes, and no step.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from smoke.checks.l4.k_driver import make_params
from smoke.checks.l5 import spec_text as text
from smoke.checks.l5.j_engine import build_engine
from smoke.framework.cases import embedded_case, embedded_eos_ids
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
BY_HAND = ("L5.B",)  # an engine makes its policy


# By hand ------------------------------------------------------------------------------------------------------------


def start(engine: Any, prompt: list[int], params: dict[str, Any]) -> str:
    """Add a request and let it run, without a step -> its id. Mutates the engine."""
    from mini_engine.scheduler.prefix_cache import PrefixHit

    name = str(engine.add_request(prompt, make_params(params)))
    assert engine.scheduler.try_admit(engine.entries[name].request, PrefixHit()), "there is room for this request"
    return name


def give(engine: Any, name: str, token_id: int, logprobs: Any = None, logits: Any = None) -> None:
    """Give a running request its next token, as a step would. Mutates the engine."""
    from mini_engine.outputs import Delta

    request = engine.entries[name].request
    request.output_ids.append(token_id)
    engine.take_token(request, Delta(name, token_id, "", logprobs, None, logits))


def is_over(engine: Any, name: str) -> bool:
    """Whether a request has ended."""
    return bool(engine.entries[name].request.state == "finished")


def taken_deltas(engine: Any) -> list[dict[str, Any]]:
    """Return the deltas since the last time, as plain values. Mutates the engine."""
    deltas = engine.deltas
    engine.deltas = []
    return [
        {"id": delta.token_id, "text": delta.text, "finish_reason": delta.finish_reason, "error": delta.error}
        for delta in deltas
    ]


def outcome(engine: Any, name: str) -> dict[str, Any]:
    """Return what the output says about the end. Mutates the engine."""
    output = engine.take_output(name)
    return {
        "ids": [int(token) for token in output.token_ids],
        "text": output.text,
        "matched": output.matched,
        "finish_reason": output.finish_reason,
        "error": output.error,
    }


def pages_left(engine: Any) -> int:
    """Return how many pages are not free."""
    return int(engine.scheduler.allocator.num_pages - engine.scheduler.allocator.num_free)


# L5.I: reasons ------------------------------------------------------------------------------------------------------

EOS = tuple(sorted(embedded_eos_ids()))


def end_cases(seed: int) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Return the ids that a request is given, at most, and its parameters."""
    rng = random.Random(f"ends {seed}")
    word = rng.choice(("upon", "time", "fox", "Ada"))
    ids = text.in_bytes(word)
    own = ids[-1]
    many = [*ids, *ids]
    return {
        "the limit": (many, {"max_new_tokens": len(ids)}),
        "an end id": ([*ids, EOS[0], *ids], {"max_new_tokens": 20}),
        "an end id as the first token": ([EOS[0], *ids], {"max_new_tokens": 20}),
        "an end id as the last allowed token": ([*ids, EOS[0]], {"max_new_tokens": len(ids) + 1}),
        "an end id, ignored": ([*ids, EOS[0], *ids], {"max_new_tokens": len(many), "ignore_eos": True}),
        "an own stop id": (many, {"max_new_tokens": 20, "stop_token_ids": [own]}),
        "an own stop id as the last allowed token": (many, {"max_new_tokens": len(ids), "stop_token_ids": [own]}),
        "a stop string": (many, {"max_new_tokens": 20, "stop": [word[1:]]}),
        "a stop string with the last allowed token": (many, {"max_new_tokens": len(ids), "stop": [word[1:]]}),
        "a stop string of two": (many, {"max_new_tokens": 20, "stop": ["zebra", word[-1] + word[0]]}),
        "an own stop id that completes a stop string": (
            many,
            {"max_new_tokens": 20, "stop": [word], "stop_token_ids": [own]},
        ),
        "text held back when an own stop id comes": (
            many,
            {"max_new_tokens": 20, "stop": [word[1:-1] + "never"], "stop_token_ids": [own]},
        ),
        "text held back at the limit": (many, {"max_new_tokens": len(ids), "stop": [word[1:] + "never"]}),
        "a stop string that the end completes": (
            [*ids, *text.in_bytes("👍")[:-1]],
            {"max_new_tokens": len(ids) + 3, "stop": [word[-1] + "\ufffd"]},
        ),
        "an end id before the end completes a stop string": (
            [*ids, *text.in_bytes("👍")[:-1], EOS[0]],
            {"max_new_tokens": 20, "stop": [word[-1] + "\ufffd"]},
        ),
        "token 0 is an own stop id": ([*ids, 0], {"max_new_tokens": 20, "stop_token_ids": [0]}),
        "half a character at the limit": ([*ids, *text.in_bytes("é")[:-1]], {"max_new_tokens": len(ids) + 1}),
        "a stop string too early": (many, {"max_new_tokens": len(many), "stop": [word], "min_new_tokens": len(ids)}),
    }


def reasons_probe(seed: int) -> Values:
    """Give every request its tokens until it ends, one request after the other in one engine."""
    engine = build_engine(embedded_case(), eos=EOS, with_text=True, num_pages=4)
    values: Values = {}
    for name, (ids, params) in end_cases(seed).items():
        request = start(engine, [5, 6, 7], params)
        entry = engine.entries[request]
        entry.request.num_preemptions = len(ids)  # as if it had been preempted so often
        for token in ids:
            if not is_over(engine, request):
                give(engine, request, token)
        values[name] = {
            "deltas": taken_deltas(engine),
            "pages not free": pages_left(engine),
            "preemptions": int(entry.output.num_preemptions),
            **outcome(engine, request),
        }
    return values


def reasons_spec(seed: int) -> Values:
    """Follow each request: a stop id goes before a stop string, and that before the limit."""
    return {name: ended(ids, params) | {"preemptions": len(ids)} for name, (ids, params) in end_cases(seed).items()}


def ended(ids: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
    """Tell the text of the ids before the first stop id, at most as many as are allowed."""
    stops = {*params.get("stop_token_ids", ()), *(() if params.get("ignore_eos") else EOS)}
    given = list(ids[: params["max_new_tokens"]])
    place = next((place for place, token in enumerate(given) if token in stops), len(given))
    streamed = text.streamed(given[:place], params.get("stop", ()), params.get("min_new_tokens", 0))
    by_id = place < len(given) and (streamed.matched is None or streamed.at_end)
    taken, matched = (given[: place + 1], given[place]) if by_id else (given[: len(streamed.pieces)], streamed.matched)
    reason = "length" if matched is None else "stop"
    pieces = [*streamed.pieces, *([""] if by_id else [])]
    pieces[-1] += streamed.rest
    last = len(pieces) - 1
    deltas = [
        {"id": token, "text": piece, "finish_reason": reason if index == last else None, "error": None}
        for index, (token, piece) in enumerate(zip(taken, pieces, strict=True))
    ]
    return {
        "deltas": deltas,
        "pages not free": 0,
        "ids": taken,
        "text": streamed.text,
        "matched": matched,
        "finish_reason": reason,
        "error": None,
    }


REGISTRY.add(
    "L5.I.reasons",
    "A stop id ends a request before a stop string does, and that before the limit; a stop id is in the ids and not in "
    "the text; the last delta brings what was held back, the reason, and no page stays behind.",
    reasons_probe,
    bitwise(reasons_spec),
    needs=BY_HAND,
)


# L5.I: deltas -------------------------------------------------------------------------------------------------------

TELLING = "One day, naïve 👍 fox"


def deltas_probe(seed: int) -> Values:
    """Give two requests their tokens in turn, with reports, logits and a clock that ticks once a look."""
    from mini_engine.sampler.logprobs import TokenLogprob

    engine = build_engine(embedded_case(), eos=EOS, with_text=True, num_pages=64, max_running_requests=4)
    clock = iter(range(100_000))
    engine.clock = lambda: float(next(clock))
    scripts = [text.in_bytes(TELLING), text.encoded(TELLING)]
    names = [start(engine, [5, 6], {"max_new_tokens": len(ids), "stop": ["fox!"], "logprobs": 0}) for ids in scripts]
    stream = engine.deltas_of(names[1])
    next(stream)
    by_request: list[list[Any]] = [[], []]
    for step in range(max(map(len, scripts))):
        for index, (name, ids) in enumerate(zip(names, scripts, strict=True)):
            if step < len(ids):
                report = [TokenLogprob(ids[step], -float(step), 1)]
                logits = torch.full((4,), float(step + index))
                give(engine, name, ids[step], report, logits)
        for delta in engine.deltas:
            by_request[names.index(delta.request_id)].append(plain_delta(delta))
        engine.deltas = []
    entries = [engine.entries[name] for name in names]
    values: Values = {"deltas": by_request, "streamed": [plain_delta(delta) for delta in stream]}
    values["logprobs"] = [[[e.token_id, e.logprob] for (e,) in entry.output.logprobs] for entry in entries]
    times = [entry.request.times for entry in entries]
    values["one time a token"] = [time.tokens == sorted(set(time.tokens)) and len(time.tokens) for time in times]
    values["finished last"] = [time.finished is not None and time.finished >= time.tokens[-1] for time in times]
    return values


def plain_delta(delta: Any) -> list[Any]:
    """Return a delta as plain values: id, text, report, reason, first logit."""
    report = None if delta.logprobs is None else [[int(e.token_id), float(e.logprob)] for e in delta.logprobs]
    return [
        delta.token_id,
        delta.text,
        report,
        delta.finish_reason,
        None if delta.logits is None else float(delta.logits[0]),
    ]


def deltas_spec(seed: int) -> Values:
    """Tell both texts, a delta for each token."""
    by_request: list[list[Any]] = []
    for index, ids in enumerate((text.in_bytes(TELLING), text.encoded(TELLING))):
        pieces = text.streamed(ids, ["fox!"]).pieces
        pieces[-1] += text.streamed(ids, ["fox!"]).rest
        reasons = [*[None] * (len(ids) - 1), "length"]
        by_request.append(
            [
                [token, piece, [[token, -float(step)]], reason, float(step + index)]
                for step, (token, piece, reason) in enumerate(zip(ids, pieces, reasons, strict=True))
            ]
        )
    reports = [[report for _, _, (report,), _, _ in deltas] for deltas in by_request]
    return {
        "deltas": by_request,
        "streamed": by_request[1],
        "logprobs": reports,
        "one time a token": [len(deltas) for deltas in by_request],
        "finished last": [True, True],
    }


REGISTRY.add(
    "L5.I.deltas",
    "Every token is one delta with its text, report and logits, for the step's caller and for the request's stream; "
    "only the last has a reason; times are noted.",
    deltas_probe,
    bitwise(deltas_spec),
    needs=BY_HAND,
)


# L5.I: aborts and errors --------------------------------------------------------------------------------------------

SHOWN, HELD = "a tale of ", "fox"  # the second part begins the stop string


def break_off(engine: Any, state: str, how: str) -> str:
    """Bring a request into a state and end it there, twice -> its id. Mutates the engine."""
    params = {"max_new_tokens": 40, "stop": [HELD + "trot"]}
    if state == "waiting":
        name = str(engine.add_request([5] * 9, make_params(params)))
        ids = list[int]()
    else:
        name = start(engine, [5] * 9, params)
        ids = text.in_bytes(SHOWN + HELD)
        ids = [] if state == "in its prompt" else ids
        engine.entries[name].request.num_computed_tokens = 4 if state == "in its prompt" else 9
        for token in ids:
            give(engine, name, token)
    if state == "preempted":
        engine.scheduler.preempt(engine.entries[name].request)
    for _ in range(2):
        if how == "abort":
            engine.abort(name)
        elif not is_over(engine, name):
            engine.finish(engine.entries[name], "error", "the row holds NaN")
    return name


HALF = text.in_bytes("ab👍")[:-1]  # the character is unfinished
STATES = ("waiting", "in its prompt", "running", "preempted")


def breaks_probe(seed: int) -> Values:
    """End requests in every state, with a neighbour that runs and one that waits; and some that cannot be aborted."""
    values: Values = {}
    for state in STATES:
        for how in ("abort", "error"):
            engine = build_engine(embedded_case(), eos=EOS, with_text=True, num_pages=40, max_running_requests=4)
            other = start(engine, [7] * 3, {"max_new_tokens": 9})
            waiting = engine.add_request([8], make_params({"max_new_tokens": 9}))
            held = pages_left(engine)
            name = break_off(engine, state, how)
            deltas = taken_deltas(engine)
            values[f"{state}, {how}"] = {
                "last delta": deltas[-1],
                "ends reported": sum(delta["finish_reason"] is not None for delta in deltas),
                "shown": "".join(delta["text"] for delta in deltas),
                "pages more": pages_left(engine) - held,
                "finished": engine.entries[name].request.times.finished is not None,
                "error of the request": engine.entries[name].request.error,
                "outcome": outcome(engine, name),
                "others": [str(engine.entries[each].request.state) for each in (other, waiting)],
            }
            engine.scheduler.check_pages()
    engine = build_engine(embedded_case(), eos=EOS, with_text=True)
    name = start(engine, [5], {"max_new_tokens": 1})
    give(engine, name, 7)
    engine.abort(name)
    engine.abort("unknown")
    values["an ended and an unknown one"] = {"deltas": taken_deltas(engine), "outcome": outcome(engine, name)}
    name = start(engine, [5], {"max_new_tokens": 9, "stop": ["b\ufffd"]})
    for token in HALF:
        give(engine, name, token)
    engine.abort(name)
    values["aborted, and the end completes a stop string"] = {"outcome": outcome(engine, name)}
    engine.deltas = []
    values["score_only"] = scored_only(engine)
    return values


def scored_only(engine: Any) -> Values:
    """Give a token to a request that asks for scores alone."""
    name = start(engine, [5], {"max_new_tokens": 9})
    request = engine.entries[name].request
    request.options = replace(request.options, score_only=True)
    give(engine, name, 7)
    ids = list(engine.entries[name].output.token_ids)
    ended = is_over(engine, name)
    return {"deltas": taken_deltas(engine), "ids": ids, "ended": ended, "times": len(request.times.tokens)}


def breaks_spec(seed: int) -> Values:
    """Expect a delta without a token that says how it ended and brings what was held back."""
    values: Values = {}
    for state in STATES:
        for how in ("abort", "error"):
            ids = text.in_bytes(SHOWN + HELD) if state in ("running", "preempted") else []
            error = "the row holds NaN" if how == "error" else None
            rest, shown = (HELD, SHOWN + HELD) if ids else ("", "")
            values[f"{state}, {how}"] = {
                "last delta": {"id": None, "text": rest, "finish_reason": how, "error": error},
                "ends reported": 1,
                "shown": shown,
                "pages more": 0,
                "finished": True,
                "error of the request": error,
                "outcome": {"ids": ids, "text": shown, "matched": None, "finish_reason": how, "error": error},
                "others": ["running", "waiting"],
            }
    done = ended([7], {"max_new_tokens": 1})
    ended_before = {part: done[part] for part in ("ids", "text", "matched", "finish_reason", "error")}
    cut = {"ids": HALF, "text": "a", "matched": None, "finish_reason": "abort", "error": None}
    scored = {"id": None, "text": "", "finish_reason": "length", "error": None}
    return {
        **values,
        "an ended and an unknown one": {"deltas": done["deltas"], "outcome": ended_before},
        "aborted, and the end completes a stop string": {"outcome": cut},
        "score_only": {"deltas": [scored], "ids": [], "ended": True, "times": 0},
    }


REGISTRY.add(
    "L5.I.breaks",
    "A request that is aborted or fails ends wherever it is: its pages are free, one delta without a token says so and "
    "brings what was held back, and no other request changes.",
    breaks_probe,
    bitwise(breaks_spec),
    needs=BY_HAND,
)
