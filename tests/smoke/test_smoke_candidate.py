"""Candidates misbehave: they crash, hang, leave early, lie about results. Each costs its own check and nothing else."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from smoke.framework.check import all_checks, checks_of
from smoke.framework.manifest import ENGINE, load_manifest
from smoke.runner.runner import Candidate, Run, Runner, Watch

ALLOCATOR = (ENGINE / "attention/allocator.py").read_text()
MODEL = (ENGINE / "model.py").read_text()
L2A = [check for check in all_checks().values() if check.task_id == "L2.A"]


@pytest.fixture(scope="module")
def runner():
    with Runner(time_factor=0.2) as shared:
        yield shared


@pytest.fixture
def candidate(tmp_path):
    """Return a maker of candidates from file texts."""

    def make(**texts):
        files = []
        for name, text in texts.items():
            file = {"allocator": "attention/allocator.py", "model": "model.py"}[name]
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
            files.append(file)
        return Candidate("test", tmp_path, tuple(files))

    return make


def statuses(outcome):
    return {result.check_id: result.status for result in outcome.results}


def broken_needed(body):
    return ALLOCATOR.replace("    return -(-num_tokens // page_size)", f"    {body}")


def test_the_reference_passes(runner):
    heard = []
    outcome = runner.run(Candidate("reference"), L2A, report=lambda result: heard.append(result.check_id))
    assert set(statuses(outcome).values()) == {"pass"}
    assert heard == [check.id for check in L2A], "results are reported as they come"


@pytest.mark.slow
def test_libraries_are_held_to_the_same_cpu_on_both_sides(monkeypatch):
    """Under AVX2, candidates computed with AVX-512, and honest ones failed for their bits."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with Runner() as runner:
        environment = Path(f"/proc/{runner.start_server().pid}/environ").read_bytes().split(b"\0")
    assert b"ATEN_CPU_CAPABILITY=avx2" in environment
    assert not any(each.startswith(b"HOME=/root") for each in environment)


def test_an_overlay_stands_in_for_one_module_only(runner, candidate):
    outcome = runner.run(candidate(allocator=broken_needed("return 1")), L2A)
    assert statuses(outcome) == {
        "L2.A.ownership": "pass",
        "L2.A.refusals": "pass",
        "L2.A.lists": "pass",
        "L2.A.pages_needed": "fail",
    }
    failure = outcome.results[-1].failures[0]
    assert failure.case == "page size 1, pages for 0, 1, 2, … tokens"
    assert (failure.place, failure.expected, failure.got) == ("item 0", "0", "1")


def test_an_exception_beneath_the_candidate_names_the_candidates_line_too(runner, candidate):
    text = broken_needed("from mini_engine.attention.metadata import slots_of; return slots_of([], 0, 1, 1)[0]")
    outcome = runner.run(candidate(allocator=text), L2A)
    place = outcome.results[-1].failures[0].place
    assert "metadata.py:" in place.partition(", called from ")[0]
    assert "allocator.py:" in place.partition(", called from ")[2]


def test_an_exception_in_another_tasks_function_names_that_task(runner, candidate):
    """Who ran L4.H alone was shown a line of L4.B's, and looked for the mistake in L4.H."""
    broken = re.sub(r"(def rms_norm\(.*?)(\n    return )", r"\1\n    [][7]\2", MODEL, count=1, flags=re.DOTALL)
    chosen = [all_checks()[name] for name in ("L1.A.values", "L1.E.values")]
    own, other = (result.failures[0] for result in runner.run(candidate(model=broken), chosen).results)
    assert own.got.startswith("IndexError")
    assert other.got == own.got
    assert own.note == ""
    assert other.note == "it was raised in `rms_norm`, which you wrote in L1.A: see first whether L1.A passes"


def test_a_candidate_leaves_nothing_for_the_next_one(runner, candidate):
    hostile = ALLOCATOR + "\nimport torch, builtins\ntorch.equal = lambda a, b: True\nbuiltins.MARK = 1\n"
    runner.run(candidate(allocator=hostile + "\nimport smoke.checks.l2.functions\nsmoke.l2.POOLS = ()\n"), L2A)
    outcome = runner.run(candidate(allocator=broken_needed("return 1")), L2A)
    assert statuses(outcome)["L2.A.pages_needed"] == "fail"
    peek = ALLOCATOR + "\nimport builtins\nassert not hasattr(builtins, 'MARK')\n"
    assert runner.run(candidate(allocator=peek), L2A).import_fault is None


def test_files_that_are_not_listed_are_never_imported(runner, candidate, tmp_path):
    chosen = candidate(allocator=ALLOCATOR)
    (tmp_path / "attention" / "pool.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('imported')")
    checks = [check for check in all_checks().values() if check.task_id == "L2.B"]
    assert set(statuses(runner.run(chosen, checks)).values()) == {"pass"}
    assert {path.name for path in tmp_path.rglob("*")} == {"attention", "allocator.py", "pool.py", "conftest.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os; os._exit(0)", "exit status 0"),
        ("raise SystemExit(0)", "SystemExit"),
        ("def broken(:", "SyntaxError"),
        ("while True: pass", "longer than"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11 (SIGSEGV:"),
    ],
)
def test_a_candidate_that_cannot_be_imported_is_said_to_be_so(runner, candidate, text, words):
    outcome = runner.run(candidate(allocator=text), L2A)
    assert words in outcome.import_fault
    assert set(statuses(outcome).values()) == {"crashed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("import os; os._exit(0)", "crashed"),
        ("while True: pass", "timeout"),
        ("raise SystemExit(0)", "crashed"),
        ("raise NotImplementedError('L2.A: The page allocator')", "not-implemented"),
        ("raise NotImplementedError('L1.A: RMSNorm')", "blocked"),
        ("return float('nan')", "fail"),
        ("return object()", "fail"),
        ("return type('Liar', (int,), {'__eq__': lambda a, b: True, '__hash__': int.__hash__})(7)", "fail"),
    ],
)
def test_a_fault_in_one_function_costs_its_checks_and_no_others(runner, candidate, body, status):
    checks = [all_checks()["L2.A.pages_needed"], all_checks()["L2.A.ownership"], all_checks()["L2.A.refusals"]]
    outcome = runner.run(candidate(allocator=broken_needed(body)), checks)
    assert statuses(outcome) == {"L2.A.pages_needed": status, "L2.A.ownership": "pass", "L2.A.refusals": "pass"}


HANGING = """
def wait():
    return threading.Event().wait()

import threading
threading.Thread(target=wait, daemon=True).start()
"""


def test_a_time_out_names_the_lines_that_hang_thread_by_thread(runner, candidate):
    check = replace(all_checks()["L2.A.pages_needed"], seconds=2.5)
    text = broken_needed("while True: num_tokens += 0") + HANGING
    places = [
        f"attention/allocator.py:{text[: text.index(words)].count(chr(10)) + 1} in {name}: {words}"
        for name, words in (
            ("pages_needed", "while True: num_tokens += 0"),
            ("wait", "return threading.Event().wait()"),
        )
    ]
    (result,) = runner.run(candidate(allocator=text), [check]).results
    assert result.detail.startswith("no answer after 0 s; it was in ")
    assert set(result.detail.partition("it was in ")[2].split(" and in ")) == set(places)


def test_an_exception_in_a_history_comes_with_the_operations_before_it(runner, candidate):
    text = ALLOCATOR + "\nPageAllocator.free = lambda self, pages: {}[pages[0]]\n"
    (result,) = runner.run(candidate(allocator=text), [all_checks()["L2.A.ownership"]]).results
    (failure,) = result.failures
    assert failure.got.startswith("KeyError: ")
    assert re.fullmatch(r"in operation \d+: free \[.+\]; before it: (.*; )?allocate \d+(; .*)?", failure.note)


def test_a_tensor_that_claims_to_equal_everything_is_refused(runner, candidate):
    liar = MODEL + (
        "\nclass Liar(torch.Tensor):\n    pass\n"
        "def rms_norm(x, weight, eps):\n    return torch.zeros_like(x).as_subclass(Liar)\n"
    )
    outcome = runner.run(candidate(model=liar), [all_checks()["L1.A.values"]])
    assert statuses(outcome) == {"L1.A.values": "fail"}
    assert "Liar" in outcome.results[0].failures[0].got


def test_after_too_many_crashes_the_rest_is_skipped_and_does_not_pass(runner, candidate):
    text = MODEL.replace("    wide = x.float()\n", "    import os; os._exit(0)\n")
    checks = checks_of([load_manifest().lesson("L1")])
    results = runner.run(candidate(model=text), checks).results
    assert [r.status for r in results].count("crashed") == 4
    assert "skipped" in {r.status for r in results}
    assert not any(r.passed for r in results if r.status == "skipped")


HOSTILE = {
    "a folder for each answer": "import os\nfor i in range(9): os.mkdir(f'{i}.json')\n",
    "an endless number": "import pathlib\nfor i in range(9):\n"
    "    pathlib.Path(f'{i}.json').write_text('{\"seconds\": 1' + '0' * 400 + ', \"values\": {}}')\n",
    "folders in folders": "import os\nplace = os.open('.', os.O_RDONLY)\nfor i in range(1500):\n"
    "    os.mkdir('x', dir_fd=place)\n    place = os.open('x', os.O_RDONLY, dir_fd=place)\n    os.close(place - 1)\n",
    "an answer that is a pipe": "import os\nfor i in range(9): os.mkfifo(f'{i}.json')\n",
    "an import that is a folder": "import os\nos.mkdir('imported.json')\n",
    "no folder any more": "import os, shutil\nshutil.rmtree(os.getcwd())\n",
    "an error that cannot be told": "class E(Exception):\n    def __str__(self): raise self\nraise E\n",
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_whatever_a_candidate_writes_the_next_one_is_judged_as_ever(runner, candidate, code):
    runner.run(Candidate("reference"), L2A[:1])
    before = set(runner.home.iterdir())
    outcome = runner.run(candidate(allocator=ALLOCATOR + "\n" + code), L2A)
    assert [result.check_id for result in outcome.results] == [check.id for check in L2A]
    assert set(statuses(runner.run(candidate(allocator=broken_needed("return 1")), L2A)).values()) == {"pass", "fail"}
    assert set(runner.home.iterdir()) == before, "what it left is removed"


ANSWERS = [
    "",
    "[]",
    "{}",
    "[" * 100_000,
    '{"seconds": null, "values": {}}',
    '{"seconds": NaN, "values": {}}',
    '{"seconds": -1, "values": {}}',
    '{"seconds": 1' + "0" * 400 + ', "values": {}}',
    '{"seconds": 1' + "0" * 5000 + "}",
    '{"seconds": 1, "error": 3}',
    '{"seconds": 1, "values": 7}',
    '{"seconds": 1, "values": {"a": {"$tensor": []}}}',
    "\udcff",
]


@pytest.mark.parametrize("text", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_that_is_none_is_a_result_of_its_check(runner, tmp_path, text):
    (tmp_path / "0.json").write_bytes(text.encode(errors="surrogateescape"))
    save_file({}, tmp_path / "0.safetensors")
    watch = Watch(runner, Run(Candidate("test"), L2A, 0, lambda result: None), tmp_path, 0)
    assert watch.judged(L2A[0], 0).status in ("crashed", "fail")


def test_processes_that_a_candidate_started_end_with_it(runner, candidate, tmp_path):
    note = tmp_path / "pid"
    text = ALLOCATOR + (
        "\nimport subprocess, pathlib\n"
        f"p = subprocess.Popen(['sleep', '600'])\npathlib.Path({str(note)!r}).write_text(str(p.pid))\n"
    )
    runner.run(candidate(allocator=text), L2A[:1])
    pid = int(note.read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_candidate_prints_is_kept_apart(runner, candidate, capfd):
    outcome = runner.run(candidate(allocator=ALLOCATOR + "\nprint('{\"exit\": 0}')\n"), L2A)
    assert '{"exit": 0}' in outcome.log
    assert set(statuses(outcome).values()) == {"pass"}
    assert capfd.readouterr().out == ""


def test_another_seed_is_another_input(runner):
    from smoke.checks.l2.functions import allocator_probe

    assert allocator_probe(0) != allocator_probe(1)
    assert set(statuses(runner.run(Candidate("reference"), L2A, seed=12345)).values()) == {"pass"}


def test_the_server_that_forks_candidates_has_no_engine_in_it(runner):
    server = runner.start_server()
    with open(f"/proc/{server.pid}/maps") as maps:
        assert "libtorch" in maps.read()  # it did import torch, so forks start fast
    assert os.getpgid(server.pid) != os.getpgid(0)
