"""The run itself: every lesson of every submission once, on several workers, kept as it is finished.

Before it, the reference of the lessons that are graded is proved: under the same conditions and on the same inputs all
of its checks pass. A proof is kept like a record, so who goes on, or grades one student anew, does not wait for it.

Owns: the queue and the progress. Must not know: how a report looks.
"""

import queue
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from smoke.framework.check import Result, checks_of
from smoke.framework.manifest import ENGINE, Lesson
from smoke.grade.authorship import examine
from smoke.grade.records import Records
from smoke.grade.scoring import MODES, NOT_HANDED_IN, Mode, StudentScore, score_student
from smoke.grade.submissions import Submission
from smoke.grade.trial import Isolation
from smoke.grade.worker import MAX_LOG, ModeRun, Worker, lessons_of_mode

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What one lesson of one submission may use: seconds of the processor, bytes of memory."""

    seconds: int
    memory: int


def grade(
    submissions: Sequence[Submission],
    lessons: Sequence[Lesson],
    records: Records,
    isolation: Isolation,
    limits: Limits,
    jobs: int,
    hidden: Sequence[Path] = (),
) -> list[StudentScore]:
    """Grade ``lessons`` of every submission and return the scores in the same order.

    ``hidden`` are folders that candidates must not read, such as the report's. Raises what a worker raised, after the
    others have stopped; what a submission does is never such an error.
    """
    everything = [(submission, lesson) for submission in submissions for lesson in lessons]
    missing = [(submission, lesson) for submission, lesson in everything if records.load(submission, lesson) is None]
    handed_in = {lesson for submission, lesson in missing if not submission.files.keys().isdisjoint(lesson.files)}
    waiting = queue_of(missing)
    with ExitStack() as stack:
        numbers = range(min(jobs, len(missing)))
        settings = [isolation.confinement(number, limits.memory, limits.seconds, hidden) for number in numbers]
        workers = [stack.enter_context(Worker(confinement)) for confinement in settings]
        prove_reference(workers, [lesson for lesson in lessons if lesson in handed_in], records)
        done = len(everything) - len(missing)
        bar = stack.enter_context(tqdm(total=len(everything), initial=done, desc="grading", unit="lesson"))

        def work(worker: Worker) -> None:
            for submission, lesson in taken_from(waiting):
                records.save(submission, lesson, run_safely(worker, submission, lesson, records.seed))
                bar.update()

        work_together(work, workers, waiting)
    return [score_recorded(submission, lessons, records) for submission in submissions]


def queue_of(items: Iterable[T]) -> "queue.Queue[T]":
    """Return a queue that holds ``items``."""
    waiting: queue.Queue[T] = queue.Queue()
    for item in items:
        waiting.put(item)
    return waiting


def taken_from(waiting: "queue.Queue[T]") -> Iterator[T]:
    """Yield what waits until nothing does; several threads may take from one queue."""
    with suppress(queue.Empty):
        while True:
            yield waiting.get_nowait()


def work_together(work: Callable[[Worker], None], workers: Sequence[Worker], waiting: "queue.Queue[Any]") -> None:
    """Let every worker work in a thread. Raises what one raised, or an interrupt, when the others have stopped."""
    errors: list[BaseException] = []

    def stop(error: BaseException) -> None:
        errors.append(error)
        for _ in taken_from(waiting):  # the lessons that are being run are finished and kept
            pass

    def guarded(worker: Worker) -> None:
        try:
            work(worker)
        except BaseException as error:  # kept for the caller: an exception of a thread would be lost
            stop(error)

    with ThreadPoolExecutor(max(1, len(workers))) as pool:  # an interrupted ``join`` takes a thread for ended
        try:
            wait([pool.submit(guarded, worker) for worker in workers])
        except KeyboardInterrupt as error:
            stop(error)
            words = "interrupted: what is running is finished and kept; Ctrl-C once more ends at once"
            tqdm.write(words, file=sys.stderr)
    if errors:
        raise errors[0]


def prove_reference(workers: Sequence[Worker], lessons: Sequence[Lesson], records: Records) -> None:
    """Run the checks of ``lessons`` on the reference, where no proof is kept. Raises ``RuntimeError`` if one fails.

    There is no grading on a machine, or under limits, where the right answer fails.
    """
    unproved = [lesson for lesson in lessons if not records.is_proved(lesson)]
    if not unproved:
        return
    waiting = queue_of(unproved)
    with tqdm(total=len(checks_of(unproved)), desc="proving the reference", unit="check") as bar:

        def report(_: Result) -> None:
            bar.update()

        def prove(worker: Worker) -> None:
            for lesson in taken_from(waiting):
                outcome = worker.run_reference(lesson, records.seed, report=report)
                for result in outcome.results:
                    if not result.passed:
                        why = explain_short(result, outcome.log)
                        raise RuntimeError(f"the reference does not pass {result.check_id} here, {why}")
                records.save_proof(lesson)

        work_together(prove, workers, waiting)


def explain_short(result: Result, log: str) -> str:
    """Return why the reference fails, in one line, and what to do."""
    why = result.detail or "; ".join(f"{failure.case} {failure.got}" for failure in result.failures[:1])
    last = (log.strip().splitlines() or ["nothing"])[-1]
    return (
        f"so nothing is graded ({result.status}: {why}; it printed last: {last}); "
        "try more --mem or --timeout, then `python -m smoke doctor`"
    )


def run_safely(worker: Worker, submission: Submission, lesson: Lesson, seed: int) -> dict[Mode, ModeRun]:
    """Run one lesson; whatever a submission makes the grader stumble over stands in its own report and ends there."""
    try:
        return run_lesson(worker, submission, lesson, seed)
    except Exception as error:
        worker.runner.stop_server()
        reason = f"grading this lesson stopped with {type(error).__name__}: {str(error)[:300]}"
        results = tuple(Result(check.id, "crashed", detail=reason) for check in checks_of([lesson]))
        return dict.fromkeys(MODES, ModeRun(results, None, (reason,), traceback.format_exc()[-MAX_LOG:]))


def run_lesson(worker: Worker, submission: Submission, lesson: Lesson, seed: int) -> dict[Mode, ModeRun]:
    """Run one lesson in both modes; where they are the same, once."""
    if not any(file in submission.files for file in lesson.files):
        missing = NOT_HANDED_IN + ", ".join(lesson.files)
        results = tuple(Result(check.id, "not-implemented", detail=missing) for check in checks_of([lesson]))
        return dict.fromkeys(MODES, ModeRun(results, None, ()))
    found: dict[Mode, ModeRun] = {}
    for mode in MODES:
        lessons = lessons_of_mode(lesson, mode)
        earlier_own = any(
            submission.files.get(file) != (ENGINE / file).read_text() for other in lessons[:-1] for file in other.files
        )
        same = mode == "cumulative" and not earlier_own
        found[mode] = found["isolated"] if same else worker.run(submission, lessons, seed)
    return found


def score_recorded(submission: Submission, lessons: Sequence[Lesson], records: Records) -> StudentScore:
    """Score one student from the records."""
    results: dict[tuple[str, Mode], Sequence[Result]] = {}
    notes: dict[tuple[str, Mode], Sequence[str]] = {}
    for lesson in lessons:
        for mode, run in (records.load(submission, lesson) or {}).items():
            results[lesson.id, mode] = run.results
            absent = [file for file in lesson.files if file not in submission.files]
            partly = absent and len(absent) < len(lesson.files)
            notes[lesson.id, mode] = [NOT_HANDED_IN + file for file in absent if partly] + list(run.notes)
    authorships = {lesson.id: examine(submission, lesson) for lesson in lessons}
    return score_student(submission, lessons, results, notes, authorships)
