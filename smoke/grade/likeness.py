"""Which submissions hold the same functions: pairs, and what they share.

Owns: the comparison of submissions with each other. Must not know: results. Nothing is executed.

The form is the one that a submission is compared with the reference in: names, comments and layout are taken away. What
is the reference's own or not written yet says nothing about two students; what many have says little.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from smoke.course.forms import forms
from smoke.framework.manifest import ENGINE, Lesson
from smoke.grade.submissions import Submission


@dataclass(frozen=True)
class Pair:
    """Two students and the functions that they share, as ``file:name``.

    ``weight`` is the length of these functions' forms, each divided by the number of other students who have it.
    """

    first: str
    second: str
    functions: tuple[str, ...]
    weight: float

    def words(self) -> str:
        """Return one sentence."""
        count = len(self.functions)
        what = f"{count} longer functions are" if count > 1 else "one longer function is"
        return f"{self.first} and {self.second}: {what} the same and not the reference's: {', '.join(self.functions)}"


def pairs(submissions: Sequence[Submission], lessons: Sequence[Lesson]) -> list[Pair]:
    """Return every pair of students who share a longer function, the weightiest first."""
    holders: dict[str, dict[str, str]] = defaultdict(dict)  # form -> student -> function
    for submission in submissions:
        for lesson in lessons:
            for file in lesson.files:
                for form, name in forms(submission.files.get(file, "")).items():
                    if form not in reference_forms():
                        holders[form].setdefault(submission.name, f"{file}:{name}")
    shared: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for form, students in holders.items():
        for one, other in combinations(sorted(students), 2):
            shared[one, other][students[one]] = len(form) / (len(students) - 1)
    found = [Pair(*names, tuple(weights), sum(weights.values())) for names, weights in shared.items()]
    return sorted(found, key=lambda pair: (-pair.weight, pair.first, pair.second))


@cache
def reference_forms() -> frozenset[str]:
    """Return the form of every longer function of the engine, whichever file it stands in."""
    return frozenset(form for file in ENGINE.rglob("*.py") for form in forms(file.read_text()))
