"""Before any test is imported: how kernels run in this process, and how many threads it uses."""

import os
import re
import tempfile
from importlib.util import find_spec
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read with torch: a thread that waits leaves its core to others

import torch

# Triton reads this when it is imported, once. With a GPU the kernels are compiled, otherwise interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What this machine was found to do is found anew in every run of the tests, once for all of its processes.
if "MINI_ENGINE_CACHE" not in os.environ:
    CACHE = tempfile.TemporaryDirectory()
    os.environ["MINI_ENGINE_CACHE"] = CACHE.name

# Several test processes (pytest -n) share the machine, and so do the processes that tests start: threads that wait for
# a core which another process has are a hundred times slower, not twice.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

# Triton is built for Linux alone. The course runs students' code under limits that Windows does not have.
NEEDED = {
    "triton": ["tests/kernels", "tests/bench/test_bench_kernels.py", "tests/viz/test_viz_kernels.py"],
    "resource": ["smoke", "tests/smoke"],
}
collect_ignore = [place for module, places in NEEDED.items() if find_spec(module) is None for place in places]

BEGIN_WITH = (  # the longest
    "test_notebooks.py",
    "test_site.py",
    "test_page.py",
    "test_families.py",
    "test_cli.py",
    "test_receipts.py",
    "test_grade_neighbours.py",
    "test_export.py",
    "test_bench_serving.py",
    "test_grade.py",
    "test_products.py",
    "test_invariance.py",
    "test_speculate.py",
)
BY_LESSON = re.compile(r".*/(test_lessons|test_lessons_text|test_notebooks)\.py::\w+\[(L\d+)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no process is left alone with one of them at the end."""
    items.sort(key=lambda item: [item.path.name == name for name in BEGIN_WITH], reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n a process takes a whole file, whose fixtures are made once, or what such a file has of one lesson."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrLesson(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            of_lesson = BY_LESSON.match(nodeid)
            return " ".join(of_lesson.groups()) if of_lesson else super()._split_scope(nodeid)

    return ByFileOrLesson(config, log) if config.getvalue("dist") == "loadfile" else None
