"""Running mutants: the checks in a good order, until one of them fails.

Owns: which checks a mutant meets and in which order, their time limits, workers, the fate of each mutant. Must not
know: how mutants are made.

The reference runs first. It says what each check costs, from which its time limit and its place in the order follow,
and what the right answers are: a verdict that passed an answer once is not asked about the same answer again.
"""

import queue
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from smoke.bank.accept import write_overlay
from smoke.bank.mutation.mutants import Mutant
from smoke.framework.check import DEFAULT_SEED, Check, Failure, Plain, Result, Values, Verdict, all_checks, tasks_needed
from smoke.framework.manifest import load_manifest
from smoke.runner.runner import PATIENCE, Candidate, Runner

MIN_SECONDS = 3.0  # of a check's time limit
MARGIN = 10.0  # times what the reference took
MEMORY = 8 << 30  # bytes that a mutant may map for itself: an endless list must not fill the machine


@dataclass(frozen=True)
class Fate:
    """What became of a mutant: the check that failed, and the status of its result; both empty for a survivor."""

    mutant: Mutant
    check_id: str = ""
    status: str = ""

    @property
    def killed(self) -> bool:
        """Whether a check failed."""
        return bool(self.check_id)


class KilledError(Exception):
    """A check has failed: the rest of the checks need not run."""

    def __init__(self, result: Result) -> None:
        """Keep the result."""
        super().__init__(result.check_id)
        self.result = result


class Trial:
    """The checks of the lessons that mutants come from, and what the reference did in them."""

    def __init__(self, checks: Sequence[Check], seed: int = DEFAULT_SEED) -> None:
        """Take the checks as they are; ``measure`` must follow."""
        self.seed = seed
        self.checks = [replace(check, verdict=remembering(check.verdict)) for check in checks]
        self.cost: dict[str, float] = {}

    def measure(self, runner: Runner) -> None:
        """Run the reference. Raises ``RuntimeError`` for a check that it does not pass. Mutates."""
        outcome = runner.run(Candidate("reference"), self.checks, self.seed)
        wrong = [result.check_id for result in outcome.results if not result.passed]
        if wrong:
            raise RuntimeError(
                f"the reference does not pass {wrong[0]}; `python -m smoke accept -k reference` says why"
            )
        self.cost = {result.check_id: result.seconds for result in outcome.results}
        self.checks = [replace(check, seconds=max(MIN_SECONDS, MARGIN * self.cost[check.id])) for check in self.checks]

    def checks_for(self, mutant: Mutant) -> list[Check]:
        """Return the checks that can see a mutant: its task's own, then those that build on it; cheap ones first."""
        seeing = [check for check in self.checks if sees(check, mutant.task_id)]
        return sorted(seeing, key=lambda check: (check.task_id != mutant.task_id, self.cost[check.id]))

    def run(self, runner: Runner, mutant: Mutant) -> Fate:
        """Run one mutant until a check fails."""

        def stop_at_failure(result: Result) -> None:
            if result.status not in ("pass", "skipped"):
                raise KilledError(result)

        with tempfile.TemporaryDirectory(prefix="smoke-mutant-") as folder:
            write_overlay(Path(folder), {mutant.file: mutant.text})
            candidate = Candidate(mutant.id, Path(folder), (mutant.file,))
            try:
                runner.run(candidate, self.checks_for(mutant), self.seed, stop_at_failure)
            except KilledError as killed:
                return Fate(mutant, killed.result.check_id, killed.result.status)
        return Fate(mutant)


def fates(mutants: Sequence[Mutant], workers: int, own_checks: bool = False) -> Iterator[Fate]:
    """Run mutants with ``workers`` servers and yield what became of each, as it comes.

    ``own_checks``: leave out the checks of tasks that no mutant is of, though they may see one.
    """
    tasks = {mutant.task_id for mutant in mutants}
    seeing = [check for check in all_checks().values() if any(sees(check, task_id) for task_id in tasks)]
    trial = Trial([check for check in seeing if check.task_id in tasks or not own_checks])
    idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()

    def run(mutant: Mutant) -> Fate:
        runner = idle.get()
        try:
            return trial.run(runner, mutant)
        finally:
            idle.put(runner)

    with ExitStack() as stack:
        for _ in range(workers):
            runner = Runner(limits={"RLIMIT_DATA": MEMORY}, patience=PATIENCE)
            runner.prepare({check.id for check in trial.checks})
            idle.put(stack.enter_context(runner))
        trial.measure(runner)
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        for done in as_completed([pool.submit(run, mutant) for mutant in mutants]):
            yield done.result()


def sees(check: Check, task_id: str) -> bool:
    """Whether a check of the task's own lesson runs code of the task: by itself or through what it builds on."""
    if check.lesson_id != load_manifest().task(task_id).lesson_id:
        return False
    return check.task_id == task_id or task_id in tasks_needed(check, load_manifest())


def remembering(verdict: Verdict) -> Verdict:
    """Return a verdict that passes an answer at once if it is, bit for bit, the first one that it passed."""
    passed: list[tuple[int, Values]] = []

    def judge(seed: int, values: Values) -> list[Failure]:
        if passed and passed[0][0] == seed and same(passed[0][1], values):
            return []
        failures = verdict(seed, values)
        if not failures and not passed:
            passed.append((seed, values))
        return failures

    return judge


def same(one: Plain, other: Plain) -> bool:
    """Whether two plain values are equal in type, structure and every bit of every tensor."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)  # of a number or a text; NaN is NaN here
