"""Grading from a wheel and from a checkout with its environment inside: nothing of the course is readable, all else is.

Packages but one come from the environment that runs these tests; the one that lies in the new environment shows that
its folder is readable.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from smoke.framework.manifest import COURSE, ENGINE, SUITE
from tests.smoke.submissions import starters

OWN_PACKAGE = "psutil"
GRADE = """
import json, sys
from pathlib import Path
import psutil
from smoke.framework.manifest import ENGINE, load_manifest
from smoke.grade.submissions import Submission
from smoke.grade.trial import try_isolation
from smoke.grade.worker import Worker
assert Path(sys.prefix) in Path(psutil.__file__).parents, "the package of the new environment was imported"
lesson = load_manifest().lesson("L2")
files = json.loads(Path(sys.argv[1]).read_text())
isolation = try_isolation()
with Worker(isolation.confinement(34, 2 << 30, 120)) as worker:
    honest = worker.run_reference(lesson, 3)
    hostile = worker.run(Submission("mallory", files), [lesson], 3)
print("found:", isolation.reads_refused, [r.check_id for r in honest.results if not r.passed], hostile.log.split())
"""
LOOK = """
import glob as _glob, os as _os, sys as _sys
for _place in {places!r}:
    for _name in ("mini_engine/attention/allocator.py", "smoke/checks/l2/spec_paging.py", "smoke/course/starter.py"):
        try:
            open(_os.path.join(_place, _name)).read()
            print("read", _place, _name)
        except OSError:
            print("refused")
"""


def copy_course(place: Path) -> None:
    """Copy the packages as a checkout or a wheel holds them, with what Python has compiled."""
    leave_out = shutil.ignore_patterns("*.pyc.*")  # what another process is just writing
    shutil.copytree(ENGINE, place / ENGINE.name, ignore=leave_out)
    shutil.copytree(SUITE, place / SUITE.name, ignore=leave_out, dirs_exist_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wheel", "checkout", "both"])
def test_nothing_of_the_course_is_readable_however_it_is_installed(tmp_path: Path, way: str) -> None:
    course = tmp_path / "course"
    course.mkdir()
    environment = course / ".venv"
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    shutil.copytree(Path(sys.modules[OWN_PACKAGE].__file__).parent, site / OWN_PACKAGE)
    places = {"wheel": [site], "checkout": [course], "both": [site, course]}[way]
    for place in places:
        copy_course(place)
        texts = place if place == course else place / SUITE.name
        shutil.copytree(COURSE / "lessons", texts / "lessons")
    files = starters("L2")
    first = min(files)
    (tmp_path / "files.json").write_text(
        json.dumps(files | {first: files[first] + LOOK.format(places=[str(place) for place in (site, course)])})
    )
    boot = f"import sys; sys.path.insert(0, {str(places[-1])!r})\n"
    words = [environment / "bin" / "python", "-I", "-c", boot + GRADE, tmp_path / "files.json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("found:")[1].strip() == f"True [] {['refused'] * 6}"
