"""Draw the pictures of the README with the code of the notebooks: ``python docs/draw_pictures.py``."""

import ast
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURES = {  # file -> notebook, and the call that draws the figure
    "sampling.png": ("L4_sampler", "sampling.stage_bars("),
    "scheduling.png": ("L5_scheduler", "scheduling.request_gantt("),
}


def draw(notebook: str, call: str, file: Path) -> None:
    """Run the cells of ``notebook`` up to the one with ``call``, and save its figure."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        if call not in source:
            exec(compile(source, notebook, "exec"), names)
            continue
        tree = ast.parse(source)
        figure = tree.body.pop()  # a cell shows the value of its last line
        assert isinstance(figure, ast.Expr)
        exec(compile(tree, notebook, "exec"), names)
        file.write_bytes(eval(compile(ast.Expression(figure.value), notebook, "eval"), names).png(dpi=100))
        return
    raise ValueError(f"{notebook} has no cell with {call!r}; name another call in PICTURES")


if __name__ == "__main__":
    for name, (notebook, call) in PICTURES.items():
        draw(notebook, call, ROOT / "docs" / "pictures" / name)
