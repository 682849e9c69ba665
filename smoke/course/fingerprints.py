"""Fingerprints of functions: which share of one is in others, also if statements were put in, left out or moved.

Owns: what a fingerprint is and what a share is. Must not know: whose functions are compared. Nothing is executed.

A fingerprint is the form of two statements in a row, or of a single one that is long: names count by their order in it
alone. The idea is that of winnowing (Schleimer, Wilkerson, Aiken: Local Algorithms for Document Fingerprinting, 2003),
of which nothing is left out here, as functions are short.
"""

import ast
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property

from smoke.course.forms import is_long, is_unwritten, names_of, number_names, parse_any, plain
from smoke.course.starter import Function, functions_of
from smoke.framework.manifest import ENGINE

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
LONG_NODES = 25  # of a statement that says something about its author alone


@dataclass(frozen=True)
class Prints:
    """The statements of one function as (form, nodes), each without the statements inside of it."""

    statements: tuple[tuple[str, int], ...]

    @property
    def nodes(self) -> int:
        """How long the function is."""
        return sum(nodes for _, nodes in self.statements)

    @cached_property
    def marks(self) -> dict[str, tuple[int, ...]]:
        """The fingerprints, with the places of the statements that each is made of."""
        forms = [form for form, _ in self.statements]
        found: dict[str, tuple[int, ...]] = {}
        for place, (form, nodes) in enumerate(self.statements):
            if nodes >= LONG_NODES or len(forms) == 1:
                found[form] = (*found.get(form, ()), place)
            if place:
                pair = f"{forms[place - 1]}; {form}"
                found[pair] = (*found.get(pair, ()), place - 1, place)
        return found

    def nodes_in(self, marks: Collection[str]) -> int:
        """Return the length of the statements that ``marks`` cover."""
        places = {place for mark, own in self.marks.items() if mark in marks for place in own}
        return sum(self.statements[place][1] for place in places)


@cache
def fingerprints(text: str) -> dict[str, Prints]:
    """Return the fingerprints of a file's longer functions by name. What cannot be looked at has none."""
    try:
        nodes = {name: plain(node) for name, node in functions_of(parse_any(text)).items()}
        return {name: prints(node) for name, node in nodes.items() if is_long(node) and not is_unwritten(node)}
    except Exception:  # such as an expression nested too deeply to be walked
        return {}


def prints(function: Function) -> Prints:
    """Return the fingerprints of one function, which is plain."""
    names = names_of(function)
    found = [node for top in function.body for node in walk_in_order(top)]
    return Prints(tuple((form_of(node, names), sum(1 for _ in walk_shallow(node))) for node in found))


def walk_in_order(statement: ast.AST) -> list[ast.AST]:
    """Return a statement and those in it, as they stand in the text."""
    inner = [part for block in BLOCKS for part in getattr(statement, block, []) if isinstance(part, ast.AST)]
    return [statement, *(each for part in inner for each in walk_in_order(part))]


def walk_shallow(statement: ast.AST) -> list[ast.AST]:
    """Return the nodes of a statement without those of the statements in it."""
    blocks = {id(part) for block in BLOCKS for part in getattr(statement, block, []) if isinstance(part, ast.AST)}
    found = [statement]
    for node in found:  # grows on the way
        found += [child for child in ast.iter_child_nodes(node) if id(child) not in blocks]
    return found


def form_of(statement: ast.AST, names: Collection[str]) -> str:
    """Return a statement's form, the names of the function numbered as they appear in it."""
    fields = {name: [] if name in BLOCKS else deepcopy(value) for name, value in ast.iter_fields(statement)}
    copy = type(statement)(**fields | ({"name": ""} if "name" in fields else {}))
    number_names(copy, names)
    return ast.dump(copy)


@cache
def reference_marks() -> frozenset[str]:
    """Return every fingerprint of the engine, whichever file it stands in."""
    found = [fingerprints(file.read_text()) for file in ENGINE.rglob("*.py")]
    return frozenset(mark for functions in found for each in functions.values() for mark in each.marks)
