"""The checks of L5.J, continued: runs in which something ends early: stop strings, failing requests, interruptions.

Owns: logits processors that say a script or break, models with an invalid token, and what must come out: the text of
``spec_text.py``, an error that hits no other request, the run alone.
"""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l3 import driver as l3
from smoke.checks.l4 import k_driver as l4
from smoke.checks.l4.k_driver import make_params
from smoke.checks.l5 import spec_text as text
from smoke.checks.l5.j_engine import PLANS, Plan, alone, build_engine, drive, like_alone, run_out
from smoke.framework.cases import ModelCase, embedded_case, embedded_eos_ids, random_case
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()


# Stop strings in the engine -----------------------------------------------------------------------------------------


@contextmanager
def registered(**processors: Any) -> Iterator[None]:
    """Have logits processors in the candidate's registry for a while."""
    from mini_engine.sampler.processors import registry

    before = dict(registry.REGISTRY)
    registry.REGISTRY.update(processors)
    try:
        yield
    finally:
        registry.REGISTRY.clear()
        registry.REGISTRY.update(before)


def script_processor() -> Any:
    """Return a processor that leaves each row the one token that its request's script has next."""
    from mini_engine.sampler.processors.base import LogitsProcessor

    class Script(LogitsProcessor[tuple[list[int], int]]):
        @classmethod
        def start(cls, history: Any, arguments: Any, vocabulary: Any) -> Any:
            return list(arguments["ids"]), len(history.output_ids)

        def advance(self, state: Any, token_id: int) -> Any:
            return state[0], state[1] + 1

        def apply(self, logits: Tensor) -> None:
            for row, (ids, done) in self.states.items():
                kept = ids[min(done, len(ids) - 1)]
                logits[row] = -torch.inf
                logits[row, kept] = 0.0

    return Script


# Text, how it is spelled, stop strings, min_new_tokens.
SCRIPTS: tuple[tuple[str, str, list[str], int], ...] = (
    ("Once upon a time there was", "as encoded", ["a time"], 0),
    ("Once upon a time there was", "in bytes", ["time t", "on a"], 0),
    ("naïve 👍👎 café", "in bytes", ["👎"], 0),
    ("a.b.c.d.", "in bytes", ["."], 4),
    ("abababac", "in bytes", ["abac", "bac"], 0),
    ("The end is near", "as encoded", ["nearly"], 0),
    ("one two three", "in bytes", [], 0),
    ("x👍", "cut short", ["zebra"], 0),
)


def script_plans() -> list[Plan]:
    """Return a request for every script; it may generate exactly the script's tokens."""
    plans = []
    for index, (words, spelling, stops, least) in enumerate(SCRIPTS):
        ids = text.encoded(words) if spelling == "as encoded" else text.in_bytes(words)
        ids = ids[:-1] if spelling == "cut short" else ids
        params = {
            "max_new_tokens": len(ids),
            "stop": stops,
            "min_new_tokens": least,
            "ignore_eos": True,
            "logits_processors": {"smoke_script": {"ids": ids}},
        }
        plans.append(Plan(3 + index, params, index // 2))
    return plans


SCRIPT_LOADS: dict[str, dict[str, Any]] = {
    "one at a time": {},
    "eight at a time, preempted now and then": {"max_running_requests": 8, "max_tokens_per_step": 9, "num_pages": 40},
    "pages run out": {"max_running_requests": 8, "page_size": 1, "num_pages": 30, "preemption": True},
}


def scripts_probe(seed: int) -> Values:
    """Have the model say every script, many at a time, and keep what is told with each token."""
    case = embedded_case()
    plans = script_plans()
    given = [plan.prompt(case, seed, index) for index, plan in enumerate(plans)]
    values: Values = {}
    with registered(smoke_script=script_processor()):
        for load, options in SCRIPT_LOADS.items():
            engine = build_engine(case, with_text=True, **options)
            if "preempted" in load:
                send_back(engine)
            run = drive(engine, plans, given, squeeze="preemption" in options, rng=random.Random(seed))
            values[load] = {
                f"script {index}": {
                    **{part: request[part] for part in ("ids", "text", "finish_reason")},
                    **{f"output's {part}": request["output"][part] for part in ("ids", "text", "matched")},
                }
                for index, request in enumerate(run["requests"])
            }
    return values


def send_back(engine: Any) -> None:
    """Preempt all but one of the running requests before every fifth step. Mutates the engine."""
    plain = engine.step
    steps = iter(range(1, 10_000))

    def step() -> Any:
        if next(steps) % 5 == 0:
            for request in engine.scheduler.running[1:]:
                engine.scheduler.preempt(request)
        return plain()

    engine.step = step


def scripts_spec(seed: int) -> Values:
    """Tell every script."""
    requests: Values = {}
    for index, (plan, (_, _, stops, least)) in enumerate(zip(script_plans(), SCRIPTS, strict=True)):
        script = plan.params["logits_processors"]["smoke_script"]["ids"]
        streamed = text.streamed(script, stops, least)
        ids = script[: len(streamed.pieces)]
        requests[f"script {index}"] = {
            "ids": ids,
            "text": streamed.text,
            "finish_reason": ["length" if streamed.matched is None else "stop"],
            "output's ids": ids,
            "output's text": streamed.text,
            "output's matched": streamed.matched,
        }
    return dict.fromkeys(SCRIPT_LOADS, requests)


REGISTRY.add(
    "L5.J.stops",
    "Stop strings end each request by its own text: in a batch of others, and with the same state after a preemption.",
    scripts_probe,
    bitwise(scripts_spec),
    seconds=30.0,
)


# L5.J: who fails, fails alone ----------------------------------------------------------------------------------------

NAN_ID = 77  # a token whose embedding is NaN in one of the models


def breaking_processor() -> Any:
    """Return a processor that raises when ``after`` tokens were generated."""
    from mini_engine.sampler.processors.base import LogitsProcessor

    class Breaking(LogitsProcessor[int]):
        @classmethod
        def start(cls, history: Any, arguments: Any, vocabulary: Any) -> Any:
            return int(arguments["after"]) - len(history.output_ids)

        def advance(self, state: int, token_id: int) -> int:
            return state - 1

        def apply(self, logits: Tensor) -> None:
            if any(left == 0 for left in self.states.values()):
                raise RuntimeError("a broken processor")

    return Breaking


FAILING: tuple[Plan, ...] = (
    PLANS[0],
    Plan(6, {"max_new_tokens": 9, "allowed_token_ids": [5], "bad_words": [[5, 5]]}),  # one token, then none is left
    PLANS[4],
    Plan(7, {"max_new_tokens": 9, "temperature": 1.0, "seed": 3}, 1),  # its prompt holds the NaN token
    Plan(5, {"max_new_tokens": 9, "logits_processors": {"smoke_breaking": {"after": 2}}}, 1),
    Plan(
        9, {"max_new_tokens": 9, "temperature": 1.0, "seed": 4, "logits_processors": {"smoke_breaking": {"after": 99}}}
    ),
    PLANS[5],
    Plan(4, {"max_new_tokens": 6}, 9),  # gets pages that a failed request had
)
WHY = {1: (1, "no token"), 3: (0, "NaN"), 4: (2, "a broken processor")}  # tokens before the end, words about it
WHOSE = {1: "whose allowed tokens run out", 3: "with NaN in its prompt", 4: "whose logits processor raises"}


def failing_probe(seed: int) -> Values:
    """Run requests of which three fail, in a model with one NaN token, and look for NaN in the pool."""
    case = random_case(l3.SMALL, seed)
    weights = case.weights("float32")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][NAN_ID] = torch.nan
    given = [
        [token if token != NAN_ID else 0 for token in plan.prompt(case, seed, index)]
        for index, plan in enumerate(FAILING)
    ]
    given[3][2] = NAN_ID
    params = [{**plan.params, "logit_bias": {**plan.params.get("logit_bias", {}), NAN_ID: -100.0}} for plan in FAILING]
    plans = [replace(plan, params=own) for plan, own in zip(FAILING, params, strict=True)]
    values: Values = {}
    with registered(smoke_breaking=breaking_processor()):
        engine = build_engine(
            case, weights=weights, batch_invariant=True, max_running_requests=5, page_size=4, num_pages=40
        )
        clean = watch_pool(engine)
        taken = watch_rows(engine)
        handed = watch_clear(engine)
        run = drive(engine, plans, given, rng=random.Random(seed))
        driver = l4.build_driver(case, weights=weights, batch_invariant=True)
        for index, plan in enumerate(plans):
            values[f"request {index}"] = {"engine": run["requests"][index]}
            if index not in WHY:
                values[f"request {index}"]["alone"] = alone(driver, given[index], plan.params)
    values["books"] = [
        [number for number, is_clean in enumerate(clean) if not is_clean],
        list(engine.stale),
        [pages for pages, kept in handed if pages != list(kept)],
        [] if run["all pages free"] else ["this one"],
        [token for token in taken if token is not None and token < 0],
    ]
    return values


def watch_pool(engine: Any) -> list[bool]:
    """Note after every step whether the pool is free of NaN, but for pages that the next step is to clear. Mutates."""
    plain = engine.step
    clean = list[bool]()

    def step() -> Any:
        output = plain()
        pool = engine.worker.pool
        slots = [slot for slot in range(pool.zero_slot) if slot // pool.page_size not in engine.stale]
        clean.append(all(bool(tensor[:, slots].isfinite().all()) for tensor in [*pool.keys, *pool.values]))
        return output

    engine.step = step
    return clean


def watch_clear(engine: Any) -> list[tuple[list[int], Any]]:
    """Note what pages each step has the worker clear, and the list itself. Mutates the engine."""
    plain = engine.worker.run
    handed = list[tuple[list[int], Any]]()

    def run(step: Any) -> Any:
        handed.append((list(step.clear), step.clear))
        return plain(step)

    engine.worker.run = run
    return handed


def watch_rows(engine: Any) -> list[int | None]:
    """Note what the sampling rows take in. Mutates the engine."""
    plain = engine.rows.cumulate
    taken = list[int | None]()

    def noted(token_ids: Any) -> None:
        taken.extend(token_ids)
        plain(token_ids)

    engine.rows.cumulate = noted
    return taken


# What there must be none of over the whole run, and where to look.
NONE_OF = {
    "steps after which a page that is not in `engine.stale` holds NaN": (
        "a failed request gives back pages that hold NaN; `forward` hands them, `self.stale`, to the worker as `clear`"
    ),
    "pages in `engine.stale` at the end": (
        "after `forward` has handed the pages to the worker, `self.stale` is a new list"
    ),
    "lists of pages to clear that change when the worker has them": (
        "the worker may read its list later: make a new list for `self.stale`, and leave that one as it is"
    ),
    "runs that end with pages that are not free": (
        "`update` ends each request of `sampled.errors` by `self.finish`, which frees its pages"
    ),
    "tokens below 0 that `rows.cumulate` is given": "`sample` passes None for a row that has an error",
}


def failing_verdict(seed: int, got: Values) -> list[Failure]:
    """Three requests end with an error that says why; the others are as alone; nothing is left behind."""
    books = zip(NONE_OF.items(), got["books"], strict=True)
    failures = [Failure(words, "", "none", str(found), advice) for (words, advice), found in books if found]
    for index, plan in enumerate(FAILING):
        parts = got[f"request {index}"]
        if index in WHY:
            failures += right_error(index, parts["engine"])
        else:
            where = f"request {index} {plan.params}, which shares steps with requests that fail"
            failures += like_alone(parts["engine"], parts["alone"], plan, where)
    return failures


def right_error(index: int, request: dict[str, Any]) -> list[Failure]:
    """Ask a request that fails for its tokens before that, its reason and its message."""
    count, words = WHY[index]
    output = request["output"]
    name = f"request {index}, {WHOSE[index]}"
    want = [count, count, ["error"], ["error"]]
    have = [len(output["ids"]), output["times"], output["finish_reason"], request["finish_reason"]]
    failures = []
    if want != have:
        advice = "a row with an error gives no token: `update` ends its request, and `take_token` is not called for it"
        case = f"{name}: its tokens, their times, its finish reason, the finish reasons of its deltas"
        failures.append(Failure(case, "", str(want), str(have), advice))
    if words not in str(output["error"]):
        advice = "`update` ends the request with the message of `sampled.errors`"
        failures.append(Failure(f"{name}: its error", "", f"words about {words!r}", str(output["error"]), advice))
    return failures


REGISTRY.add(
    "L5.J.errors",
    "A row of NaN, a row without an allowed token and a processor that raises end their own request and no other, and "
    "leave no NaN in the pages that they give back.",
    failing_probe,
    failing_verdict,
    seconds=30.0,
)


ASKED = "[request, tokens that were taken before] of each question, step by step"


def asked_probe(seed: int) -> Values:
    """Run three requests, of which two end before the third, and note who is asked for forced tokens in each step.

    Beside each stands how many requests have taken their token of this step by then.
    """
    case = random_case(l3.SMALL, seed)
    engine = build_engine(case, max_running_requests=3)
    names = [
        engine.add_request(Plan(3, {}).prompt(case, seed, index), make_params({"max_new_tokens": most}))
        for index, most in enumerate((2, 4, 1))
    ]
    asked = list[tuple[str, int]]()
    engine.append_forced = lambda request: asked.append((request.request_id, len(engine.deltas)))
    steps = []
    for _ in range(4):
        engine.step()
        steps.append(sorted([names.index(name), taken] for name, taken in asked))
        asked.clear()
    return {ASKED: steps}


def asked_spec(seed: int) -> Values:
    """Ask those that have a new token and go on, after all have taken theirs."""
    return {ASKED: [[[0, 3], [1, 3]], [[1, 2]], [[1, 1]], []]}


REGISTRY.add(
    "L5.J.forced",
    "After all have taken their tokens, every request that goes on is asked for forced tokens, and none that has "
    "finished.",
    asked_probe,
    bitwise(asked_spec),
)


STALE = "pages to clear: after the interruption, handed to the next step, left then"
INTERRUPTED = ("run", "sampler", "cumulate")  # before the layers, before the choice, and just after it


def interrupted_probe(seed: int) -> Values:
    """Interrupt every third call of some parts of a step, as Ctrl-C would, and step on."""
    case = random_case(l3.SMALL, seed)
    plans = [plan for plan in PLANS if plan.aborted is None]
    given = [plan.prompt(case, seed, index) for index, plan in enumerate(plans)]
    driver = l4.build_driver(case, batch_invariant=True)
    values: Values = {"alone": [alone(driver, p, plan.params) for p, plan in zip(given, plans, strict=True)]}
    for part in INTERRUPTED:
        engine = build_engine(case, batch_invariant=True, max_running_requests=6, max_tokens_per_step=9)
        interruptions = interrupt(engine, part)
        values[part] = drive(engine, plans, given)["requests"]
        values[f"{part}, interruptions"] = len(interruptions)
    return values | {STALE: stale_pages(case)}


def stale_pages(case: ModelCase) -> list[list[int]]:
    """Interrupt a step that has a page to clear, and compute it again.

    Returns the pages that are left to clear, those that the second step hands over, and what is left then.
    """
    engine = build_engine(case, num_pages=9)
    engine.add_request([1, 2, 3], make_params({"max_new_tokens": 2}))
    engine.stale = [8]
    run = engine.worker.run
    seen: list[list[int]] = []

    def interrupted(step: Any) -> Any:
        raise KeyboardInterrupt

    engine.worker.run = interrupted
    try:
        engine.step()
    except KeyboardInterrupt:
        seen.append(list(engine.stale))
    engine.worker.run = run
    handed = watch_clear(engine)
    engine.step()
    return [*seen, *(pages for pages, _ in handed), list(engine.stale)]


def interrupt(engine: Any, part: str) -> list[int]:
    """Let every third call of a part raise, and each step be tried until it works. Mutates the engine."""
    owner = {"run": engine.worker, "sampler": engine.driver, "cumulate": engine.rows}[part]
    plain = getattr(owner, part)
    step = engine.step
    raised = list[int]()
    calls = list[int]()

    def now_and_then(*arguments: Any) -> Any:
        calls.append(1)
        late = plain(*arguments) if part == "cumulate" else None
        if len(calls) % 3 == 2:
            raise KeyboardInterrupt
        return late if part == "cumulate" else plain(*arguments)

    def persistent() -> Any:
        for _ in range(9):
            try:
                return step()
            except KeyboardInterrupt:
                raised.append(1)
        raise RuntimeError("nine interruptions in a row")

    setattr(owner, part, now_and_then)
    engine.step = persistent
    return raised


def interrupted_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare with the runs alone, to the bit."""
    failures = differences([[8], [8], []], got[STALE], None, STALE)
    plans = [plan for plan in PLANS if plan.aborted is None]
    for part in INTERRUPTED:
        if got[f"{part}, interruptions"] < 4 and part != "cumulate":  # rows may be built anew in every step
            failures.append(Failure(f"{part}", "", "steps that go through this part", "few or none"))
        for index, plan in enumerate(plans):
            where = f"{part} interrupted, request {index} {plan.params}"
            failures += like_alone(got[part][index], got["alone"][index], plan, where)
    return failures


REGISTRY.add(
    "L5.J.interrupted",
    "A step that is interrupted is computed again: no request loses a token, gains one or has one counted twice, and "
    "no page to clear is forgotten.",
    interrupted_probe,
    interrupted_verdict,
    seconds=30.0,
)


# Grammars -----------------------------------------------------------------------------------------------------------

ANSWERS = ("yes|no", "[a-f]{3} [0-9]{2}", '\\{"name": "(Mila|Tom)", "age": [0-9]\\}')
GUIDED_LOADS: dict[str, dict[str, Any]] = {
    "one at a time": {},
    "eight at a time": {"max_running_requests": 8, "max_tokens_per_step": 9},
    "eight at a time, with jumps": {"max_running_requests": 8, "max_tokens_per_step": 9, "jump_forward": True},
}


def guided_plans() -> list[Plan]:
    """Return requests with a grammar, and one of each two without."""
    plans = []
    for index in range(2 * len(ANSWERS)):
        grammar = {} if index % 2 else {"regex": ANSWERS[index // 2]}
        plans.append(Plan(3 + index, {"max_new_tokens": 40, "logprobs": 0, **grammar}, index))
    return plans


def guided_probe(seed: int) -> Values:
    """Serve them, and once more only those without a grammar."""
    case = embedded_case()
    plans = guided_plans()
    eos = sorted(embedded_eos_ids())
    free = [replace(plan, params={**plan.params, "regex": None}) for plan in plans]
    values: Values = {}
    for load, options in GUIDED_LOADS.items():
        runs = []
        for each in (plans, free):
            engine = build_engine(case, eos=eos, with_text=True, batch_invariant=True, grammar_backend="fsm", **options)
            names = [
                engine.add_request(plan.prompt(case, seed, index), make_params(plan.params))
                for index, plan in enumerate(each)
            ]
            run_out(engine)
            runs.append([engine.take_output(name) for name in names])
            engine.close()
        values[load] = {
            "in the language": [
                bool(re.fullmatch(pattern, output.text)) for pattern, output in zip(ANSWERS, runs[0][::2], strict=True)
            ],
            "ends": [[o.finish_reason, o.is_grammar_complete, o.error] for o in runs[0][::2]],
            "a report for each token": [len(o.logprobs) == len(o.token_ids) for o in runs[0]],
            "the others answer as without": [
                own.token_ids == other.token_ids for own, other in zip(runs[0][1::2], runs[1][1::2], strict=True)
            ],
        }
    return values


def guided_spec(seed: int) -> Values:
    """Expect a whole answer of each grammar, and neighbours that notice nothing."""
    each = {
        "in the language": [True] * 3,
        "ends": [["stop", True, None]] * 3,
        "a report for each token": [True] * 6,
        "the others answer as without": [True] * 3,
    }
    return dict.fromkeys(GUIDED_LOADS, each)


REGISTRY.add(
    "L5.J.grammars",
    "A request with a grammar gets an answer of its language, with forced tokens and without, and its neighbours get "
    "what they get together with others.",
    guided_probe,
    bitwise(guided_spec),
)
