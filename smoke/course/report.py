"""The words about results: one line per check, and what to do about a failure.

Owns: text. Must not know: how a check was run.
"""

from collections.abc import Sequence

from smoke.framework.bank import Pitfall
from smoke.framework.check import Check, Failure, Result
from smoke.framework.manifest import Lesson, load_manifest

MARKS = {
    "pass": "PASS",
    "fail": "FAIL",
    "blocked": "blocked",
    "timeout": "TIMEOUT",
    "crashed": "CRASHED",
    "not-implemented": "to do",
    "skipped": "skipped",
}
MAX_FAILURES = 3


def line(result: Result) -> str:
    """Return one line: id, status, and why if it can be said in a few words."""
    reason = result.detail
    if result.status == "blocked":
        reason = f"waits for {result.blocked_by}"
    elif result.status == "not-implemented":
        reason = ""
    return f"{result.check_id:<22} {MARKS[result.status]:<8} {reason.splitlines()[0] if reason else ''}".rstrip()


def timed_line(result: Result) -> str:
    """Return the line with the seconds that the code took, where it ran."""
    took = f"{result.seconds:.2f} s" if result.seconds else ""
    return f"{line(result):<40} {took:>8}".rstrip()


def explain(result: Result, check: Check, alike: Sequence[Pitfall] = ()) -> str:
    """Return what helps with a check that did not pass. ``alike``: the pitfalls that gave the same values."""
    lesson = load_manifest().lesson(check.lesson_id)
    parts = [f"{check.id}  {MARKS[result.status]}", f"  checked   {check.proves}"]
    if result.detail:
        parts.append("  what      " + result.detail.replace("\n", "\n            "))
    if result.blocked_by:
        parts.append(f"  waits for {result.blocked_by}: this check says little before that task passes")
    for failure in result.failures[:MAX_FAILURES]:
        parts += describe(failure)
    if len(result.failures) > MAX_FAILURES:
        parts.append(f"  and       {len(result.failures) - MAX_FAILURES} more differences")
    parts.append(f"  read      {lesson.page(load_manifest().task(check.task_id))}")
    for pitfall in alike:
        parts.append(f"  same as   {pitfall.id}: {pitfall.title}: {pitfall.symptom}")
    parts.append(f"  hint      python -m smoke hint {check.task_id}")
    return "\n".join(parts)


def describe(failure: Failure) -> list[str]:
    """Return the lines about one difference."""
    where = ", ".join(part for part in (failure.case, failure.place) if part)
    lines = [f"  where     {where}"]
    if failure.expected:
        lines.append(f"  expected  {failure.expected}")
    if failure.got:
        lines.append(f"  got       {failure.got}")
    if failure.note:
        lines.append(f"  note      {failure.note}")
    return lines


def banner(lesson: Lesson, checks: int) -> str:
    """Return the line that says a lesson is done."""
    return f"{lesson.id} PASS  {lesson.title}: {checks} checks"


def count(results: Sequence[Result]) -> str:
    """Return how many results there are of each status, passes first."""
    counts = {status: sum(result.status == status for result in results) for status in MARKS}
    return ", ".join(f"{number} {MARKS[status].lower()}" for status, number in counts.items() if number)
