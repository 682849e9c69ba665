"""Where Triton's interpreter is broken a kernel's check is skipped by name; nowhere else is a failure anything else."""

from importlib.util import find_spec

import pytest

from smoke.framework.check import Result, all_checks
from smoke.framework.manifest import ENGINE
from smoke.runner.interpreter import excused, triton_fault
from smoke.runner.runner import Candidate, Runner

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not built for this platform")
BITS = all_checks()["L8.A.bits"]


@pytest.fixture
def broken_triton(tmp_path, monkeypatch):
    """Put a package in front of the real one, for new processes, that ends as a broken installation would."""
    (tmp_path / "triton.py").write_text("raise ImportError('no symbol of that name')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    triton_fault.cache_clear()
    yield
    triton_fault.cache_clear()


@pytest.fixture
def wrong_kernel(tmp_path):
    """A candidate whose bans are as low as seems low enough."""
    reference = (ENGINE / "kernels/token_bitmask.py").read_text()
    assert reference.count('float("-inf")') == 1
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/token_bitmask.py").write_text(reference.replace('float("-inf")', "-1e30"))
    return Candidate("wrong", tmp_path, ("kernels/token_bitmask.py",))


@pytest.mark.slow
@pytest.mark.usefixtures("broken_triton")
def test_where_triton_is_broken_a_kernel_s_check_is_skipped_and_says_why(wrong_kernel):
    with Runner() as runner:
        (result,) = runner.run(wrong_kernel, [BITS]).results
    assert (result.status, result.passed, result.failures) == ("skipped", False, ())
    assert "no symbol of that name" in result.detail


@pytest.mark.usefixtures("broken_triton")
def test_only_failures_of_kernels_are_excused(monkeypatch):
    of_another = Result("L1.A.values", "fail")
    assert excused(all_checks()["L1.A.values"], of_another) is of_another
    for status in ("pass", "blocked", "timeout", "crashed", "not-implemented", "skipped"):
        result = Result(BITS.id, status)
        assert excused(BITS, result) is result
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    failed = Result(BITS.id, "fail")
    assert excused(BITS, failed) is failed, "without Triton the check needs none"
