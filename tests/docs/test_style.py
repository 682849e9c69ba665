"""The limits that keep the code readable and that no linter of ours counts: lines of a function, lines of a file."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(f for folder in ("mini_engine", "smoke") for f in (ROOT / folder).rglob("*.py"))
LONGEST_FUNCTION, LONGEST_FILE = 40, 400


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def code_lines(text: str) -> int:
    """Lines that hold code: comments, blank lines and docstrings are free."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_functions_and_files_are_short() -> None:
    for file in FILES:
        text = file.read_text()
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        long = [f"{f.name}: {body_lines(f)}" for f in functions if body_lines(f) > LONGEST_FUNCTION]
        assert not long, f"{file}: functions over {LONGEST_FUNCTION} lines"
        # Word lists and story templates are data; they are long and read like a table.
        if text.count("\n") > LONGEST_FILE and file.name != "words.py":
            assert code_lines(text) <= LONGEST_FILE, f"{file} has more than {LONGEST_FILE} lines of code"


def test_who_looks_at_an_engine_from_outside_uses_the_view() -> None:
    parts = ("server", "cli", "bench", "viz", "lang")
    files = [file for part in parts for file in (ROOT / "mini_engine" / part).rglob("*.py")]
    assert len(files) > 50
    assert [file.name for file in files if re.search(r"\bengine\.(scheduler|pool)\.", file.read_text())] == []
