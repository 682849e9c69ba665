"""Which pitfall a failed check looks like: the one that gives the same values.

A pitfall is run on the same probe with the same inputs as the candidate. It is named only if what it returns equals the
candidate's answer, floats to ``TOLERANCE``. Otherwise nothing is said.
"""

import tempfile
from collections.abc import Collection
from pathlib import Path

from smoke.framework.bank import Pitfall, fitting_pitfalls
from smoke.framework.check import Check, ProbeError
from smoke.framework.compare import differences
from smoke.runner.runner import Answer, Candidate, Runner

TOLERANCE = 1e-5  # other libraries and other orders of additions round differently
MOST_RUN = 12  # pitfalls for one check; each takes a process
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
        return [each for each in likely if is_alike(self.answer_of(each, check, seed), answer)][:MOST_NAMED]

    def answer_of(self, pitfall: Pitfall, check: Check, seed: int) -> Answer | None:
        """Return what the probe of ``check`` returns on ``pitfall``; ``None`` if that is not a failure. Mutates."""
        key = (pitfall.id, check.id, seed)
        if key not in self.answers:
            try:
                text = pitfall.edit.apply()
            except ValueError:  # the reference was changed under it
                return None
            with tempfile.TemporaryDirectory(prefix="smoke-pitfall-") as folder:
                file = Path(folder) / pitfall.edit.file
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
                outcome = self.runner.run(Candidate(pitfall.id, Path(folder), (pitfall.edit.file,)), [check], seed)
            self.answers[key] = outcome.answers.get(check.id)
        return self.answers[key]


def is_alike(pitfall: Answer | None, candidate: Answer) -> bool:
    """Whether two answers are the same: equal values, or the same error of the same function."""
    if isinstance(pitfall, ProbeError) and isinstance(candidate, ProbeError):
        return error_of(pitfall) == error_of(candidate)
    if pitfall is None or isinstance(pitfall, ProbeError) or isinstance(candidate, ProbeError):
        return False
    return not differences(pitfall, candidate, TOLERANCE)


def error_of(error: ProbeError) -> tuple[str, str, str]:
    """Return an error's type, its text and the name of the function that raised it."""
    _, _, function = error.place.partition(" in ")
    return error.kind, error.message, function.partition(":")[0]
