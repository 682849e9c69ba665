"""The mutation run: which changes are made, which are not, how a mutant is named, and what becomes of it."""

import ast
import json

import pytest
import torch

from smoke.bank.mutation import mutants as making
from smoke.bank.mutation.equivalent import load_equivalents, parse_equivalents
from smoke.bank.mutation.mutants import Mutant, bytecode, functions_of, mutants_of, mutants_of_function, parsed
from smoke.bank.mutation.operators import changes
from smoke.bank.mutation.trial import Fate, Trial, fates, remembering, same
from smoke.commands import mutate
from smoke.framework.check import Failure, all_checks
from smoke.framework.manifest import FunctionName, load_manifest


def changed(code, operator):
    """Return the bodies that an operator makes of a function with the arguments a … e, as one line each."""
    function = ast.parse(f"def f(a, b, c, d, e):\n    {code}").body[0]
    found = []
    for name, place, new in changes(function):
        if name == operator:
            old = place.node
            place.put(new)
            found.append("; ".join(line.strip() for line in ast.unparse(function).splitlines()[1:]))
            place.put(old)
    return found


@pytest.mark.parametrize(
    ("operator", "code", "expected"),
    [
        ("comparison", "return a < b", ["return a <= b", "return a >= b"]),
        ("comparison", "return a in b", ["return a not in b"]),
        ("arithmetic", "return a + b", ["return a - b", "return a", "return b"]),
        ("arithmetic", "a += b", ["a -= b", "a = b"]),
        ("boolean", "return a and b", ["return a or b", "return b", "return a"]),
        ("unary", "return not a", ["return a"]),
        ("unary", "return a.sum(-1), f(a, dim=-1), a[-1]", ["return (a.sum(-1), f(a, dim=-1), a[1])"]),
        ("condition", "if a: b()", ["if not a:; b()", "if True:; b()", "if False:; b()"]),
        ("condition", "return [x for x in a if x]", ["return [x for x in a]", "return [x for x in a if not x]"]),
        ("constant", "return 3", ["return 4", "return 2", "return 0"]),
        ("constant", "return True", ["return False"]),
        ("constant", "return float('-inf'), 'key'", ["return (float('inf'), 'key')", "return (float('-inf'), '')"]),
        ("unwrap", "return a.clone().to(b)", ["return a.clone()", "return a.to(b)"]),
        ("unwrap", "return list(a)", ["return a"]),
        ("unwrap", "if bool(a): b()", []),
        ("counterpart", "return min(a, b)", ["return max(a, b)"]),
        ("arguments", "return f(a, b, c=d)", ["return f(b, a, c=d)", "return f(a, b)"]),
        ("arguments", "return f(c=d, d=e)", ["return f(d=e)", "return f(c=d)", "return f(c=e, d=d)"]),
        ("arguments", "return a.transpose(b, c)", []),
        ("slice", "return a[b:]", ["return a[b + 1:]", "return a[b - 1:]", "return a[:]"]),
        ("slice", "return range(a)", ["return range(a + 1)", "return range(a - 1)"]),
        ("in-place", "a = a * b", ["a *= b"]),
        ("in-place", "x = a * b; return x.clamp(b)", []),
        ("removal", "a.append(b)", ["pass"]),
        ("removal", "a = b", ["pass"]),
        ("removal", "x = b", []),
        ("removal", "with a: b()", ["if True:; b()", "with a:; pass"]),
        ("loop", "for x in a: b(x)", ["for x in a:; b(x); break", "pass"]),
        ("early", "for x in a: continue", ["for x in a:; break"]),
    ],
)
def test_an_operator_makes_exactly_its_changes(operator, code, expected):
    assert sorted(changed(code, operator)) == sorted(expected)


@pytest.mark.parametrize(
    "code",
    [
        '"""What it does in 3 words."""',
        "raise ValueError(f'{a + 1} is above 3', not b)",
        "assert a < 3, f'{a + 1}'",
        "warnings.warn('a', 3)",
        "x: Literal[3]",
    ],
)
def test_what_only_a_reader_sees_is_not_changed(code):
    texts = {text for name in ("comparison", "arithmetic", "constant", "unary") for text in changed(code, name)}
    assert texts == set()


def meaning(text):
    """Return a module's syntax tree as text, without places and without the indentation of docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body[0].value.value = ast.get_docstring(node)
    return ast.dump(tree)


def test_a_function_that_is_written_anew_without_a_change_is_the_same():
    """Otherwise every mutant would carry a second change."""
    for file in {file for lesson in load_manifest().written for file in lesson.files}:
        text = making.source_of(file)
        for function in sorted(functions_of(parsed(file)).values(), key=lambda each: -each.lineno):
            text = making.put_function(text, function, making.written(function))
        assert meaning(text) == meaning(making.source_of(file)), file


def test_helpers_that_a_starter_leaves_out_are_mutated_too():
    (pack,) = (task for task in load_manifest().tasks if task.id == "L2.C")
    names = {str(name) for name in making.written_functions(load_manifest().lesson("L2"), pack)}
    assert names == {str(name) for name in pack.functions} | {"attention.metadata:check_chunks"}


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Yield a function that writes an engine whose allocator has another text."""

    def write(old="", new=""):
        file = tmp_path / "attention" / "allocator.py"
        file.parent.mkdir(exist_ok=True)
        text = (making.ENGINE / "attention" / "allocator.py").read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        monkeypatch.setattr(making, "source_of", lambda name: (tmp_path / name).read_text())
        making.parsed.cache_clear()
        task = load_manifest().task("L2.A")
        name = FunctionName.parse("attention.allocator:PageAllocator.allocate")
        return {mutant.id: mutant for mutant in mutants_of_function(task, name)}

    yield write
    making.parsed.cache_clear()


def test_ids_are_unique_and_depend_on_the_changed_line_alone(engine):
    before = engine()
    assert len(before) >= 15
    assert set(engine("        pages = [", "        count += 0  # a new line above\n        pages = [")) >= set(before)
    after = engine("self._owned.update(pages)", "self._owned |= set(pages)")
    gone = {before[name].removed for name in before.keys() - after.keys()}
    assert gone == {("self._owned.update(pages)",)}


def test_a_mutant_is_the_file_with_one_change_and_compiles_to_something_else(engine):
    for mutant in engine().values():
        assert bytecode(mutant.text) not in (None, bytecode(making.source_of(mutant.file)))
        assert mutant.text.count("def allocate") == 1, mutant.id
        assert mutant.diff.splitlines()[0] == f"- {mutant.removed[0]}"


@pytest.mark.slow
def test_every_entry_of_the_lists_names_a_mutant_and_shows_its_change():
    listed = {entry.id.partition("/")[0] for entry in load_equivalents()}
    mutants = {
        mutant.id: mutant
        for lesson in load_manifest().written
        for task in lesson.tasks
        for name in making.written_functions(lesson, task)
        if str(name) in listed
        for mutant in mutants_of_function(task, name)
    }
    for entry in load_equivalents():
        assert entry.id in mutants, f"{entry.id} is no mutant any more; judge its successor anew"
        assert entry.change == mutants[entry.id].diff, entry.id


def test_an_entry_without_a_reason_is_refused():
    good = {"reason": "the same", "changes": {"model:f/slice/123456": "- a\n+ b", "model:f/slice/123457": "- a\n+ c"}}
    assert [(entry.id[-1], entry.change[-1]) for entry in parse_equivalents(good)] == [("6", "b"), ("7", "c")]
    with pytest.raises(ValueError, match="reason"):
        parse_equivalents({"changes": good["changes"]})
    with pytest.raises(ValueError, match="colour"):
        parse_equivalents(good | {"colour": "red"})


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (NAN, NAN, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.zeros(0), torch.zeros(0), True),
    ],
)
def test_answers_are_the_same_if_every_bit_is(one, other, equal):
    assert same(one, other) is equal


def test_a_verdict_is_asked_again_about_any_other_answer():
    asked = []

    def verdict(seed, values):
        asked.append(values["x"])
        return [] if values["x"] == 1 else [Failure("wrong")]

    judge = remembering(verdict)
    assert [bool(judge(0, {"x": x})) for x in (2, 1, 1, 2)] == [True, False, False, True]
    assert not judge(1, {"x": 1}), "another seed is another question"
    assert asked == [2, 1, 2, 1]


def test_a_mutant_meets_its_own_task_first_and_only_what_builds_on_it():
    trial = Trial(list(all_checks().values()))
    trial.cost = {check.id: float(len(check.id)) for check in trial.checks}
    order = [check.id for check in trial.checks_for(Mutant("m", "L1.C", "attention/dense.py", (), (), ""))]
    own = [name for name in order if name.startswith("L1.C.")]
    assert order[: len(own)] == own == sorted(own, key=len)
    assert {name[:4] for name in order} == {"L1.C", "L1.D", "L1.F", "L1.G"}


def hand_made(name, old, new):
    """Return a mutant of ``rotate_half``, which nothing in its module calls while it is imported."""
    text = making.source_of("model.py")
    assert text.count(old) == 1
    return Mutant(name, "L1.B", "model.py", (old,), (new,), text.replace(old, new))


@pytest.mark.slow
def test_mutants_are_killed_by_values_by_time_and_by_memory_and_an_equal_one_survives():
    line = "    first, second = x.chunk(2, dim=-1)"
    todo = [
        hand_made("equal", line, "    first, second = torch.chunk(x, 2, dim=-1)"),
        hand_made("other", line, "    second, first = x.chunk(2, dim=-1)"),
        hand_made("endless", line, f"    while True: pass\n{line}"),
        hand_made("greedy", line, f"    x = torch.zeros(1 << 40)\n{line}"),
        hand_made("broken", line, "    return nothing"),
        hand_made("unimportable", "def rotate_half", "1 / 0\n\n\ndef rotate_half"),
    ]
    done = {fate.mutant.id: fate for fate in fates(todo, 1, own_checks=True)}
    assert not done["equal"].killed
    assert done["other"].check_id.startswith("L1.B.")
    assert done["endless"].status == "timeout"
    assert {done[name].status for name in ("other", "greedy", "broken")} == {"fail"}
    assert done["unimportable"].status == "crashed"


@pytest.mark.slow
def test_no_mutant_of_a_sample_of_every_lesson_survives():
    """The sample is always the same. A survivor needs a check, or an entry with a reason among the equivalents."""
    sample = mutate.sample_of_each(load_manifest().written, 1)
    done = list(fates(sample, 1, own_checks=True))
    assert len(done) == len(load_manifest().written)
    assert [f"{fate.mutant.id}\n{fate.mutant.diff}" for fate in done if not fate.killed] == []


def test_a_sample_is_the_same_every_time_and_a_new_mutant_moves_one_other_at_most():
    mutants = [Mutant(f"m{i}", "L1.A", "f", (), (), "") for i in range(100)]
    drawn = mutate.draw(mutants, 10, 3)
    assert drawn == mutate.draw(mutants, 10, 3) == sorted(drawn, key=mutants.index)
    assert drawn != mutate.draw(mutants, 10, 4)
    assert mutate.draw(mutants, 0, 3) == mutants
    for i in range(100):
        more = mutate.draw([*mutants, Mutant(f"new {i}", "L1.A", "f", (), (), "")], 10, 3)
        assert len(set(drawn) & set(more)) >= 9


def test_what_a_file_calls_killed_is_not_run_again_and_survivors_are(tmp_path, monkeypatch):
    file = tmp_path / "run.jsonl"
    mutants = list(mutants_of(load_manifest().lesson("L3")))[:3]
    ran = []

    def run(todo, *_):
        ran.append([mutant.id for mutant in todo])
        yield from (Fate(mutant, *(("L3.C.refusals", "fail") if i != 1 else ())) for i, mutant in enumerate(todo))

    monkeypatch.setattr(mutate, "fates", run)
    mutate.run_all(mutants, 1, file)
    again = mutate.run_all(mutants, 1, file)
    assert ran == [[mutant.id for mutant in mutants], [mutants[1].id]]
    assert [fate.killed for fate in again] == [True, True, True]
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 4


def test_the_summary_counts_by_task_and_lesson():
    mutants = [Mutant(f"m{i}", task, "f", (), (), "") for i, task in enumerate(["L1.A", "L1.A", "L1.B", "L1.B"])]
    ends = [("L1.A.bits", "fail"), ("", ""), ("L1.B.bits", "timeout"), ("L1.B.bits", "fail")]
    lines = mutate.summary([Fate(mutant, *end) for mutant, end in zip(mutants, ends, strict=True)])
    assert [" ".join(line.split()[:6]) for line in lines] == [
        "L1.A 1 of 2 killed 50.0",
        "L1.B 2 of 2 killed 100.0",
        "L1 3 of 4 killed 75.0",
    ]
    assert "1 by time" in lines[1]
