"""Which submissions hold the same functions: pairs, and what they share.

Owns: the comparison of submissions with each other. Must not know: results. Nothing is executed.

Fingerprints are the ones that a submission is compared with the reference by: of statements, without names, comments,
layout and what computes nothing. What is the reference's own or not written yet says nothing about two students; what
many have says little.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from smoke.course.fingerprints import Prints, fingerprints, reference_marks
from smoke.framework.manifest import Lesson
from smoke.grade.submissions import Submission

SHARED = 0.6  # the share from which on a function is named
TELLING_NODES = 40  # of what is not the reference's: less says nothing about its author


@dataclass(frozen=True)
class Pair:
    """Two students and the functions of the first that they share, as ``file:name``, with the share of each.

    ``weight`` is the length of what they share, each part divided by the number of other students who have it.
    """

    first: str
    second: str
    shares: dict[str, float]
    weight: float

    @property
    def functions(self) -> tuple[str, ...]:
        """Return the functions with their shares, as words."""
        return tuple(f"{name} {share:.0%}" for name, share in self.shares.items())

    def words(self) -> str:
        """Return one sentence."""
        count = len(self.shares)
        what = f"{count} longer functions are" if count > 1 else "one longer function is"
        return f"{self.first} and {self.second}: {what} alike and not the reference's: {', '.join(self.functions)}"


def pairs(submissions: Sequence[Submission], lessons: Sequence[Lesson]) -> list[Pair]:
    """Return every pair of students who share most of a longer function, the weightiest first."""
    own = {submission.name: own_functions(submission, lessons) for submission in submissions}
    holders: dict[str, set[str]] = defaultdict(set)  # fingerprint -> students
    for student, functions in own.items():
        for each in functions.values():
            for mark in each.marks:
                holders[mark].add(student)
    shared: dict[tuple[str, str], set[str]] = defaultdict(set)
    for mark, students in holders.items():
        if mark not in reference_marks():
            for pair in combinations(sorted(students), 2):
                shared[pair].add(mark)
    found = [compare(pair, own[pair[0]], marks, holders) for pair, marks in shared.items()]
    return sorted((pair for pair in found if pair.shares), key=lambda pair: (-pair.weight, pair.first, pair.second))


def own_functions(submission: Submission, lessons: Sequence[Lesson]) -> dict[str, Prints]:
    """Return a student's longer functions as ``file:name``, without those that are mostly the reference's."""
    found = {}
    for file in (file for lesson in lessons for file in lesson.files):
        for name, each in fingerprints(submission.files.get(file, "")).items():
            if each.nodes - each.nodes_in(reference_marks()) >= TELLING_NODES:
                found[f"{file}:{name}"] = each
    return found


def compare(names: tuple[str, str], own: dict[str, Prints], marks: set[str], holders: dict[str, set[str]]) -> Pair:
    """Return what two students share, from the functions of the first and the fingerprints that both have."""
    shares: dict[str, float] = {}
    weight = 0.0
    for name, each in own.items():
        common = marks & each.marks.keys()
        length = each.nodes_in(common)
        share = each.nodes_in(common | (reference_marks() & each.marks.keys())) / each.nodes
        if length >= TELLING_NODES and share >= SHARED:
            shares[name] = share
            weight += length / (min(len(holders[mark]) for mark in common) - 1)
    return Pair(*names, shares, weight)
