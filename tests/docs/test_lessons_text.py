"""The text of the lessons: its code runs, its quotes are exact, its numbers were computed, its references exist.

Four kinds of fence are known. ``python`` is executed, all blocks of a lesson in one namespace, top to bottom.
``output`` is what the python block above it prints. ``python source:FILE#NAME`` quotes a whole function or class of the
engine. ``console`` is for the reader's shell, ``text`` and ``mermaid`` are pictures.
"""

import ast
import contextlib
import importlib
import io
import pkgutil
import re
import textwrap
import tomllib
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import typer

from mini_engine.checkpoint import TINY_MODEL, load_config
from smoke import commands
from smoke.course.example import execute, fences
from tests.support.interpreter import (
    FOLDER,
    ROOT,
    needs_interpreter,
    page_text,
)

ENGINE = ROOT / "mini_engine"
MANIFEST = tomllib.loads((FOLDER / "manifest.toml").read_text())["lesson"]
WRITTEN = {lesson["id"]: lesson for lesson in MANIFEST if lesson.get("task")}
PAGES = [*(f"{lesson['slug']}.md" for lesson in WRITTEN.values()), "README.md", "AGENTS.md"]
SECTIONS = [
    "Where it lives",
    "Predict",
    "Invariants and shapes",
    "The pipeline and why this order",
    "Building blocks",
    "Options and sentinels",
    "Minimal verifiable experiment",
    "Implementation order",
    "Debug log",
    "Pitfalls recap",
    "Exercises",
    "Acceptance",
    "How SGLang and vLLM do it",
    "Bridge",
]
EXTRA_LINES = {"L8": 180}  # it teaches Triton before its tasks, in kernels of its own
TASK_ID = re.compile(r"\bL\d\.[A-Z]\b")
GENERATED = re.compile(r"<!-- generated: (\w+) (L\d) -->\n(.*?)<!-- end -->", re.DOTALL)

by_lesson = pytest.mark.parametrize("lesson", WRITTEN.values(), ids=WRITTEN.keys())
by_page = pytest.mark.parametrize("page", PAGES)


def lesson_text(lesson):
    return page_text(f"{lesson['slug']}.md")


def prose(text):
    """The text without its fences and without inline code."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def section(text, number):
    found = re.search(rf"^## {number}\. .*?(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    assert found, f"section {number} is missing"
    return found[0]


def run(fence, namespace, page):
    """Execute one block; return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        execute(fence, namespace, FOLDER / page)
    return printed.getvalue()


def task_functions(lesson):
    """(task id, module, qualified name) of every function that the student writes."""
    for task in lesson["task"]:
        for function in task["functions"]:
            module, name = function.split(":")
            yield task["id"], module, name


def engine_source(file, name):
    """The text of one function or class of the engine, from its first decorator on, without indentation."""
    source = (ENGINE / file).read_text()
    node = ast.parse(source)
    for part in name.split("."):
        node = next(n for n in node.body if getattr(n, "name", None) == part)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("".join(source.splitlines(keepends=True)[first - 1 : node.end_lineno]))


def quotes(page):
    """(fence, file, qualified name) of every quote of the engine."""
    for fence in fences(page_text(page)):
        if fence.info.startswith("python source:"):
            yield fence, *fence.info.removeprefix("python source:").split("#")


def test_every_written_lesson_has_a_page_and_every_page_a_lesson():
    pages = {path.name for path in FOLDER.glob("L*.md")}
    assert pages == {f"{lesson['slug']}.md" for lesson in WRITTEN.values()}


@by_page
def test_fences_are_of_known_kinds(page):
    for fence in fences(page_text(page)):
        assert re.fullmatch(r"python( source:\S+#\S+)?|output|console|text|mermaid", fence.info), (
            f"{page}:{fence.line}: ```{fence.info} is neither run nor compared nor a picture"
        )


@by_page
def test_python_blocks_run_and_print_what_is_shown(page):
    """One namespace per page, as in a notebook; each ``output`` block belongs to the python block above it."""
    needs_interpreter(page)
    torch.manual_seed(0)
    namespace, printed, shown_at = {"__name__": "lesson"}, None, 0
    for fence in fences(page_text(page)):
        if fence.info == "output":
            assert printed is not None, f"{page}:{fence.line}: an output block without a python block before it"
            assert fence.text == printed, f"{page}:{fence.line}: the block above prints\n{printed}"
            printed = None
        else:
            assert not printed, f"{page}:{shown_at}: this block prints, and no output block follows"
        if fence.info == "python":
            printed, shown_at = run(fence, namespace, page), fence.line
    assert not printed, f"{page}:{shown_at}: this block prints, and no output block follows"


@by_page
def test_quotes_of_the_engine_are_exact(page):
    for fence, file, name in quotes(page):
        source = engine_source(file, name)
        assert ast.dump(ast.parse(fence.text)) == ast.dump(ast.parse(source)), f"{page}:{fence.line}: not {name}"
        assert fence.text == source, f"{page}:{fence.line}: same code, other text than {file}"


@by_lesson
def test_no_solution_is_shown(lesson):
    """No page quotes a function that a student writes, or shows a longer statement of one."""
    quoted = {(file, name) for page in PAGES for _, file, name in quotes(page)}
    shown = re.sub(r"\s", "", "".join(fence.text for page in PAGES for fence in fences(page_text(page))))
    for task, module, name in task_functions(lesson):
        file = module.replace(".", "/") + ".py"
        parts = name.split(".")
        assert not quoted & {(file, ".".join(parts[: n + 1])) for n in range(len(parts))}, f"{task}: {name} is quoted"
        for node in ast.walk(ast.parse(engine_source(file, name))):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.For | ast.If):
                line = re.sub(r"\s", "", ast.unparse(node).splitlines()[0])
                hidden = len(line) < 24 or line not in shown.replace('"', "'")
                assert hidden, f"{task}: a page shows `{ast.unparse(node)}`"


@by_lesson
def test_all_fourteen_sections_in_order(lesson):
    headings = re.findall(r"^## (.+)$", lesson_text(lesson), flags=re.MULTILINE)
    assert headings == [f"{number}. {title}" for number, title in enumerate(SECTIONS, start=1)]


@by_lesson
def test_length(lesson):
    """A lesson is 250 to 400 lines, or 50 for each task where it has more than eight; generated tables not counted."""
    lines = GENERATED.sub("", lesson_text(lesson)).count("\n")
    most = max(400, 50 * len(lesson["task"])) + EXTRA_LINES.get(lesson["id"], 0)
    assert 250 <= lines <= most, f"{lesson['slug']}.md has {lines} lines"


@by_lesson
def test_front_block_agrees_with_the_manifest(lesson):
    text = lesson_text(lesson)
    front = text[: text.index("## 1. ")]
    assert front.startswith(f"# {lesson['id']}: {lesson['title']}\n")
    assert lesson["goal"] in front
    assert f"about {lesson['hours']} hours" in front
    for file in lesson["files"]:
        assert f"`work/{file}`" in front, f"the front block does not name {file}"
    first = lesson["task"][0]
    red = f"NotImplementedError: {first['id']}: {first['title']}"
    for words in (f"python -m smoke start {lesson['id']}", f"python -m smoke run {lesson['id']}", red):
        assert words in front, f"the front block does not say {words}"


@by_lesson
def test_predictions_are_three_and_folded(lesson):
    part = section(lesson_text(lesson), 2)
    assert part.count("<details>") == part.count("</details>") == 3
    assert part.count("<summary>Answer</summary>") == 3


@by_lesson
def test_every_task_has_a_building_block_and_a_step(lesson):
    text = lesson_text(lesson)
    blocks = re.findall(r"^### (L\d\.[A-Z]) (.+)$", section(text, 5), flags=re.MULTILINE)
    assert blocks == [(task["id"], task["title"]) for task in lesson["task"]]
    for task in lesson["task"]:
        assert f"`run {lesson['id']} -k {task['id']}`" in section(text, 8), f"section 8 has no step {task['id']}"
    for task, _, name in task_functions(lesson):
        assert f"`{name}`" in text, f"{task}: the lesson never names {name}"


@cache
def smoke_commands():
    """Name -> option names of every command of ``python -m smoke``."""
    app = typer.Typer()
    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"smoke.commands.{module.name}").register(app)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in typer.main.get_command(app).commands.items()
    }


@by_page
def test_mentioned_tasks_and_commands_exist(page):
    text = page_text(page)
    known = {task["id"] for lesson in WRITTEN.values() for task in lesson["task"]}
    assert set(TASK_ID.findall(text)) <= known
    for command, rest in re.findall(r"python -m smoke (\w+)([^\n`#]*)", text):
        assert command in smoke_commands(), f"{page}: python -m smoke {command}"
        assert set(re.findall(r"(?<!\S)--?\w+", rest)) <= smoke_commands()[command], f"{page}: smoke {command}{rest}"
        assert set(re.findall(r"\bL\d\b", rest)) <= WRITTEN.keys()
    assert "python -m smoke\n" not in text, "a command is broken over two lines, where no test reads it"


@by_lesson
def test_generated_regions_stand_in_their_sections(lesson):
    text = lesson_text(lesson)
    for number, kind in ((6, "options"), (10, "pitfalls"), (12, "acceptance")):
        regions = [(name, of) for name, of, _ in GENERATED.findall(section(text, number))]
        assert regions == [(kind, lesson["id"])], f"section {number}"
    assert text.count("<!-- generated:") == text.count("<!-- end -->") == 3


@by_page
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page_text(page))):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        path = (FOLDER / file).resolve() if file else FOLDER / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page} links to {target}, and no heading has that name"


@by_page
def test_tables_and_folds_are_well_formed(page):
    text = page_text(page)
    assert text.count("<details>") == text.count("</details>")
    rows = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.startswith("|")]
    for (above, first), (below, second) in pairwise(rows):
        if below == above + 1:
            cells = [len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) for row in (first, second)]
            assert cells[0] == cells[1], f"{page}:{below}: a table row with another number of cells"


def experiment(lesson):
    """The one python block of section 7."""
    text = lesson_text(lesson)
    part = section(text, 7)
    first = text[: text.index(part)].count("\n")
    inside = range(first, first + part.count("\n"))
    blocks = [fence for fence in fences(text) if fence.info == "python" and fence.line in inside]
    assert len(blocks) == 1, "section 7 has exactly one python block"
    return blocks[0]


@by_lesson
def test_minimal_experiment_is_short_and_asserts(lesson):
    block = experiment(lesson)
    assert block.text.count("\n") <= 15
    assert isinstance(ast.parse(block.text).body[-1], ast.Assert)


def shifted(batch):
    """The batch with the position of a decode one too high: the bug that a public engine had for 82 days."""
    if len(batch.positions) == 1:
        batch.positions.add_(1)
    return batch


def hide_last_key(cut):
    """The blocks of queries, all of which see one key too few: their own."""
    return replace(cut, table=cut.table - torch.tensor([0, 0, 0, 1], dtype=torch.int32))


# One fault per lesson that its minimal experiment must notice: (module, attribute, what the fault does to the result).
FAULTS = {
    "L1": ("mini_engine.model", "rotate_half", lambda turned: -turned),
    "L2": ("mini_engine.attention.metadata", "slots_of", lambda slots: slots[::-1]),
    "L3": ("mini_engine.driver", "pack_batch", shifted),
    "L4": ("mini_engine.sampler.draw", "gumbel", lambda noise: -noise),
    "L5": ("mini_engine.engine_core", "packed", lambda chunk: replace(chunk, num_computed_tokens=0)),
    "L6": ("mini_engine.radix_cache", "hit_of", lambda hit: replace(hit, pages=hit.pages[::-1])),
    "L7": ("mini_engine.grammar.fsm", "pack_words", lambda words: words << 1),
    "L8": ("mini_engine.kernels.attention", "cut_queries", hide_last_key),
}


@pytest.mark.slow
@by_lesson
def test_minimal_experiment_is_self_contained_and_fails_on_a_faulty_engine(lesson, monkeypatch):
    needs_interpreter(f"{lesson['slug']}.md")
    run(experiment(lesson), {"__name__": "experiment"}, f"{lesson['slug']}.md")
    module_name, attribute, fault = FAULTS[lesson["id"]]
    module = importlib.import_module(module_name)
    right = getattr(module, attribute)
    monkeypatch.setattr(module, attribute, lambda *args, **kwargs: fault(right(*args, **kwargs)))
    with pytest.raises(AssertionError):
        run(experiment(lesson), {"__name__": "experiment"}, f"{lesson['slug']}.md")


def test_table_of_symbols_describes_the_embedded_model():
    """L1 §3 names the embedded model's sizes; a model of another shape must not leave them behind."""
    model = load_config(TINY_MODEL)
    table = section(lesson_text(WRITTEN["L1"]), 3)
    for symbols, sizes in {
        "`V`, `H`": f"{model.vocab_size}, {model.hidden_size}",
        "`Hq`, `Hkv`": f"{model.num_attention_heads}, {model.num_key_value_heads}",
        "`D`": f"{model.head_dim}",
        "`F`": f"{model.intermediate_size}",
    }.items():
        row = next(row for row in table.splitlines() if row.startswith(f"| {symbols} |"))
        assert f"| {sizes} |" in row


def test_syllabus_agrees_with_the_manifest():
    """lessons/README.md has one row per lesson: id, title, goal, hours or 'not written yet', and a link if written."""
    rows = {row.split("|")[1].strip(): row for row in page_text("README.md").splitlines() if row.startswith("| L")}
    assert list(rows) == [lesson["id"] for lesson in MANIFEST]
    for lesson in MANIFEST:
        row = rows[lesson["id"]]
        written = lesson["id"] in WRITTEN
        title = f"[{lesson['title']}]({lesson['slug']}.md)" if written else lesson["title"]
        assert f"| {title} | {lesson['goal']} |" in row
        assert (f"| {lesson['hours']} |" if written else "| not written yet |") in row
