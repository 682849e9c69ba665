"""The form of a function: what is left of it without its own names, comments and layout. Equal forms are one function.

A short function has few honest forms, so only longer ones are looked at. Nothing is executed.
"""

import ast
from functools import cache

from smoke.course.starter import Function, functions_of

TELLING_NODES = 40  # a function with fewer nodes than that says nothing about its author


@cache
def forms(text: str) -> dict[str, str]:
    """Return the forms of a file's longer functions with their names. What cannot be looked at has none."""
    try:
        nodes = functions_of(parse(text))
        longer = {name: node for name, node in nodes.items() if is_long(node) and not is_unwritten(node)}
        return {normal_form(node): name for name, node in longer.items()}
    except Exception:  # such as an expression nested too deeply to be walked
        return {}


def is_long(node: Function) -> bool:
    """Whether a function is long enough to say something about its author."""
    return sum(1 for _ in ast.walk(node)) >= TELLING_NODES


def is_unwritten(node: Function) -> bool:
    """Whether a function does nothing but raise an exception, as those of a starter do."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def parse(text: str) -> ast.Module:
    """Parse a file; what cannot be parsed is an empty one, since it cannot be imported either."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def normal_form(function: Function) -> str:
    """Return the body without docstring, annotations, comments and layout, its own names numbered as they appear."""
    copy = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(copy, Function), "a function stays one"
    if ast.get_docstring(copy) is not None:
        copy.body = copy.body[1:]
    bound = {arg.arg for arg in ast.walk(copy) if isinstance(arg, ast.arg)}
    bound |= {n.id for n in ast.walk(copy) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    numbers: dict[str, str] = {}
    for node in ast.walk(copy):
        if isinstance(node, ast.arg):
            node.annotation = None
            node.arg = numbers.setdefault(node.arg, f"v{len(numbers)}")
        elif isinstance(node, ast.Name) and node.id in bound:
            node.id = numbers.setdefault(node.id, f"v{len(numbers)}")
    plain = [ast.Assign([s.target], s.value) if is_annotated_value(s) else s for s in copy.body]  # type: ignore[attr-defined]
    return "\n".join(ast.dump(statement) for statement in plain)


def is_annotated_value(statement: ast.stmt) -> bool:
    """Whether a statement is ``name: type = value``."""
    return isinstance(statement, ast.AnnAssign) and statement.value is not None
