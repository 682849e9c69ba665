"""What a submission does takes nothing from another's grade: before it, beside it and after it.

Hostile behaviours are drawn and put together; what honest neighbours are given stays what it is without them.
"""

import random
from pathlib import Path

import psutil
import pytest

from smoke.framework.manifest import load_manifest
from smoke.grade.gradebook import Limits, grade
from smoke.grade.records import Records
from smoke.grade.submissions import Submission
from smoke.grade.trial import FIRST_UID, GRADERS, TAKEN, USERS, free_users, try_isolation
from tests.smoke.submissions import reference, starters

pytestmark = pytest.mark.slow

L2 = load_manifest().lesson("L2")
FILE = "attention/allocator.py"
SECONDS, MEMORY = 20, 2 << 30  # the reference needs a third of either

START = "import json, os, resource, signal, socket, threading, time\n"
BEHAVIOURS = {
    "bomb": """
def _bomb():
    while True:
        try:
            os.fork()
        except OSError:
            pass
_bomb()
""",
    "sleepers": """
for _ in range(40):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
""",
    "limits of others": """
for _pid in range(1, 5000):
    for _kind in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
        try:
            resource.prlimit(_pid, _kind, (1, 1))
        except (OSError, ValueError):
            pass
""",
    "signals": """
for _pid in (-1, 0, *range(1, 5000)):
    for _end in (os.kill, os.killpg):
        try:
            if _pid != os.getpid():
                _end(abs(_pid), signal.SIGKILL)
        except OSError:
            pass
""",
    "threads": """
for _ in range(500):
    try:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    except RuntimeError:
        break
""",
    "memory": """
_held = []
try:
    while True:
        _held.append(bytearray(b"x" * (64 << 20)))
except MemoryError:
    pass
""",
    "files": """
try:
    for _number in range(100):
        open(f"f{_number}", "wb").write(bytes(16 << 20))
except OSError:
    pass
""",
    "one tensor many times": """
from safetensors.torch import save_file
import torch
def _answers():
    for _ in range(200):
        for _number in range(14):
            save_file({"t0": torch.zeros(12 << 20, dtype=torch.uint8)}, f"{_number}.safetensors")
            _values = {_name: [{"$tensor": "t0"}] * 300_000 for _name in ("a", "b")}
            open(f"{_number}.json", "w").write(json.dumps({"seconds": 0, "values": _values}))
threading.Thread(target=_answers, daemon=True).start()
time.sleep(3)
""",
    "long answers": """
for _number in range(14):
    open(f"{_number}.json", "w").write('{"seconds": 0, "values": {"pages": [' + "1," * 7_000_000 + "1]}}")
open("imported.json", "w").write("[" * 10_000_000)
time.sleep(3)
""",
    "a loop": "while True: pass\n",
}


def hostile(name: str, *behaviours: str) -> Submission:
    """Return a submission that does these things when it is imported."""
    own = starters("L2")[FILE] + START + "".join(BEHAVIOURS[each] for each in behaviours)
    return Submission(name, reference("L1") | starters("L2") | {FILE: own})


def test_honest_neighbours_keep_their_grades(tmp_path: Path) -> None:
    drawn = random.Random(1)
    honest = [Submission(f"alice-{number}", reference("L1", "L2")) for number in range(4)]
    others = [hostile(name, name) for name in BEHAVIOURS]
    others += [hostile(f"mallory-{number}", *drawn.sample(sorted(BEHAVIOURS), 3)) for number in range(2)]
    order = [honest[0], *others[:6], honest[1], *others[6:9], honest[2], *others[9:], honest[3]]
    isolation = try_isolation()
    if not isolation.processes_limited:
        pytest.skip("a bomb of processes would reach this machine")
    records = Records(tmp_path / "report", "3", {})
    scores = {s.submission.name: s for s in grade(order, [L2], records, isolation, Limits(SECONDS, MEMORY), 2)}
    for submission in honest:
        assert scores[submission.name].total("cumulative") == (100, 100), records.load(submission, L2)
        assert not scores[submission.name].scores[0].notes
    assert {scores[submission.name].total("isolated")[0] for submission in others} == {0}
    users = range(isolation.uid, isolation.uid + USERS) if isolation.uid else ()
    assert not [each for each in psutil.process_iter(["uids"]) if each.info["uids"].real in users]


def test_two_graders_of_a_machine_have_other_users() -> None:
    before = len(TAKEN)
    try:
        users = {free_users() for _ in range(3)}
        assert len(users) == 3
        assert {(user - FIRST_UID) % USERS for user in users} == {0}
        with pytest.raises(RuntimeError, match=f"{GRADERS} graders are running"):
            [free_users() for _ in range(GRADERS)]
    finally:
        for mark in TAKEN[before:]:
            mark.close()
        del TAKEN[before:]
