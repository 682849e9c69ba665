"""L5.J.interrupted: steps that Ctrl-C ends, and what the engine does when it steps on."""

from typing import Any

from smoke.checks.l3 import driver as l3
from smoke.checks.l4 import k_driver as l4
from smoke.checks.l4.k_driver import make_params
from smoke.checks.l5.j_engine import PLANS, alone, build_engine, drive, like_alone
from smoke.checks.l5.j_failures import watch_clear
from smoke.framework.cases import ModelCase, random_case
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()

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
