"""Draw the pictures of lessons with the code of their notebooks: ``python docs/draw_pictures.py [LESSON ...]``.

``python docs/draw_pictures.py replicas``: the one of the benchmarks, from ``pictures/replicas.json``. That is the last
line of what ``mini-engine bench route`` prints.
"""

import base64
import io
import json
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image, PngImagePlugin

from mini_engine.viz.figure import Figure
from mini_engine.viz.routing import route_chart

ROOT = Path(__file__).resolve().parent.parent
PICTURES = {  # lesson -> the cell of its notebook that shows the figure. No figure of measured times: they change.
    "L1_model": "residual",
    "L2_attention": "pages",
    "L3_driver": "top",
    "L4_sampler": "stages",
    "L5_scheduler": "gantt",
    "L6_radix_cache": "grow",
    "L7_grammar": "step",
    "L8_kernels": "softmax",
    "L9_lang": "tree",
    "L10_drafts": "steps",
    "L11_fewer_bytes": "levels",
    "L12_processes": "split",
}


def pictures(notebook: NotebookNode, lesson: str) -> tuple[dict[str, Image.Image], str]:
    """Return the picture of ``lesson``, a second one for phones if its panels stack, and the summary of both.

    ``notebook``: executed. The pictures have the names of their files.
    """
    cell = next(cell for cell in notebook.cells if cell.id == PICTURES[lesson])
    data = next(output.data for output in cell.outputs if "data" in output and "text/html" in output.data)
    found = dict(re.findall(r'(src|srcset)="data:image/png;base64,([^"]+)"', data["text/html"]))
    names = {"picture.png": "src", "picture-phone.png": "srcset"}
    shown = {name: Image.open(io.BytesIO(base64.b64decode(found[key]))) for name, key in names.items() if key in found}
    assert "picture.png" in shown, f"the cell {cell.id} of {lesson} shows no picture"
    return shown, data["text/plain"]


def draw(lesson: str) -> None:
    """Run the notebook of ``lesson`` up to its figure, and write the figure into the lesson's folder."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4)
    end = [cell.id for cell in notebook.cells].index(PICTURES[lesson]) + 1
    del notebook.cells[end:]
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    shown, summary = pictures(notebook, lesson)
    for file, picture in shown.items():
        write(ROOT / "lessons" / lesson / file, picture, summary)


def replicas() -> Figure:
    """Return the figure of the rules that send requests to workers."""
    return route_chart(json.loads((ROOT / "docs" / "pictures" / "replicas.json").read_text(encoding="utf-8")))


def write(file: Path, picture: Image.Image, summary: str) -> None:
    """Write ``picture`` in few colours, with the summary of the figure, which says in numbers which one it is."""
    text = PngImagePlugin.PngInfo()
    text.add_itxt("Description", summary)
    picture.convert("RGB").quantize(64).save(file, optimize=True, pnginfo=text)
    print(file.relative_to(ROOT))


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        if name == "replicas":
            figure = replicas()
            write(ROOT / "docs" / "pictures" / "replicas.png", Image.open(io.BytesIO(figure.png())), figure.summary)
        else:
            draw(name)
