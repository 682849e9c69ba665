"""The standard operators of mutation testing on Python's syntax tree: each names small changes of one node.

Owns: what is changed and into what. Must not know: files, functions of lessons, checks.

An operator takes a node and yields others for its place; ``mutants.py`` puts them there one at a time. What no check
may demand is not changed: docstrings, annotations, assertions, texts of errors, warnings and logs.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Operator = Callable[[Any], Iterator[ast.AST]]

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COUNTERPARTS = {
    **{"min": "max", "any": "all", "amin": "amax", "argmin": "argmax", "minimum": "maximum", "floor": "ceil"},
    **{"zeros": "ones", "zeros_like": "ones_like", "popleft": "pop", "appendleft": "append", "append": "appendleft"},
    **{"startswith": "endswith", "lower": "upper", "lstrip": "rstrip", "find": "rfind", "partition": "rpartition"},
    **{
        "removeprefix": "removesuffix",
        "union": "intersection",
        "bisect_left": "bisect_right",
        "isdisjoint": "issubset",
    },
}
COUNTERPARTS |= {new: old for old, new in COUNTERPARTS.items() if new not in COUNTERPARTS}
UNWRAPPED_METHODS = set(
    "clone contiguous detach copy float double bfloat16 half long int bool to cpu type item tolist view_as expand_as"
    " flatten squeeze sort strip".split()
)
UNWRAPPED_FUNCTIONS = set("list tuple set frozenset dict sorted reversed int float bool str abs deepcopy round".split())
IN_PLACE_METHODS = set(
    "add sub mul div clamp exp log masked_fill masked_scatter scatter scatter_add index_fill index_add index_copy"
    " index_put neg pow sqrt rsqrt tanh sigmoid floor ceil bitwise_and bitwise_or cumsum".split()
)
SYMMETRIC = {"transpose", "swapaxes", "min", "max", "minimum", "maximum", "equal", "gcd"}  # in their two arguments
SPEAKERS = {"warn", "debug", "info", "warning", "error", "exception", "print"}
MAX_WORD = 20  # characters: a longer string, or one with a space, is text


@dataclass(frozen=True)
class Place:
    """Where a node hangs in the tree: a field of its parent, and in it an index if the field is a list."""

    parent: ast.AST
    field: str
    index: int | None

    @property
    def node(self) -> ast.AST:
        """The node that stands here."""
        value = getattr(self.parent, self.field)
        return value if self.index is None else value[self.index]  # type: ignore[no-any-return]

    def put(self, node: ast.AST) -> None:
        """Put another node here. Mutates the tree."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


class Names:
    """Where the names of a function get their values: parameters at once, others at their first assignment."""

    def __init__(self, function: ast.AST) -> None:
        """Read a function with its nested ones."""
        nodes = list(ast.walk(function))
        self.parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
        tests = [node.test for node in nodes if isinstance(node, ast.If | ast.While | ast.IfExp)]
        tests += [node.operand for node in nodes if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)]
        self.tests = set(map(id, tests))
        stored = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self.first: dict[str, tuple[int, int]] = {}
        for node in sorted(stored, key=position):
            self.first.setdefault(node.id, position(node))

    def first_binds(self, node: ast.AST) -> bool:
        """Whether an assignment gives a name its first value, without which nothing runs."""
        targets = [name for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
        return any(name.id not in self.parameters and self.first[name.id] == position(name) for name in targets)

    def is_given(self, node: ast.AST) -> bool:
        """Whether an expression is the caller's or an object's: a parameter that has its first value, an attribute."""
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name):
            return node.id in self.parameters and self.first.get(node.id, position(node)) >= position(node)
        return isinstance(node, ast.Attribute)

    def excuse(self, name: str, node: Any) -> bool:
        """Whether a change says nothing: a ``NameError``, work in place on a new tensor, ``bool`` of a condition."""
        if name == "removal":
            return isinstance(node, ast.Assign | ast.AnnAssign) and self.first_binds(node)
        if name == "in-place":
            changed = node.targets[0] if isinstance(node, ast.Assign) else node.func
            return not self.is_given(changed.value if isinstance(changed, ast.Attribute) else changed)
        return name == "unwrap" and called(node) == "bool" and id(node) in self.tests


def position(node: Any) -> tuple[int, int]:
    """Return where a node begins."""
    return node.lineno, node.col_offset


def changes(function: ast.AST) -> Iterator[tuple[str, Place, ast.AST]]:
    """Yield the operator's name, the place and the new node of every change of a function, in the order of the text."""
    names = Names(function)
    for place in places(function):
        node = place.node
        for kind, name, operator in OPERATORS:
            if name == "unary" and is_last_dimension(place.parent, node):
                continue
            if isinstance(node, kind) and not names.excuse(name, node):
                named = "default" if isinstance(place.parent, ast.arguments) else name
                for new in operator(node):
                    yield named, place, new


def places(node: ast.AST) -> Iterator[Place]:
    """Yield every place below ``node`` that may be changed, parents before children."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_comment", "type_params"):
            continue
        for index, item in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(item, ast.AST) and not is_text(node, field, item):
                yield Place(node, field, index)
                yield from places(item)


def is_text(parent: ast.AST, field: str, node: ast.AST) -> bool:
    """Whether a node is only for a person who reads: no check may demand its words."""
    if isinstance(parent, ast.Raise | ast.JoinedStr) or isinstance(node, ast.Assert):
        return True
    if isinstance(parent, ast.Call) and field != "func":
        if isinstance(node, ast.keyword) and node.arg == "strict" and called(parent) == "zip":
            return True  # an assertion that two lists are of one length
        return called(parent) in SPEAKERS or called(parent).endswith(("Error", "Exception", "Warning"))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring


def called(node: ast.Call) -> str:
    """Return the last name of what is called, empty if it has none."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def with_items(node: Any, field: str, items: Sequence[ast.AST]) -> Any:
    """Return a copy of ``node`` with another list in one field."""
    new = copy(node)
    setattr(new, field, list(items))
    return new


def without(items: Sequence[Any], index: int) -> list[Any]:
    """Return the list without one item."""
    return [*items[:index], *items[index + 1 :]]


def swapped(items: Sequence[Any], index: int) -> list[Any]:
    """Return the list with the items ``index`` and ``index + 1`` exchanged."""
    return [*items[:index], items[index + 1], items[index], *items[index + 2 :]]


def shifted(node: ast.expr, by: int) -> ast.expr:
    """Return ``node + 1`` or ``node - 1``."""
    return ast.BinOp(node, ast.Add() if by > 0 else ast.Sub(), ast.Constant(1))


def swap_comparison(node: ast.Compare) -> Iterator[ast.AST]:
    """Turn ``a < b`` into ``a <= b``, ``a >= b``, and ``a in b`` into ``a not in b``."""
    for index, old in enumerate(node.ops):
        for new in COMPARISONS[type(old)]:
            yield with_items(node, "ops", [*node.ops[:index], new(), *node.ops[index + 1 :]])


def swap_arithmetic(node: ast.BinOp) -> Iterator[ast.AST]:
    """Turn ``a + b`` into ``a - b``, ``a``, ``b``."""
    if type(node.op) in ARITHMETIC:
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    yield node.left
    if isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr | ast.BitXor):
        yield node.right


def swap_augmented(node: ast.AugAssign) -> Iterator[ast.AST]:
    """Turn ``a += b`` into ``a -= b``, ``a = b``."""
    if type(node.op) in ARITHMETIC:
        yield ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
    yield ast.Assign([node.target], node.value, lineno=0)


def work_in_place(node: ast.Assign) -> Iterator[ast.AST]:
    """``x = x * y`` -> ``x *= y``: the caller's own tensor changes."""
    value = node.value
    target = node.targets[0]
    if not isinstance(value, ast.BinOp) or not isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
        return
    if ast.unparse(value.left) == ast.unparse(target):
        yield ast.AugAssign(target, value.op, value.right)


def call_in_place(node: ast.Call) -> Iterator[ast.AST]:
    """``x.clamp(…)`` -> ``x.clamp_(…)``."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE_METHODS:
        yield ast.Call(ast.Attribute(node.func.value, node.func.attr + "_"), node.args, node.keywords)


def swap_boolean(node: ast.BoolOp) -> Iterator[ast.AST]:
    """Turn ``a and b`` into ``a or b``, ``a``, ``b``."""
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    for index in range(len(node.values)):
        rest = without(node.values, index)
        yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def drop_unary(node: ast.UnaryOp) -> Iterator[ast.AST]:
    """``not a`` -> ``a``; ``-a`` -> ``a``."""
    yield node.operand


def is_last_dimension(parent: ast.AST, node: ast.AST) -> bool:
    """Whether a node is the ``-1`` of ``x.sum(-1)`` or ``dim=-1``, which means the same as 1 for a matrix."""
    stands = isinstance(parent, ast.keyword) and parent.arg in ("dim", "axis")
    return (stands or isinstance(parent, ast.Call)) and ast.unparse(node) == "-1"


def force_condition(node: Any) -> Iterator[ast.AST]:
    """``if a`` -> ``if not a``, ``if True``, ``if False``; also of ``while`` and ``b if a else c``."""
    for test in (ast.UnaryOp(ast.Not(), node.test), ast.Constant(True), ast.Constant(False)):
        if not (isinstance(node, ast.While) and isinstance(test, ast.Constant) and test.value):
            new = copy(node)
            new.test = test
            yield new


def force_filter(node: ast.comprehension) -> Iterator[ast.AST]:
    """``for a in b if c`` -> ``for a in b``, ``for a in b if not c``."""
    for index, test in enumerate(node.ifs):
        yield with_items(node, "ifs", without(node.ifs, index))
        yield with_items(node, "ifs", [*node.ifs[:index], ast.UnaryOp(ast.Not(), test), *node.ifs[index + 1 :]])


def change_constant(node: ast.Constant) -> Iterator[ast.AST]:
    """``3`` -> ``4``, ``2``, ``0``; ``True`` -> ``False``; ``"-inf"`` -> ``"inf"``; another word -> ``""``."""
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        for new in dict.fromkeys((value + 1, value - 1, type(value)(0))):
            if new != value:
                yield ast.Constant(new) if new >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-new))
    elif value in ("inf", "-inf"):
        yield ast.Constant("inf" if value == "-inf" else "-inf")
    elif isinstance(value, str | bytes) and 0 < len(value) <= MAX_WORD and (len(value) == 1 or len(value.split()) == 1):
        yield ast.Constant(type(value)())


def unwrap_call(node: ast.Call) -> Iterator[ast.AST]:
    """``x.clone()`` -> ``x``; ``list(x)`` -> ``x``."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in UNWRAPPED_METHODS:
        yield node.func.value
    elif isinstance(node.func, ast.Name) and node.func.id in UNWRAPPED_FUNCTIONS and node.args:
        yield node.args[0]


def swap_call(node: ast.Call) -> Iterator[ast.AST]:
    """``min(…)`` -> ``max(…)``; ``x.startswith(…)`` -> ``x.endswith(…)``."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in COUNTERPARTS:
        yield ast.Call(ast.Attribute(node.func.value, COUNTERPARTS[node.func.attr]), node.args, node.keywords)
    elif isinstance(node.func, ast.Name) and node.func.id in COUNTERPARTS:
        yield ast.Call(ast.Name(COUNTERPARTS[node.func.id]), node.args, node.keywords)


def change_arguments(node: ast.Call) -> Iterator[ast.AST]:
    """``f(a, b, c=d)`` -> ``f(b, a, c=d)``, ``f(a, b)``; the values of two keywords are exchanged as well."""
    for index, (one, other) in enumerate(pairwise(node.args)) if called(node) not in SYMMETRIC else ():
        if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
            yield with_items(node, "args", swapped(node.args, index))
    for index, word in enumerate(node.keywords):
        if not is_text(node, "keywords", word):
            yield with_items(node, "keywords", without(node.keywords, index))
    for index, (one_word, other_word) in enumerate(pairwise(node.keywords)):
        pair = [ast.keyword(one_word.arg, other_word.value), ast.keyword(other_word.arg, one_word.value)]
        yield with_items(node, "keywords", [*node.keywords[:index], *pair, *node.keywords[index + 2 :]])


def swap_elements(node: ast.Tuple) -> Iterator[ast.AST]:
    """Turn ``a, b`` into ``b, a``."""
    for index in range(len(node.elts) - 1):
        yield with_items(node, "elts", swapped(node.elts, index))


def move_slice(node: ast.Slice) -> Iterator[ast.AST]:
    """``a:b:c`` -> ``a + 1:b:c``, ``:b:c``, ``a:b - 1:c`` and so on. Numbers are left to the operator of constants."""
    for field in ("lower", "upper"):
        bound = getattr(node, field)
        if bound is not None:
            steps = [] if isinstance(bound, ast.Constant) else [shifted(bound, 1), shifted(bound, -1)]
            for other in (*steps, None):
                new = copy(node)
                setattr(new, field, other)
                yield new
    if node.step is not None:
        yield ast.Slice(node.lower, node.upper, None)


def move_range(node: ast.Call) -> Iterator[ast.AST]:
    """``range(a, b)`` -> ``range(a + 1, b)``, ``range(a, b - 1)`` and so on; also of ``arange``."""
    for index, bound in enumerate(node.args[:2]) if called(node) in ("range", "arange") else ():
        for by in (1, -1) if not isinstance(bound, ast.Constant | ast.Starred) else ():
            yield with_items(node, "args", [*node.args[:index], shifted(bound, by), *node.args[index + 1 :]])


def remove_statement(node: ast.stmt) -> Iterator[ast.AST]:
    """Put ``pass`` in the place of a statement."""
    yield ast.Pass()


def unwrap_block(node: ast.With | ast.Try | ast.AsyncWith) -> Iterator[ast.AST]:
    """``with a: b`` -> ``b``; ``try: b`` with handlers -> ``b``."""
    yield ast.If(ast.Constant(True), node.body, [])


def shorten_loop(node: Any) -> Iterator[ast.AST]:
    """Run a loop's body once, and not at all."""
    yield with_items(node, "body", [*node.body, ast.Break()])
    yield ast.Pass()


def leave_early(node: ast.stmt) -> Iterator[ast.AST]:
    """``continue`` -> ``break`` and back; ``return a`` -> ``return None``."""
    if isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(None)


OPERATORS: list[tuple[Any, str, Operator]] = [
    (ast.Compare, "comparison", swap_comparison),
    (ast.BinOp, "arithmetic", swap_arithmetic),
    (ast.AugAssign, "arithmetic", swap_augmented),
    (ast.UnaryOp, "unary", drop_unary),
    (ast.BoolOp, "boolean", swap_boolean),
    (ast.If | ast.While | ast.IfExp, "condition", force_condition),
    (ast.comprehension, "condition", force_filter),
    (ast.Constant, "constant", change_constant),
    (ast.Call, "unwrap", unwrap_call),
    (ast.Call, "counterpart", swap_call),
    (ast.Call, "arguments", change_arguments),
    (ast.Tuple, "arguments", swap_elements),
    (ast.Slice, "slice", move_slice),
    (ast.Call, "slice", move_range),
    (ast.Assign, "in-place", work_in_place),
    (ast.Call, "in-place", call_in_place),
    (
        ast.Expr
        | ast.Assign
        | ast.AnnAssign
        | ast.AugAssign
        | ast.Raise
        | ast.Return
        | ast.Delete
        | ast.Break
        | ast.Continue,
        "removal",
        remove_statement,
    ),
    (ast.With | ast.AsyncWith | ast.Try, "removal", unwrap_block),
    (ast.For | ast.AsyncFor | ast.While, "loop", shorten_loop),
    (ast.Return | ast.Break | ast.Continue, "early", leave_early),
]
