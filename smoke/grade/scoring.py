"""From results to points.

Owns: the rules of scoring. Must not know: how a result came about, how it is written down.

A task's points are earned when all of its checks pass, and not in part: half of a bit-equal function is not half of the
work. Only the status "pass" counts; whatever has no result has one that says why, and zero points.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from smoke.framework.check import Check, Result, Status, block_dependents, checks_of
from smoke.framework.manifest import Lesson, Task
from smoke.grade.authorship import Authorship
from smoke.grade.submissions import Submission

Mode = Literal["isolated", "cumulative"]
MODES: tuple[Mode, ...] = get_args(Mode)
NOT_HANDED_IN = "not handed in: "  # begins the detail of every result of a lesson that has no file
NOT_THERE = "not handed in"  # what stands in the place of a status then
# The first of these that any check of a task has is the task's status; a task without results is "skipped".
WORST_FIRST: tuple[Status, ...] = ("crashed", "timeout", "fail", "not-implemented", "blocked", "skipped", "pass")


@dataclass(frozen=True)
class TaskScore:
    """One task of one student in one mode."""

    task: Task
    results: tuple[Result, ...]
    withheld: str = ""

    @property
    def status(self) -> Status:
        """The worst status of its checks."""
        found = {result.status for result in self.results}
        return next((status for status in WORST_FIRST if status in found), "skipped")

    @property
    def earned(self) -> int:
        """All of its points, or none."""
        done = bool(self.results) and all(result.passed for result in self.results)
        return self.task.points if done and not self.withheld else 0


@dataclass(frozen=True)
class LessonScore:
    """One lesson of one student in one mode. The student reads the ``notes``, but no ``remarks`` about the source."""

    lesson: Lesson
    mode: Mode
    tasks: tuple[TaskScore, ...]
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    withheld: str = ""

    @property
    def core(self) -> tuple[TaskScore, ...]:
        """The tasks that are not optional."""
        return tuple(task for task in self.tasks if not task.task.is_optional)

    @property
    def earned(self) -> int:
        """The points of its core tasks."""
        return sum(task.earned for task in self.core)

    @property
    def points(self) -> int:
        """What could be earned in core tasks."""
        return sum(task.task.points for task in self.core)

    @property
    def extra(self) -> int:
        """The points of its optional tasks, which stand beside the others."""
        return sum(task.earned for task in self.tasks) - self.earned

    @property
    def results(self) -> tuple[Result, ...]:
        """Every check's result."""
        return tuple(result for task in self.tasks for result in task.results)

    @property
    def handed_in(self) -> bool:
        """Whether the student handed in any file of the lesson."""
        return not all(result.detail.startswith(NOT_HANDED_IN) for result in self.results)

    @property
    def reason(self) -> str:
        """One line that says why points are missing, or nothing."""
        if self.earned == self.points:
            return ""
        if not self.handed_in:
            return self.results[0].detail
        if self.withheld:
            return self.withheld
        lost = [task for task in self.core if not task.earned]
        cause = next((task for status in WORST_FIRST for task in lost if task.status == status), lost[0])
        detail = next((r.detail.splitlines()[0] for r in cause.results if not r.passed and r.detail), "")
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"{cause.task.id} {cause.status}{others}" + (f": {detail}" if detail else "")


@dataclass(frozen=True)
class StudentScore:
    """Everything about one student: lessons in order, both modes each."""

    submission: Submission
    scores: tuple[LessonScore, ...]

    def of_mode(self, mode: Mode) -> tuple[LessonScore, ...]:
        """Return the lessons in one mode."""
        return tuple(score for score in self.scores if score.mode == mode)

    def total(self, mode: Mode) -> tuple[int, int]:
        """Return earned and possible points of one mode."""
        return sum(s.earned for s in self.of_mode(mode)), sum(s.points for s in self.of_mode(mode))


def score_student(
    submission: Submission,
    lessons: Sequence[Lesson],
    results: Mapping[tuple[str, Mode], Sequence[Result]],
    notes: Mapping[tuple[str, Mode], Sequence[str]],
    authorships: Mapping[str, Authorship],
) -> StudentScore:
    """Score ``lessons`` of one student. ``results`` and ``notes`` are by lesson and mode, ``authorships`` by lesson."""
    scores: list[LessonScore] = []
    for mode in MODES:
        whole: list[Result] = []  # a lesson that builds on a wrong earlier one is blocked by it in cumulative mode
        withheld = ""
        for lesson in lessons:
            own = complete(checks_of([lesson]), results.get((lesson.id, mode), ()))
            whole = [*whole, *own] if mode == "cumulative" else own
            seen = {result.check_id for result in own}
            labelled = [result for result in block_dependents(whole) if result.check_id in seen]
            authorship = authorships.get(lesson.id, Authorship())
            withheld = authorship.withheld or (withheld if mode == "cumulative" else "")
            own_notes = tuple(notes.get((lesson.id, mode), ()))
            remarks = tuple(authorship.notes())
            tasks = tuple(TaskScore(t, tuple(of_task(t, labelled)), withheld) for t in lesson.tasks)
            scores.append(LessonScore(lesson, mode, tasks, own_notes, remarks, withheld))
    return StudentScore(submission, tuple(scores))


def complete(checks: Sequence[Check], results: Sequence[Result]) -> list[Result]:
    """Return one result per check; a check without one was not run, which is worth nothing."""
    found = {result.check_id: result for result in results}
    return [found.get(check.id) or Result(check.id, "skipped", detail="it was not run") for check in checks]


def of_task(task: Task, results: Sequence[Result]) -> Iterator[Result]:
    """Yield the results of one task."""
    return (result for result in results if result.check_id.rpartition(".")[0] == task.id)
