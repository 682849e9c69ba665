"""The checks of whole made-up runs with drafts (L10.C): nobody waits for them, and every token comes once. No model.

Owns: the worlds of L5 with a drafter that is always wrong, whose steps must be those without drafts, and with one that
is often right. What decides how much a request guesses (L10.B) is not asked.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from smoke.checks.l5.d_share import chunk_list
from smoke.checks.l5.g_step import build_all, make_scheduler, step_failures, tokens_of
from smoke.checks.l5.spec_scheduling import World, draw_world, tell, token
from smoke.checks.l10.c_room import VOCABULARY, build_drafting
from smoke.checks.l10.machine import keen
from smoke.framework.check import Failure, Registry, Values, noting
from smoke.framework.prepared import prepared

REGISTRY = Registry()


@prepared
def worlds(seed: int) -> dict[str, World]:
    """Draw worlds in which pages are short, with and without preemption."""
    return {
        f"{policy}, preemption {preemption}": draw_world(f"drafts {seed}", policy, preemption, 20)
        for policy in ("fcfs", "lof", "shortest")
        for preemption in (False, True)
    }


class Teller:
    """Proposes what the made-up model says of a request, now and then with a fault. The first token is its number."""

    def __init__(self, dice: random.Random, right: float) -> None:
        """``right``: how often a guess is all right; at 0 every one is wrong from its first id on."""
        self.dice = dice
        self.right = right

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return ``most`` ids."""
        draft = [token(f"r{tokens[0]}", len(tokens) + place) for place in range(most)]
        if self.dice.random() >= self.right:
            place = self.dice.randrange(most) if self.right else 0
            draft[place:] = [(token_id + 1) % VOCABULARY for token_id in draft[place:]]
        return draft


def live(world: World, requests: dict[str, Any], scheduler: Any, drafting: Any) -> Iterator[Any]:
    """Run a world with drafts, step by step; yield each step before and after it is extended.

    Tokens that were drafted come in the step if the made-up model says them.
    """
    real = {person.name: person.real for person in world.people}
    with noting() as done:
        for step in range(world.most_steps):
            if not world.enter(step, requests, scheduler, done):
                return
            done.append(f"schedule step {step}")
            batch = scheduler.schedule()
            done.append(f"extend {chunk_list(batch.chunks)}")
            wide = drafting.extend(batch)
            yield batch, wide
            compute(scheduler, wide, real)
            done.append("give_back")
            drafting.give_back(wide)
            scheduler.check_pages()


def compute(scheduler: Any, batch: Any, real: dict[str, int]) -> None:
    """Sample for every chunk, and go on with a draft while it says what is sampled."""
    from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk

    waiting = [(chunk, chunk.draft) for chunk in batch.chunks]
    scheduler.update(batch, tokens_of(batch))
    while waiting:
        goes_on = []
        for chunk, draft in waiting:
            request = chunk.request
            if not chunk.samples:
                continue
            if request.num_output_tokens == real[request.request_id]:
                scheduler.finish(request, "stop")
            elif draft and request.output_ids[-1] == draft[0]:
                goes_on.append((ScheduledChunk(request, request.num_computed_tokens, 1, True), draft[1:]))
        if goes_on:
            ahead = ScheduledBatch([chunk for chunk, _ in goes_on], [])
            scheduler.update(ahead, tokens_of(ahead))
        waiting = goes_on


def run_world(world: World, seed: str, right: float) -> Values:
    """Live through a world and tell its steps, what was drafted, and what became of each request."""
    requests = build_all(world)
    for name, request in requests.items():
        request.prompt_ids = [int(name[1:]), *request.prompt_ids[1:]]
    dice = random.Random(seed)
    scheduler = make_scheduler(world.rules)
    rows = dice.choice([8, 16, 40])
    steps, beyond, unpaged = [], 0, 0
    with keen():
        drafting = build_drafting(scheduler, lambda: Teller(dice, right), rows)
        for batch, wide in live(world, requests, scheduler, drafting):
            drafted = sum(len(chunk.draft) for chunk in wide.chunks)
            limit = max(batch.num_tokens, min(rows, world.rules.budget or rows))
            beyond += batch.num_tokens + drafted > limit
            unpaged += sum(lacks_page(chunk, world.rules.page_size) for chunk in wide.chunks)
            gone = sorted(request.request_id for request in batch.preempted)
            steps.append({"chunks": chunk_list(wide.chunks), "preempted": gone, "drafted": drafted})
    return {
        "steps": steps,
        "outputs": {who: list(map(int, request.output_ids)) for who, request in requests.items()},
        "not finished": [who for who, request in requests.items() if request.state.value != "finished"],
        "steps with too many rows": beyond,
        "drafts without pages": unpaged,
    }


def lacks_page(chunk: Any, page_size: int) -> bool:
    """Whether the last token of a draft has no page."""
    request = chunk.request
    return bool(chunk.draft) and request.num_tokens + len(chunk.draft) > len(request.pages) * page_size


def wrong_probe(seed: int) -> Values:
    """Live through all worlds with drafts that are always wrong."""
    return {name: run_world(world, f"wrong {seed} {name}", 0.0) for name, world in worlds(seed).items()}


def wrong_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare every step with the same world without drafts."""
    failures = []
    for name, world in worlds(seed).items():
        run = got[name]
        failures += step_failures(name, tell(world), run["steps"])
        failures += limit_failures(name, run)
    return failures


def limit_failures(name: str, run: Values) -> list[Failure]:
    """Ask for drafts, within the rows and pages that there are."""
    failures = []
    if not sum(step["drafted"] for step in run["steps"]):
        failures.append(Failure(name, "drafts", "some", "none"))
    for what in ("steps with too many rows", "drafts without pages", "not finished"):
        if run[what]:
            failures.append(Failure(name, what, "none", str(run[what])))
    return failures


REGISTRY.add(
    "L10.C.nobody",
    "Drafts that are always wrong change no step: who runs with which tokens, who is preempted and who waits is as "
    "without drafts, also where pages are short.",
    wrong_probe,
    wrong_verdict,
    seconds=40.0,
)


def right_probe(seed: int) -> Values:
    """Live through all worlds with drafts of which many are right."""
    return {name: run_world(world, f"right {seed} {name}", 0.7) for name, world in worlds(seed).items()}


def right_verdict(seed: int, got: Values) -> list[Failure]:
    """Every request gets its own tokens, each once, up to its end or its abort."""
    failures = []
    for name, world in worlds(seed).items():
        run = got[name]
        aborted = {who for gone in world.aborts.values() for who in gone}
        for person in world.people:
            mine = run["outputs"][person.name]
            count = len(mine) if person.name in aborted else min(person.real, person.most)
            expected = [token(person.name, person.prompt + place) for place in range(count)]
            if mine != expected or count > person.real:
                failures.append(Failure(f"{name}, the output of {person.name}", "", str(expected), str(mine)))
        failures += limit_failures(name, run)
    return failures


REGISTRY.add(
    "L10.C.right",
    "Where drafts come, every request gets its tokens, each once and none beyond its most, on pages of its own.",
    right_probe,
    right_verdict,
    seconds=40.0,
)
