"""Starters: the reference with the bodies of a task's functions taken out.

Owns: the edit, and the proof that it took out the right thing. Must not know: checks.

The file is edited by line ranges that the syntax tree gives, so signatures, decorators, docstrings and every comment
outside an emptied body stay as they are. A module-level function that only emptied code used is dropped with it, unless
the manifest names it. Anything unexpected is a ``ValueError``: a starter must never leak a solution.
"""

import ast
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

from smoke.framework.manifest import ENGINE, Lesson, Task, load_manifest
from smoke.framework.parsing import parse

Function = ast.FunctionDef | ast.AsyncFunctionDef
READ = r"\.{0}\b|\bimport \(?[\w\s,]*\b{0}\b"  # where a text may import a name or read it from something


@dataclass(frozen=True)
class Cut:
    """Lines ``first`` … ``last`` (from 1, both included) and what stands there instead."""

    first: int
    last: int
    replacement: list[str]


def starter_files(lesson: Lesson, engine: Path = ENGINE) -> dict[str, str]:
    """Return the lesson's files with all of its tasks taken out, by name relative to ``mini_engine``."""
    return {file: empty(file, lesson.tasks, engine) for file in lesson.files}


def task_starter(*tasks: Task, engine: Path = ENGINE) -> dict[str, str]:
    """Return the files with these tasks alone taken out: everything else is the reference."""
    files = sorted({function.file for task in tasks for function in task.functions})
    return {file: empty(file, tasks, engine) for file in files}


def empty(file: str, tasks: Iterable[Task], engine: Path = ENGINE) -> str:
    """Return one file with the functions of ``tasks`` taken out.

    Raises ``ValueError`` for a function that the file does not define, or when the result leaks or breaks something.
    """
    text = (engine / file).read_text()
    tree = parse(text)
    owners = {function.qualname: task for task in tasks for function in task.functions if function.file == file}
    defined = functions_of(tree)
    cuts = []
    for qualname, task in owners.items():
        if qualname not in defined:
            raise ValueError(f"task {task.id} empties {file}:{qualname}, which is not defined there")
        cuts.append(body_cut(defined[qualname], f'raise NotImplementedError("{task.id}: {task.title}")'))
    listed = {f.qualname for task in load_manifest().tasks for f in task.functions if f.file == file}
    helpers = private_helpers(file, tree, set(owners), listed | set(owners), engine)
    cuts += [function_cut(defined[name], text.splitlines()) for name in helpers]
    result = apply_cuts(text, cuts)
    prove(file, (text, tree), result, owners, helpers)
    return result


def functions_of(tree: ast.Module) -> dict[str, Function]:
    """Return the module's functions and its classes' methods by qualified name."""
    found: dict[str, Function] = {}
    for node in tree.body:
        if isinstance(node, Function):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}": item for item in node.body if isinstance(item, Function)}
    return found


def body_cut(node: Function, replacement: str) -> Cut:
    """Return the cut that leaves signature and docstring. Comments between docstring and code belong to the code."""
    has_docstring = ast.get_docstring(node, clean=False) is not None
    statements = node.body[1:] if has_docstring else node.body
    if not statements:
        raise ValueError(f"{node.name} has no body besides its docstring; there is nothing to take out")
    first = line_after(node.body[0]) if has_docstring else statements[0].lineno
    last = end_of(node)
    if first <= signature_end(node):
        raise ValueError(f"{node.name} has its body on the line of its signature; write it below")
    return Cut(first, last, [" " * statements[0].col_offset + replacement])


def function_cut(node: Function, lines: Sequence[str]) -> Cut:
    """Return the cut of a whole function, the blank lines and comments directly above it included."""
    first = first_line(node)
    while first > 1 and (not lines[first - 2].strip() or lines[first - 2].lstrip().startswith("#")):
        first -= 1
    return Cut(first, end_of(node), [])


def line_after(node: ast.stmt) -> int:
    """Return the number of the line after a statement."""
    return end_of(node) + 1


def first_line(node: ast.stmt) -> int:
    """Return the number of a statement's first line, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def end_of(node: ast.stmt) -> int:
    """Return the number of a statement's last line."""
    assert node.end_lineno is not None, "a parsed statement has an end"
    return node.end_lineno


def signature_end(node: Function) -> int:
    """Return the last line of ``def …:`` as far as the tree knows it: arguments and return annotation."""
    ends = [node.lineno, *(arg.end_lineno or 0 for arg in (*node.args.args, *node.args.kwonlyargs))]
    return max([*ends, end_of_expression(node.returns)])


def end_of_expression(node: ast.expr | None) -> int:
    """Return the number of an expression's last line, 0 for none."""
    return 0 if node is None else node.end_lineno or 0


def private_helpers(file: str, tree: ast.Module, emptied: set[str], kept: set[str], engine: Path) -> list[str]:
    """Return the module-level functions that nothing but emptied code uses, in the order of the file.

    A helper that only such a helper uses goes with it. ``kept`` are functions that the manifest names: the student has
    to see their signatures.
    """
    candidates = [node.name for node in tree.body if isinstance(node, Function) and node.name not in kept]
    used_in = names_by_function(tree)
    dropped = dropped_helpers(used_in, candidates, emptied, ())
    if dropped:  # reading the other files takes long
        dropped = dropped_helpers(used_in, candidates, emptied, names_in_other_files(file, engine, dropped))
    return [name for name in candidates if name in dropped]


def dropped_helpers(
    used_in: dict[str, set[str]], candidates: Sequence[str], emptied: set[str], outside: Collection[str]
) -> set[str]:
    """Return the ``candidates`` that only emptied code and each other use.

    ``outside`` are names in use elsewhere. A name that nothing uses is part of the module's interface and stays.
    """
    dropped: set[str] = set()
    while True:
        gone = emptied | dropped
        used = set[str](outside).union(*(names for name, names in used_in.items() if name not in gone))
        inside = [name for name in candidates if any(name in used_in[user] for user in gone - {name})]
        if dropped.issuperset(set(inside) - used):
            return dropped
        dropped |= set(inside) - used


def names_by_function(tree: ast.Module) -> dict[str, set[str]]:
    """Return the names that the body of each function uses, and under the empty name those of all other code."""
    owners = {id(node): name for name, node in functions_of(tree).items()}
    used_in: dict[str, set[str]] = {"": set(), **{name: set() for name in owners.values()}}
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, owner = waiting.pop()
        if isinstance(node, ast.Name):
            used_in[owner].add(node.id)
        elif isinstance(node, ast.Attribute):
            used_in[owner].add(node.attr)
        inner = owners.get(id(node), owner)
        outer = [] if inner == owner else signature(node)
        waiting += [(each, owner if each in outer else inner) for each in ast.iter_child_nodes(node)]
    return used_in


def signature(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a function that stay in its starter."""
    assert isinstance(node, Function), "only functions have owners"
    return [node.args, *node.decorator_list, *([node.returns] if node.returns else [])]


def names_in_other_files(file: str, engine: Path, names: set[str]) -> set[str]:
    """Return those of ``names`` that another file of the engine, which names the module, imports or reads."""
    path = engine / file
    module = path.parent.name if path.stem == "__init__" else path.stem
    found: set[str] = set()
    for other, text in texts_of(engine).items():
        if other != path and module in text:
            # Most texts do not have the name, and many only as a word of a sentence. Only the others are parsed.
            likely = [name for name in names - found if name in text and re.search(READ.format(name), text)]
            found |= {name for name in likely if name in names_read(text)}
    return found


@cache
def texts_of(engine: Path) -> dict[Path, str]:
    """Read the files of the engine, once for all starters of a process."""
    return {file: file.read_text() for file in engine.rglob("*.py")}


@lru_cache(maxsize=1024)  # one starter asks about every file, and there is a starter for every task
def names_read(text: str) -> frozenset[str]:
    """Return every name that a module imports or reads from something."""
    found: set[str] = set()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return frozenset(found)


def apply_cuts(text: str, cuts: Sequence[Cut]) -> str:
    """Apply cuts from the bottom up. Raises ``ValueError`` for two that overlap."""
    lines = text.splitlines()
    ordered = sorted(cuts, key=lambda cut: cut.first)
    for above, below in pairwise(ordered):
        if above.last >= below.first:
            raise ValueError(f"lines {below.first} to {above.last} would be taken out twice; is a function nested?")
    for cut in reversed(ordered):
        lines[cut.first - 1 : cut.last] = cut.replacement
    return "\n".join(lines).rstrip("\n") + "\n"


def prove(
    file: str, before: tuple[str, ast.Module], text: str, owners: dict[str, Task], helpers: Sequence[str]
) -> None:
    """Raise ``ValueError`` unless exactly the named bodies and helpers are gone. ``before``: text and syntax tree."""
    after = parse(text)
    functions = functions_of(after)
    for qualname, task in owners.items():
        node = functions[qualname]
        statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if [ast.unparse(statement) for statement in statements] != [
            f"raise NotImplementedError({f'{task.id}: {task.title}'!r})"
        ]:
            raise ValueError(f"{file}: the starter of {qualname} still has a body")
    used = {node.id for node in ast.walk(after) if isinstance(node, ast.Name)}.intersection(helpers)
    if used:
        raise ValueError(f"{file}: the starter uses {', '.join(sorted(used))}, which only the solution has")
    if surface(*before, set(helpers), owners) != surface(text, after, set(), owners):
        raise ValueError(f"{file}: the starter's surface is not the reference's")


def surface(text: str, tree: ast.Module, without: set[str], emptied: Iterable[str]) -> list[str]:
    """Return the module's statements with the bodies of ``emptied`` functions left out and ``without`` dropped.

    A statement that holds none of these bodies is its own lines. The others are given as syntax. Mutates ``tree``.
    """
    lines = text.splitlines()
    functions = functions_of(tree)
    for qualname in emptied:
        node = functions[qualname]
        documented = ast.get_docstring(node, clean=False) is not None
        node.body = [node.body[0]] if documented else [ast.Pass()]
    changed = {qualname.split(".")[0] for qualname in emptied}
    return [
        ast.dump(node) if name in changed else "\n".join(lines[first_line(node) - 1 : end_of(node)])
        for node in tree.body
        if not (isinstance(node, Function) and node.name in without)
        for name in [getattr(node, "name", None)]
    ]
