"""The text of the lessons: its code runs, its quotes are exact, its numbers were computed, its references exist.

Four kinds of fence are known. ``python`` is executed, all blocks of a lesson's pages in one namespace, in their order.
``output`` is what the python block above it prints. ``python source:FILE#NAME`` quotes a whole function or class of the
engine. ``console`` is for the reader's shell, ``text`` and ``mermaid`` are pictures.
"""

import ast
import contextlib
import importlib
import io
import re
import textwrap
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import typer

from mini_engine.checkpoint import TINY_MODEL, load_config
from mini_engine.scheduler.drafts import PLAIN
from smoke.__main__ import MODULES
from smoke.course.example import begin, execute, fences
from smoke.framework.manifest import ENGINE, ROOT, load_manifest
from tests.support.interpreter import needs_interpreter

FOLDER = ROOT / "lessons"
LESSONS = load_manifest().written
# The pages that are read one after the other, in one namespace.
READINGS = {lesson.id: lesson.pages() for lesson in LESSONS} | {
    name: [FOLDER / name] for name in ("README.md", "AGENTS.md", "beyond.md")
}
PAGES = [page for pages in READINGS.values() for page in pages]
STORY_BYTES, TASK_BYTES = 10_240, 6_144
IN_STORY = ["Predict", "The tasks", "Next"]
IN_REFERENCE = ["Options", "A whole experiment", "When something is wrong", "Exercises", "How SGLang and vLLM do it"]
TASK_ID = re.compile(r"\bL\d+\.[A-Z]\b")
GENERATED = re.compile(r"<!-- generated: (\w+) (L\d+) -->\n(.*?)<!-- end -->", re.DOTALL)

by_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(FOLDER)))


def story(lesson):
    return lesson.pages()[0].read_text()


def reference(lesson):
    return lesson.pages()[-1].read_text()


def whole_text(lesson):
    return "\n".join(page.read_text() for page in lesson.pages())


def headings(text):
    return re.findall(r"^## (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)


def section(text, title):
    found = re.search(rf"^## {title}$.*?(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    assert found, f"there is no section {title}"
    return found[0]


def run(fence, namespace, page):
    """Execute one block; return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        execute(fence, namespace, page)
    return printed.getvalue()


def task_functions(lesson):
    """(task id, module, qualified name) of every function that the student writes."""
    for task in lesson.tasks:
        for function in task.functions:
            yield task.id, function.module, function.qualname


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
    for fence in fences(page.read_text()):
        if fence.info.startswith("python source:"):
            yield fence, *fence.info.removeprefix("python source:").split("#")


def test_every_lesson_has_its_pages_and_every_folder_a_lesson():
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == {lesson.slug for lesson in LESSONS}
    for page in PAGES:
        assert page.is_file(), page


@by_page
def test_fences_are_of_known_kinds(page):
    for fence in fences(page.read_text()):
        assert re.fullmatch(r"python( source:\S+#\S+)?|output|console|text|mermaid", fence.info), (
            f"{page}:{fence.line}: ```{fence.info} is neither run nor compared nor a picture"
        )


@by_page
def test_no_block_scrolls(page):
    """The site shows 88 columns beside its contents on a screen of 1,280 pixels."""
    wide = [line for fence in fences(page.read_text()) for line in fence.text.splitlines() if len(line) > 88]
    assert not wide, f"{page}: at most 88 columns; {wide}"


@pytest.mark.parametrize("reading", READINGS)
def test_python_blocks_run_and_print_what_is_shown(reading):
    """One namespace per lesson, as in a notebook; each ``output`` block belongs to the python block above it."""
    needs_interpreter(READINGS[reading])
    namespace = begin()
    for page in READINGS[reading]:
        printed = None
        shown_at = 0
        for fence in fences(page.read_text()):
            if fence.info == "output":
                assert printed is not None, f"{page}:{fence.line}: an output block without a python block before it"
                assert fence.text == printed, f"{page}:{fence.line}: the block above prints\n{printed}"
                printed = None
            else:
                assert not printed, f"{page}:{shown_at}: this block prints, and no output block follows"
            if fence.info == "python":
                printed = run(fence, namespace, page)
                shown_at = fence.line
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
    shown = re.sub(r"\s", "", "".join(fence.text for page in PAGES for fence in fences(page.read_text())))
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
def test_a_lesson_has_its_sections(lesson):
    assert [title for title in headings(story(lesson)) if title in IN_STORY] == IN_STORY
    assert [title for title in headings(reference(lesson)) if title in IN_REFERENCE] == IN_REFERENCE


@by_page
def test_a_page_is_short(page):
    """A story takes 10 KB and a task 6; what else a reader may want stands in the reference."""
    limit = STORY_BYTES if page.name == "README.md" else None if page.name == "reference.md" else TASK_BYTES
    size = len(page.read_bytes())
    assert limit is None or size <= limit, f"{page} has {size} bytes, {limit} are allowed"


@by_lesson
def test_front_block_agrees_with_the_manifest(lesson):
    front = story(lesson).partition("\n## Predict")[0]
    assert front.startswith(f"# {lesson.id} · {lesson.title}\n")
    assert lesson.goal in front
    assert f"about {lesson.hours(lesson.core)} hours" in front
    for file in lesson.files:
        assert f"`work/{file}`" in front, f"the front block does not name {file}"
    for words in (f"python -m smoke start {lesson.id}", "python -m smoke watch ", "Every check says `to do`"):
        assert words in front, f"the front block does not say {words}"


@by_lesson
def test_predictions_are_folded(lesson):
    part = section(story(lesson), "Predict")
    assert 2 <= part.count("<details>") == part.count("</details>") == part.count("<summary>Answer</summary>") <= 3


@by_lesson
def test_every_task_has_a_page_and_stands_in_the_list(lesson):
    tasks = section(story(lesson), "The tasks")
    for task in lesson.tasks:
        text = (ROOT / lesson.text_folder / task.page_name).read_text()
        assert text.startswith(f"# {task.id} · {task.title}\n")
        assert f"`python -m smoke watch {task.id}`" in text
        assert any(fence.info == "python" for fence in fences(text)), f"{task.id} has no example to run"
        assert f"]({task.page_name})" in tasks, f"the list of tasks does not link to {task.id}"
        for function in task.functions:
            assert f"`{function.qualname}`" in text, f"{task.id}: the page does not name {function.qualname}"


@cache
def smoke_commands():
    """Name -> option names of every command of ``python -m smoke``."""
    app = typer.Typer()
    for module in sorted(set(MODULES.values())):
        importlib.import_module(f"smoke.commands.{module}").register(app)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in typer.main.get_command(app).commands.items()
    }


@by_page
def test_mentioned_tasks_and_commands_exist(page):
    text = page.read_text()
    known = {task.id for lesson in LESSONS for task in lesson.tasks}
    assert set(TASK_ID.findall(text)) <= known
    for command, rest in re.findall(r"python -m smoke (\w+)([^\n`#]*)", text):
        assert command in smoke_commands(), f"{page}: python -m smoke {command}"
        assert set(re.findall(r"(?<!\S)--?\w+", rest)) <= smoke_commands()[command], f"{page}: smoke {command}{rest}"
        assert set(re.findall(r"\bL\d+\b", rest)) <= {lesson.id for lesson in LESSONS}
    assert "python -m smoke\n" not in text, "a command is broken over two lines, where no test reads it"


@by_lesson
def test_the_table_of_options_is_generated(lesson):
    regions = [(name, of) for name, of, _ in GENERATED.findall(section(reference(lesson), "Options"))]
    assert regions == [("options", lesson.id)]
    assert whole_text(lesson).count("<!-- generated:") == 1


@by_page
def test_a_picture_is_named_in_one_sentence(page):
    for words in re.findall(r"!\[([^\]]*)\]", page.read_text()):
        assert words, f"{page}: a picture without words for those who cannot see it"
        assert not re.search(r"[.!?] ", words), f"{page}: more than one sentence: {words}"


@by_page
def test_tables_and_folds_are_well_formed(page):
    text = page.read_text()
    assert text.count("<details>") == text.count("</details>")
    rows = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.startswith("|")]
    for (above, first), (below, second) in pairwise(rows):
        if below == above + 1:
            cells = [len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) for row in (first, second)]
            assert cells[0] == cells[1], f"{page}:{below}: a table row with another number of cells"


def experiment(lesson):
    """The one python block of the whole experiment."""
    text = reference(lesson)
    part = section(text, "A whole experiment")
    first = text[: text.index(part)].count("\n")
    inside = range(first, first + part.count("\n"))
    blocks = [fence for fence in fences(text) if fence.info == "python" and fence.line in inside]
    assert len(blocks) == 1, "the whole experiment has exactly one python block"
    return blocks[0]


@by_lesson
def test_whole_experiment_is_short_and_asserts(lesson):
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


def swapped(batch):
    """The step with its first drafted row in the place of the last one."""
    own = [chunk for chunk in batch.chunks if chunk.request.params is not PLAIN]
    return replace(batch, chunks=own + batch.chunks[: len(own) - 1 : -1])


def least_for_zero(rounded):
    """Groups whose zero point is their least number: the rule of another format."""
    ids, scales, zeros = rounded
    return ids, scales, zeros - 8 * scales


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
    "L9": ("mini_engine.lang.speculate", "cut", lambda out: out and replace(out, text=out.text[:-1])),
    "L10": ("mini_engine.engine_core", "with_drafts", swapped),
    "L11": ("mini_engine.fast.quantized", "quantize_int4", least_for_zero),
    "L12": ("mini_engine.processes.halves", "row_part", lambda part: part.flip(0)),
}


@pytest.mark.slow
@by_lesson
def test_whole_experiment_alone_fails_on_a_faulty_engine(lesson, monkeypatch):
    """On the engine as it is, it runs with the other blocks of its page."""
    needs_interpreter(lesson.pages())
    module_name, attribute, fault = FAULTS[lesson.id]
    module = importlib.import_module(module_name)
    right = getattr(module, attribute)
    monkeypatch.setattr(module, attribute, lambda *args, **kwargs: fault(right(*args, **kwargs)))
    with pytest.raises(AssertionError):
        run(experiment(lesson), {"__name__": "experiment"}, lesson.pages()[-1])


def test_table_of_symbols_describes_the_embedded_model():
    """L1 names the embedded model's sizes; a model of another shape must not leave them behind."""
    model = load_config(TINY_MODEL)
    text = whole_text(LESSONS[0])
    for symbols, sizes in {
        "`V`, `H`": f"{model.vocab_size}, {model.hidden_size}",
        "`Hq`, `Hkv`": f"{model.num_attention_heads}, {model.num_key_value_heads}",
        "`D`": f"{model.head_dim}",
        "`F`": f"{model.intermediate_size}",
    }.items():
        row = next(row for row in text.splitlines() if row.startswith(f"| {symbols} |"))
        assert f"| {sizes} |" in row


def test_syllabus_agrees_with_the_manifest():
    """lessons/README.md has one row per lesson: id, title with its link, goal, hours."""
    rows = {
        row.split("|")[1].strip(): row for row in (FOLDER / "README.md").read_text().splitlines() if row[:3] == "| L"
    }
    assert list(rows) == [lesson.id for lesson in LESSONS]
    for lesson in LESSONS:
        title = f"[{lesson.title}]({lesson.slug}/README.md)"
        hours = f"{lesson.hours(lesson.core)} | {lesson.hours(lesson.tasks)}"
        assert f"| {title} | {lesson.goal} | {hours} |" in rows[lesson.id]
