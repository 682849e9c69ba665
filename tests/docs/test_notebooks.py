"""The notebooks: they are clean in the repository, run from top to bottom, and fail when the engine is wrong."""

import ast
import base64
import html
import os
import re
import runpy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image, ImageChops

from tests.support.cells import elsewhere, outputs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = (
    "L1_model L2_attention L3_driver L4_sampler L5_scheduler L6_radix_cache L7_grammar L8_kernels L9_lang L10_drafts "
    "L11_fewer_bytes L12_processes"
).split()
MAX_BYTES, MAX_SECONDS, CELL_SECONDS = 100_000, 60, 120
LONGEST_CAPTION = 240  # characters: two lines
ENVIRONMENT = {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}  # a figure is drawn on one core

# A bug that engines have had, as code that runs after the notebook. The bank has more. The first line names the cells
# that then run again, before the assertions.
FAULTS = {
    "L1_model": """load runs equal
# epsilon outside the square root
import torch
from mini_engine import model
model.rms_norm = lambda x, w, eps: w * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)
""",
    "L2_attention": """slots
# slots that know only the first page
from mini_engine.attention import metadata
metadata.slots_of = lambda pages, start, stop, size: [pages[0] * size + p % size for p in range(start, stop)]
""",
    "L3_driver": """decode invariant
# decode positions off by one
from dataclasses import replace
from mini_engine import driver
pack = driver.pack_batch
def shifted(chunks, page_size, device="cpu"):
    batch = pack(chunks, page_size, device)
    return replace(batch, positions=batch.positions + (chunks[0].num_computed_tokens > 0))
driver.pack_batch = shifted
""",
    "L4_sampler": """stages
# top-k keeps one too few
from mini_engine.sampler.batch import TorchOps
right = TorchOps.apply_top_k
TorchOps.apply_top_k = staticmethod(lambda logits, k: right(logits, (k - 1).clamp(min=1)))
""",
    "L5_scheduler": """gantt
# a preempted request forgets its output
from mini_engine.scheduler.scheduler import Scheduler
preempt = Scheduler.preempt
def forgetful(self, request):
    preempt(self, request)
    request.output_ids.clear()
Scheduler.preempt = forgetful
""",
    "L6_radix_cache": """evictions compare
# the most recently used goes in the order of the least
from mini_engine import radix_cache
radix_cache.EVICTIONS["mru"] = radix_cache.EVICTIONS["lru"]
""",
    "L7_grammar": """spelling
# a forced token that could be longer is appended
from mini_engine.grammar.jump import JumpForward
JumpForward.could_be_longer = lambda self, grammar, num_bytes: False
JumpForward.settled = lambda self, grammar, output_ids, tokens: list(tokens)
""",
    "L8_kernels": """search
# the token that reaches p is cut too
import torch
from mini_engine.kernels import top_p
right = top_p.apply_top_p
def too_few(logits, p):
    kept = right(logits, p)
    least = torch.where(kept == -torch.inf, torch.inf, kept).argmin(-1, keepdim=True)
    return kept.scatter(-1, least, -torch.inf)
top_p.apply_top_p = too_few
""",
    "L10_drafts": """steps same
# a drafted token counts as come when another one came
from mini_engine.scheduler import drafts as own
def always(chunk, place):
    return place < len(chunk.draft) and chunk.request.state is own.RequestState.RUNNING
own.is_confirmed = always
""",
    "L11_fewer_bytes": """levels bound errors
# ids are cut off instead of rounded
import torch
from torch import Tensor
Tensor.round = Tensor.trunc
""",
    "L12_processes": """fleet belief share
# what a worker drops is never forgotten
from mini_engine.processes import routing
routing.Tree.dropped = lambda self, tokens, length: None
""",
}


def read(name: str) -> NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def lesson_of(name: str) -> str:
    return name.partition("_")[0]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def without_figure(source: str) -> str:
    """The source of a cell without the figure or the sliders that its last line shows, which compute nothing more."""
    last = ast.parse(source).body[-1]
    shows = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print(")
    return "\n".join(source.splitlines()[: last.lineno - 1]) if shows else source


@dataclass(frozen=True)
class Executed:
    """A notebook with its outputs, the processor seconds that it took, and some cells once more behind a fault."""

    notebook: NotebookNode
    seconds: float
    faulty: list[NotebookNode]


def printed(notebook: NotebookNode) -> dict[str, str]:
    """What each cell prints, and the words of its figure."""
    return {
        cell.id: "".join(
            out.get("text") or out.data["text/plain"] + "\n" for out in cell.outputs if out.get("name") != "stderr"
        )
        for cell in code_cells(notebook)
    }


def same_everywhere(texts: dict[str, str]) -> dict[str, list[str]]:
    """The lines of texts without those that say "measured here" and without a bar that transformers shows a kernel."""
    return {
        name: [
            line for line in text.splitlines() if not re.match("Loading weights|.*measured here", line, re.IGNORECASE)
        ]
        for name, text in texts.items()
    }


@cache
def executed(name: str) -> Executed:
    """Run the notebook, and in the same kernel, which has imported everything, the fault and the cells that show it."""
    notebook = read(name)
    size = len(notebook.cells)
    more = ["import time\nprint(time.process_time())"]
    if name in FAULTS:
        words, _, fault = FAULTS[name].partition("\n")
        sources = {cell.id: cell.source for cell in notebook.cells}
        more += [fault, *(without_figure(sources[word]) for word in [*words.split(), "assertions"])]
    notebook.cells += map(nbformat.v4.new_code_cell, more)
    for cell in notebook.cells[size + 1 :]:
        cell.metadata.tags = ["raises-exception"]
    client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", coalesce_streams=True)
    client.execute(env=os.environ | ENVIRONMENT)
    clock, *faulty = notebook.cells[size:]
    del notebook.cells[size:]
    return Executed(notebook, float(clock.outputs[0].text), faulty)


def figures(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """The index of each cell that shows a figure, and its output."""
    shown = [(i, out) for i, cell in enumerate(notebook.cells) for out in cell.get("outputs", []) if "data" in out]
    return [(i, out.data) for i, out in shown if "text/html" in out.data]


def test_every_notebook_is_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_repository_copy_is_clean(name):
    raw = (FOLDER / f"{name}.ipynb").read_text()
    notebook = read(name)
    nbformat.validate(notebook)
    assert len(raw.encode()) < MAX_BYTES
    assert raw == nbformat.writes(notebook, indent=1) + "\n", "not in canonical form; save it with nbformat"
    assert notebook.nbformat_minor >= 5
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("name", NAMES)
def test_begins_with_a_prediction_and_ends_in_assertions(name):
    cells = read(name).cells
    kinds = [cell.cell_type for cell in cells[:3]]
    assert kinds == ["markdown", "markdown", "code"]
    assert cells[0].source.startswith(f"# {lesson_of(name)}: ")
    assert cells[1].source.startswith("## Predict first")
    assert cells[1].source.count("?") >= 3
    assert cells[2].id == "prediction"
    assert cells[-1].id == "assertions"
    asserted = [node for node in ast.walk(ast.parse(cells[-1].source)) if isinstance(node, ast.Assert)]
    assert len(asserted) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_has_a_slider_with_words_before_it(name):
    cells = read(name).cells
    with_slider = [i for i, cell in enumerate(cells) if re.search(r"^\w+\.\w+_sliders?\(", cell.source, re.MULTILINE)]
    assert with_slider
    for index in with_slider:
        assert "the slider" in cells[index - 1].source, "the text says that there is something to move"


@pytest.mark.parametrize("name", NAMES)
def test_cells_call_the_engine_and_hold_no_algorithm(name):
    forbidden = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.While, ast.Try)
    for cell in code_cells(read(name)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef) and [ast.unparse(each) for each in node.decorator_list] == [
                "lang.program"
            ]:
                continue  # a program of lesson 9 is what is shown
            assert not isinstance(node, forbidden), f"cell {cell.id} defines {type(node).__name__}"
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert all(module.split(".")[0] == "mini_engine" for module in modules), f"cell {cell.id}: {modules}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_in_time_and_prints_no_warnings(name):
    assert executed(name).seconds < MAX_SECONDS
    outputs = [out for cell in code_cells(executed(name).notebook) for out in cell.outputs]
    assert [out.text for out in outputs if out.output_type == "stream" and out.name == "stderr"] == []
    assert outputs[-1].text == f"{lesson_of(name)}: all statements hold\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_figures_have_text_before_them_a_caption_a_summary_and_a_picture(name):
    notebook = executed(name).notebook
    shown = figures(notebook)
    assert len(shown) >= (3 if name == "L9_lang" else 5)
    for index, data in shown:
        assert notebook.cells[index - 1].cell_type == "markdown", f"no text before {notebook.cells[index].id}"
        summary = data["text/plain"]
        assert re.search(r"\d", summary)
        assert f'alt="{html.escape(summary)}"' in data["text/html"]
        caption = html.unescape(re.findall("<p>(.*?)</p>", data["text/html"])[-1])
        assert summary.startswith(caption)
        assert len(re.findall(r"[.!?](?=\s|$)", caption)) == 1, f"not one sentence: {caption}"
        assert len(caption) <= LONGEST_CAPTION, caption
        png = re.search(r'src="data:image/png;base64,([^"]+)"', data["text/html"])
        assert base64.b64decode(png[1]).startswith(b"\x89PNG")
    for (first, _), (second, _) in pairwise(shown):
        assert second > first, "one figure a cell"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_picture_of_the_lesson_is_a_figure_of_today(name):
    """Its numbers are the same, and of its pixels nearly all: other versions of matplotlib smooth edges differently."""
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_pictures.py"))
    shown, summary = drawing["pictures"](executed(name).notebook, name)
    folder = ROOT / "lessons" / name
    assert sorted(file.name for file in folder.glob("picture*.png")) == sorted(shown)
    for file, figure in shown.items():
        picture = Image.open(folder / file)
        assert picture.info["Description"] == summary, "run `python docs/draw_pictures.py`"
        assert picture.size == figure.size
        differences = ImageChops.difference(picture.convert("L"), figure.convert("L")).histogram()
        assert sum(differences[64:]) < 0.005 * sum(differences), "run `python docs/draw_pictures.py`"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prints_the_same_on_another_cpu(name):
    """On the least CPU, and with sums that are rounded otherwise; both at once, since each run takes long."""
    sources = {cell.id: cell.source for cell in code_cells(read(name))}
    with elsewhere(**ENVIRONMENT).Pool(1) as process:
        texts = process.apply_async(outputs, (sources,)).get(CELL_SECONDS * len(sources))
    assert same_everywhere(texts) == same_everywhere(printed(executed(name).notebook))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_assertions(name):
    """What a fault does to a figure is not looked at."""
    errors = [[out.ename for out in cell.outputs if out.output_type == "error"] for cell in executed(name).faulty]
    assert errors == [[]] * (len(errors) - 1) + [["AssertionError"]]
