"""Which pitfall a failed check looks like: the one that gives the same values.

A pitfall is run on the same probe with the same inputs as the candidate. It is named if what it returns equals the
candidate's answer to the bit, or to ``TOLERANCE`` where the reference's answer is ``FAR`` from it: a nearly right
answer is near every pitfall that merely rounds. Otherwise nothing is said.
"""

import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from smoke.framework.bank import Pitfall, fitting_pitfalls
from smoke.framework.check import Check, Failure, ProbeError
from smoke.framework.compare import differences
from smoke.runner.runner import Answer, Candidate, Runner

TOLERANCE = 1e-5  # other libraries and other orders of additions round differently
FAR = 1e-2  # a mistake, and no rounding
MOST_RUN = 20  # pitfalls for one check; each takes a process
MOST_NAMED = 3


class Alike:
    """Finds the pitfalls that answer as a candidate did. Remembers what each pitfall answered."""

    def __init__(self, runner: Runner) -> None:
        """Run pitfalls with ``runner``."""
        self.runner = runner
        self.answers: dict[tuple[str, str, int], Answer | None] = {}

    def pitfalls(self, check: Check, seed: int, answer: Answer, passed: Collection[str] = ()) -> list[Pitfall]:
        """Return the pitfalls whose answer to the probe of ``check`` is ``answer``, at most ``MOST_NAMED``.

        ``passed``: checks that the candidate passed; a pitfall that one of them catches is not run. Mutates the memory.
        """
        likely = fitting_pitfalls(check.id, passed)[:MOST_RUN]
        if not likely:
            return []
        right = self.answer_of(None, check, seed)
        return [each for each in likely if is_alike(self.answer_of(each, check, seed), answer, right)][:MOST_NAMED]

    def answer_of(self, pitfall: Pitfall | None, check: Check, seed: int) -> Answer | None:
        """Return what the probe of ``check`` returns on ``pitfall``, or on the reference. Mutates the memory.

        ``None`` if a pitfall does not fail the check, or nothing was returned.
        """
        key = (pitfall.id if pitfall else "", check.id, seed)
        if key not in self.answers:
            try:
                self.answers[key] = self.ask(pitfall, check, seed)
            except ValueError:  # the reference was changed under it
                self.answers[key] = None
        return self.answers[key]

    def ask(self, pitfall: Pitfall | None, check: Check, seed: int) -> Answer | None:
        """Run the probe of ``check``. Raises ``ValueError`` if the pitfall does not fit the reference."""
        if pitfall is None:
            kept = replace(check, verdict=lambda *_: [Failure("kept")])  # the answer of a check that passes is not
            return self.runner.run(Candidate("reference"), [kept], seed).answers.get(check.id)
        with tempfile.TemporaryDirectory(prefix="smoke-pitfall-") as folder:
            file = Path(folder) / pitfall.edit.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(pitfall.edit.apply())
            candidate = Candidate(pitfall.id, Path(folder), (pitfall.edit.file,))
            return self.runner.run(candidate, [check], seed).answers.get(check.id)


def is_alike(pitfall: Answer | None, candidate: Answer, right: Answer | None = None) -> bool:
    """Whether two answers are the same: equal values, or the same error of the same line of code.

    ``right``: the reference's answer, by which values that are nearly equal may be taken for the same.
    """
    if isinstance(pitfall, ProbeError) and isinstance(candidate, ProbeError):
        return error_of(pitfall) == error_of(candidate)
    if pitfall is None or isinstance(pitfall, ProbeError) or isinstance(candidate, ProbeError):
        return False
    if not differences(pitfall, candidate, None):
        return True
    is_far = isinstance(right, dict) and bool(differences(right, pitfall, FAR))
    return is_far and not differences(pitfall, candidate, TOLERANCE)


def error_of(error: ProbeError) -> tuple[str, str, str]:
    """Return an error's type, its text, and the function and the line of code that raised it.

    One function may divide by zero for many reasons: another line is another mistake.
    """
    return error.kind, error.message, error.place.partition(" in ")[2]
