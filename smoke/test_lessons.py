"""Every check of every lesson on the installed engine, probe and verdict in one process: ``pytest smoke``."""

import pytest

from smoke.course.report import explain
from smoke.framework.check import Check, all_checks, run_here
from smoke.runner.interpreter import excused


@pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in all_checks().values()])
def test_lesson(check: Check) -> None:
    """Run one check; its failure text is the one of ``python -m smoke run``."""
    result = excused(check, run_here(check))
    if result.status == "skipped":
        pytest.skip(result.detail)
    if not result.passed:
        pytest.fail(explain(result, check), pytrace=False)
