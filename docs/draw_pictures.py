"""Draw the picture of each lesson with the code of its notebook: ``python docs/draw_pictures.py``."""

import base64
import io
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image, PngImagePlugin

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
}


def figure(notebook: NotebookNode, lesson: str) -> tuple[Image.Image, str]:
    """Return the picture of ``lesson`` and its summary from its executed ``notebook``."""
    cell = next(cell for cell in notebook.cells if cell.id == PICTURES[lesson])
    data = next(output.data for output in cell.outputs if "data" in output and "text/html" in output.data)
    found = re.search(r'src="data:image/png;base64,([^"]+)"', data["text/html"])
    assert found, f"the cell {cell.id} of {lesson} shows no picture"
    return Image.open(io.BytesIO(base64.b64decode(found[1]))), data["text/plain"]


def draw(lesson: str) -> None:
    """Run the notebook of ``lesson`` up to its figure, and write the figure to the lesson's ``picture.png``."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", as_version=4)
    end = [cell.id for cell in notebook.cells].index(PICTURES[lesson]) + 1
    del notebook.cells[end:]
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    picture, summary = figure(notebook, lesson)
    text = PngImagePlugin.PngInfo()
    text.add_itxt("Description", summary)  # says of which figure the picture is, in numbers
    picture.save(ROOT / "lessons" / lesson / "picture.png", optimize=True, pnginfo=text)


if __name__ == "__main__":
    for name in PICTURES:
        draw(name)
        print(f"lessons/{name}/picture.png")
