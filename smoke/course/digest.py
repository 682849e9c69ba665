"""What a check's result rests on in a student's files: the functions of its tasks and what they use.

Owns: how a file is cut into named parts, and which parts a check can reach. Must not know: checks' code.

A result may be kept only while everything that it rests on is as it was. A check rests on the functions of its own task
and of the tasks that it builds on, which ``accept`` proves with starters that lack one task each; on everything in the
files that they use by name; and on all that the course has put there besides the tasks. A name that is no variable of
the function stands for every part that is so called, in whatever file; an attribute stands for those in classes, too. A
method of another task of the lesson counts only if something names its class: an object that the check hands over is of
a declared one. The set may be too large, never too small. Comments, docstrings and layout do not count.
"""

import ast
import hashlib
import symtable
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from smoke.framework.manifest import ENGINE, load_manifest
from smoke.framework.parsing import parse

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Part:
    """A function, a method, a class without its methods, a constant or an import of one file; the rest has no name.

    What it uses are names, and attributes with their dot.
    """

    file: str
    name: str
    text: str
    uses: frozenset[str]


def parts_of(file: str, source: bytes) -> list[Part]:
    """Cut a file into parts. One that is not Python is a single part without a name."""
    try:
        tree = parse(source)
    except (SyntaxError, ValueError):
        return [Part(file, "", source.hex(), frozenset())]
    parts = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, Function)]
            parts += [part(file, f"{node.name}.{item.name}", item) for item in methods]
            node.body = [item for item in node.body if item not in methods] or [ast.Pass()]
        parts += [part(file, name, node) for name in bound_names(node) or [""]]
    return parts


def bound_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module gives; none for one that does something else."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [(alias.asname or alias.name).split(".")[0] for alias in names]
        case ast.Assign(targets=targets) if all(isinstance(target, ast.Name) for target in targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def part(file: str, name: str, node: ast.stmt) -> Part:
    """Return the part ``name`` of a file. An import of several names is as many parts, each with its own text."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        kept = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] == name]
        node = type(node)(**{**dict(ast.iter_fields(node)), "names": kept})
    words, attributes = list[str](), set[str]()
    write(node, words, attributes)
    return Part(file, name, " ".join(words), frozenset(attributes | names_used(node)))


def names_used(node: ast.stmt) -> set[str]:
    """Return the names of the module that a statement uses, also what it imports under another name."""
    tables = [symtable.symtable(ast.unparse(node), "", "exec")]
    for table in tables:  # grows on the way
        tables += table.get_children()
    imported = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
    return {symbol.get_name() for table in tables for symbol in table.get_symbols() if symbol.is_global()} | {
        alias.name.rpartition(".")[2] for alias in imported
    }


def write(node: ast.AST, words: list[str], attributes: set[str]) -> None:
    """Append a tree in one form, and its attributes: ``ast.dump`` in a tenth of its time. Mutates both."""
    words.append(type(node).__name__)
    if isinstance(node, ast.Attribute | ast.Constant):
        name = getattr(node, node._fields[-2])  # attr or value
        attributes.update([f".{name}"] if isinstance(name, str) else ())  # a text may be a name, for getattr
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, list):
            body = value[1:] if field == "body" and has_docstring(node) else value
            words.append("[")
            for item in body:
                write_value(item, words, attributes)
            words.append("]")
        else:
            write_value(value, words, attributes)


def write_value(value: object, words: list[str], attributes: set[str]) -> None:
    """Append what a field of a tree holds. Mutates both."""
    if isinstance(value, ast.AST):
        write(value, words, attributes)
    else:
        words.append(repr(value))


def has_docstring(node: ast.AST) -> bool:
    """Whether a function or a class begins with a docstring."""
    if not isinstance(node, Function | ast.ClassDef) or not node.body:
        return False
    match node.body[0]:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


@cache
def given_names(file: str) -> frozenset[str]:
    """Return the names that the course's own version of a file gives."""
    found = set[str]()
    for node in parse((ENGINE / file).read_bytes()).body:
        found.update(bound_names(node))
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{item.name}" for item in node.body if isinstance(item, Function))
    return frozenset(found)


class Digest:
    """The files of a student's folder that stand for the engine's, cut into parts."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        """Read ``files``; one that is missing has no parts."""
        present = [file for file in files if (folder / file).is_file()]
        self.parts = [each for file in present for each in parts_of(file, (folder / file).read_bytes())]
        self.owners = {
            (function.file, function.qualname): task.id for task in load_manifest().tasks for function in task.functions
        }
        self.by_word: dict[str, list[Part]] = {}
        self.members: dict[tuple[str, str], list[Part]] = {}  # of a class, itself among them; a function is alone
        for each in self.parts:
            self.members.setdefault((each.file, each.name.partition(".")[0]), []).append(each)
            owner, _, word = each.name.rpartition(".")
            keys = {f".{word}"} if owner else {f".{word}", word}
            if word.startswith("__"):  # who makes an object calls such methods
                keys |= {f".{owner}", owner}
            for key in keys:
                self.by_word.setdefault(key, []).append(each)

    def of(self, tasks: Collection[str]) -> str:
        """Return a fingerprint of all that a check of ``tasks`` can reach."""
        sha = hashlib.sha256()
        for each in sorted(self.reached(tasks), key=lambda each: (each.file, each.name, each.text)):
            sha.update(f"{each.file}:{each.name}:{each.text}\n".encode())
        return sha.hexdigest()[:16]

    def reached(self, tasks: Collection[str]) -> set[Part]:
        """Return the parts of ``tasks``, those that the course gives, and what both use."""
        strange = self.methods_of_lesson(tasks) - self.named_by(tasks)
        found = {each for each in self.parts if self.owner(each) in tasks} | self.given
        waiting = list(found - self.given)
        while waiting:
            news = self.used_by(waiting.pop()) - found - strange
            found |= news
            waiting += news
        return found

    def methods_of_lesson(self, tasks: Collection[str]) -> set[Part]:
        """Return the methods that tasks of the newest lesson among ``tasks`` have students write."""
        newest = max((load_manifest().lesson(task.partition(".")[0]) for task in tasks), key=lambda each: each.number)
        ids = {task.id for task in newest.tasks}
        return {each for each in self.parts if "." in each.name and self.owner(each) in ids}

    def named_by(self, tasks: Collection[str]) -> set[Part]:
        """Return the parts whose names can be followed from ``tasks``, by any text; a class brings its methods."""
        found = set[Part]()
        waiting = [each for each in self.parts if self.owner(each) in tasks]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting += self.members[each.file, each.name.partition(".")[0]]
                waiting += [named for word in each.uses for named in self.by_word.get(word.removeprefix("."), [])]
        return found

    @cached_property
    def given(self) -> set[Part]:
        """The parts that the course gives, and what they use, tasks excepted: those are declared."""
        found = {each for each in self.parts if self.is_given(each)}
        waiting = list(found)
        while waiting:
            news = {each for each in self.used_by(waiting.pop()) if self.owner(each) is None} - found
            found |= news
            waiting += news
        return found

    def used_by(self, user: Part) -> set[Part]:
        """Return the parts that a part may use."""
        return {each for word in user.uses & self.by_word.keys() for each in self.by_word[word]}

    def owner(self, each: Part) -> str | None:
        """Return the task that a part belongs to."""
        return self.owners.get((each.file, each.name))

    def is_given(self, each: Part) -> bool:
        """Whether a part is the course's and not for the student to write, or does something while it is imported."""
        return self.owner(each) is None and (not each.name or each.name in given_names(each.file))
