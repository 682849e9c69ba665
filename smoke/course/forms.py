"""The form of a function: what is left of it without its own names, comments, layout and what computes nothing.

Equal forms are one function. A short one has few honest forms, so only longer ones are looked at. Nothing is executed.
"""

import ast
from collections.abc import Collection
from functools import cache

from smoke.course.starter import Function, functions_of
from smoke.framework.parsing import parse

TELLING_NODES = 40  # a function with fewer nodes than that says nothing about its author

MAX_ROUNDS = 5  # of taking out: a file that was made to need thousands must not hold up the rest


@cache
def forms(text: str) -> dict[str, str]:
    """Return the forms of a file's longer functions with their names. What cannot be looked at has none."""
    try:
        nodes = functions_of(parse_any(text))
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


def parse_any(text: str) -> ast.Module:
    """Parse a file; what cannot be parsed is an empty one, since it cannot be imported either."""
    try:
        return parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def normal_form(function: Function) -> str:
    """Return the body without what computes nothing, its own names numbered as they appear."""
    copy = plain(function)
    number_names(copy, names_of(copy))
    return "\n".join(ast.dump(statement) for statement in copy.body)


def plain(function: Function) -> Function:
    """Return a copy without docstrings, annotations, the words of messages and statements that compute nothing."""
    copy = parse(ast.unparse(function)).body[0]
    assert isinstance(copy, Function), "a function stays one"
    for _ in range(MAX_ROUNDS):  # what uses a name may be dead itself
        loaded = {n.id for n in ast.walk(copy) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        copy.body = Cleaner(loaded).block(copy.body)
        for argument in (arg for arg in ast.walk(copy) if isinstance(arg, ast.arg)):
            argument.annotation = None
    return copy


def names_of(function: Function) -> set[str]:
    """Return the names that a function binds itself."""
    bound = {arg.arg for arg in ast.walk(function) if isinstance(arg, ast.arg)}
    return bound | {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def number_names(node: ast.AST, names: Collection[str]) -> None:
    """Put numbers in the place of ``names``, as they appear. Mutates."""
    numbers: dict[str, str] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            each.arg = numbers.setdefault(each.arg, f"v{len(numbers)}")
        elif isinstance(each, ast.Name) and each.id in names:
            each.id = numbers.setdefault(each.id, f"v{len(numbers)}")


class Cleaner(ast.NodeTransformer):
    """Takes out what computes nothing; ``loaded`` are the names that anything reads."""

    def __init__(self, loaded: Collection[str]) -> None:
        """Keep the names."""
        self.loaded = loaded

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Clean statements in a row, and leave out those that are never reached."""
        kept: list[ast.stmt] = []
        for statement in statements:
            cleaned = self.visit(statement)
            kept += cleaned if isinstance(cleaned, list) else [cleaned] if cleaned else []
            if kept and isinstance(kept[-1], ast.Return | ast.Raise | ast.Break | ast.Continue):
                break
        return kept

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Clean the blocks of a statement."""
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, field, self.block(value))
            elif field in ("handlers", "cases"):
                for part in value:
                    self.generic_visit(part)
        return node

    def visit_Pass(self, node: ast.Pass) -> None:
        """Leave it out."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Leave out a mere value, such as a docstring."""
        return None if is_pure(node.value) else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        """Leave out what nothing reads, and a name that is given its own value."""
        names = {target.id if isinstance(target, ast.Name) else "" for target in node.targets}
        unused = "" not in names and names.isdisjoint(self.loaded) and is_pure(node.value)
        itself = isinstance(node.value, ast.Name) and names == {node.value.id}
        return None if unused or itself else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        """Turn it into an assignment, or leave out a mere annotation."""
        return self.visit_Assign(ast.Assign([node.target], node.value)) if node.value is not None else None

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt] | None:
        """Keep the one branch that a constant leaves, and nothing where both are empty."""
        if isinstance(node.test, ast.Constant):
            return self.block(node.body if node.test.value else node.orelse)
        self.generic_visit(node)
        return node if node.body or node.orelse or not is_pure(node.test) else None

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.stmt]:
        """Leave out a loop that never begins."""
        never = isinstance(node.test, ast.Constant) and not node.test.value
        return self.block(node.orelse) if never else self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.Assert | None:
        """Leave out its words."""
        node.msg = None
        return None if isinstance(node.test, ast.Constant) and node.test.value else node

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        """Keep the kind of the exception, without its words."""
        if isinstance(node.exc, ast.Call):
            node.exc = node.exc.func
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        """Leave out a function that nothing names."""
        node.returns = None
        return self.generic_visit(node) if node.name in self.loaded or node.decorator_list else None


def is_pure(value: ast.expr) -> bool:
    """Whether nothing but a value can come of an expression."""
    return not any(
        isinstance(n, ast.Call | ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr) for n in ast.walk(value)
    )
