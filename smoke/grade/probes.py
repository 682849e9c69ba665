"""What is left of the checks in a candidate's process: the probes of its lesson, and nothing that knows an answer.

Owns: which names of ``smoke.checks`` and ``smoke.framework`` the probes use, and inputs that a spec has a part in.
Must not know: single checks, files.

Probes and verdicts lie in the same modules. Before a candidate's first line, everything that its lesson's probes do not
use is deleted from them and freed: verdicts, expectations, the probes of other lessons. Some probes have inputs of
transformers or of a spec, such as the table that heads are turned by. The grader makes those beforehand and hands them
in (``prepared.py``), so neither is in that process.
"""

import dis
import functools
import gc
import importlib
import pickle
import re
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import is_dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from smoke.framework.check import VERDICTS, Check, Registry, Values, all_checks, run_probe
from smoke.framework.manifest import ENGINE
from smoke.framework.prepared import Answers, Prepared, recording

PRUNED = ("smoke.checks.", "smoke.framework.", "smoke.bank.")
KEPT = ("smoke.framework.check", "smoke.framework.manifest", "smoke.framework.prepared")
ANSWERS = "answers.pickle"
METHODS = (types.FunctionType, property, cached_property, staticmethod, classmethod)


# Which names are used ------------------------------------------------------------------------------------------------


def names_used(roots: Sequence[Any], prepared: list[Prepared] | None = None) -> dict[str, set[str]]:
    """Return by module the names that probes and their inputs reach through globals, closures and what those hold.

    A name that a function looks up in a module of the course counts as used there, whatever it means. Behind a
    function that is prepared nothing is used. Those are appended to ``prepared``.
    """
    used: dict[str, set[str]] = defaultdict(set)
    waiting: list[Any] = list(roots)
    seen: dict[int, Any] = {}  # holds what it has seen, so that no id is used twice
    words: set[str] = set()
    while waiting:
        while waiting:
            thing = waiting.pop()
            if id(thing) in seen:
                continue
            seen[id(thing)] = thing
            if isinstance(thing, Prepared):
                if prepared is not None:
                    prepared.append(thing)
                continue
            if isinstance(thing, types.FunctionType):
                words |= set(names_in(thing.__code__))
            waiting += parts_of(thing, used)
        for kind in [each for each in seen.values() if is_ours(each)]:
            called = words if is_dataclass(kind) else words | engine_words()
            own = used[f"{kind.__module__}.{kind.__qualname__}"]
            waiting += [vars(kind)[name] for name in set(methods_of(kind)) & called - own]
            own |= set(methods_of(kind)) & called
    return used


def is_ours(thing: Any) -> TypeGuard[type]:
    """Whether a value is a class of the course."""
    return isinstance(thing, type) and thing.__module__.startswith(PRUNED) and thing.__module__ not in KEPT


def methods_of(kind: type) -> Iterator[str]:
    """Yield the names of a class's own methods and properties, without those that Python calls itself."""
    for name, value in vars(kind).items():
        if isinstance(value, METHODS) and not name.startswith("__"):
            yield name


@cache
def engine_words() -> frozenset[str]:
    """Return every word of the engine's source: it may call such methods of what a probe hands to it.

    A class that holds data is not handed to it, so there the probes' own words count alone.
    """
    return frozenset(word for file in ENGINE.rglob("*.py") for word in re.findall(r"\w+", file.read_text()))


def parts_of(thing: Any, used: dict[str, set[str]]) -> Iterator[Any]:
    """Yield what a value holds or looks up. Mutates ``used``."""
    if isinstance(thing, types.FunctionType):
        yield from looked_up(thing, used)
        yield from (cell.cell_contents for cell in thing.__closure__ or () if holds_something(cell))
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, types.MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, property):
        yield from (thing.fget, thing.fset)
    elif isinstance(thing, cached_property):
        yield thing.func
    elif isinstance(thing, staticmethod | classmethod):
        yield thing.__func__
    elif isinstance(thing, dict):
        yield from (*thing.keys(), *thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif isinstance(thing, type) and thing.__module__.startswith("smoke."):
        used[thing.__module__].add(thing.__name__)
        left_out = set(methods_of(thing)) if is_ours(thing) else set()
        yield from (*(value for name, value in vars(thing).items() if name not in left_out), *thing.__bases__)
    elif type(thing).__module__.startswith("smoke."):
        yield from (type(thing), getattr(thing, "__dict__", {}))
    elif isinstance(getattr(thing, "fn", None), types.FunctionType):
        yield thing.fn  # of a kernel
    if not isinstance(thing, type) and hasattr(thing, "__wrapped__"):
        yield thing.__wrapped__


def looked_up(function: types.FunctionType, used: dict[str, set[str]]) -> Iterator[Any]:
    """Yield what a function's code finds under the names that it mentions. Mutates ``used``."""
    names = set(names_in(function.__code__))
    for name in names:
        if name.startswith("smoke."):
            inside = loaded(name)
            used[name] |= names & set(inside)
            yield from (inside[attribute] for attribute in names & set(inside))
    for name in names & set(function.__globals__):
        value = function.__globals__[name]
        if isinstance(value, Registry):  # the engine has tables of that name
            continue
        used[function.__globals__["__name__"]].add(name)
        if not isinstance(value, types.ModuleType):
            yield value
        elif value.__name__.startswith("smoke."):
            asked = {attribute for owner, attribute in attributes_in(function.__code__) if owner == name}
            used[value.__name__] |= asked & set(vars(value))
            yield from (vars(value)[attribute] for attribute in asked & set(vars(value)))


def loaded(name: str) -> dict[str, Any]:
    """Import what a function will import, as a confined process may not look for it, and return what is in it."""
    try:
        return vars(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return {}  # and the checks are skipped


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and the functions in it mention."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def attributes_in(code: types.CodeType) -> frozenset[tuple[str, str]]:
    """Return what code and the functions in it read as ``name.attribute``."""
    steps = list(dis.get_instructions(code))
    found = {(a.argval, b.argval) for a, b in pairwise(steps) if b.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    inner = (attributes_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found).union(*inner)


def holds_something(cell: types.CellType) -> bool:
    """Whether a cell was filled: a name may be used before it is bound."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def delete_others(checks: Collection[str], used: dict[str, set[str]]) -> None:
    """Delete all other checks, all verdicts, and what the course holds besides the names that are ``used``."""
    registered = all_checks()
    for check_id in list(registered):
        check = registered.pop(check_id)
        if check_id in checks:
            registered[check_id] = Check(check.id, "", check.probe, no_verdict, (), check.seconds)
    for name, module in list(sys.modules.items()):
        if name.startswith(PRUNED) and name not in KEPT:
            kept = used.get(name, set())
            for attribute, value in list(vars(module).items()):
                if attribute not in kept and not attribute.startswith("__"):
                    delattr(module, attribute)
                elif is_ours(value) and value.__module__ == name:
                    for method in set(methods_of(value)) - used.get(f"{name}.{value.__qualname__}", set()):
                        delattr(value, method)
            if not kept and not hasattr(module, "__path__"):
                del sys.modules[name]


def prune(checks: Collection[str], used: dict[str, set[str]]) -> None:
    """Delete every other name of the course's modules from this process, and the verdicts. Cannot be undone."""
    delete_others(checks, used)  # in a function of its own, so that no variable holds what is freed
    engine_words.cache_clear()
    forget()


def forget() -> None:
    """Free what nothing names any more: a class stays among its base's subclasses, with its module's names, until then.

    Generic types that were written once are remembered by ``typing``, with the classes in them.
    """
    for forget_types in getattr(typing, "_cleanups", ()):
        forget_types()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def no_verdict(seed: int, values: Values) -> list[Any]:
    """Stand in for a verdict where there is none."""
    raise RuntimeError("verdicts are not given here")


# Inputs that a spec has a part in -------------------------------------------------------------------------------------


@cache
def asks(check: Check) -> bool:
    """Whether a probe reaches a function that is prepared for it."""
    prepared: list[Prepared] = []
    names_used([check.probe], prepared)
    return bool(prepared)


def prepare_inputs(checks: Sequence[Check], seed: int, folder: Path) -> None:
    """Run the probes that ask for prepared inputs on the reference, in this process, and write those to ``folder``."""
    with VERDICTS, recording() as answers:
        for check in checks:
            if asks(check):
                run_probe(check, seed)
    (folder / ANSWERS).write_bytes(pickle.dumps(answers))


def read_inputs(folder: Path) -> Answers:
    """Read what ``prepare_inputs`` wrote: the grader's own file, before anything of a candidate runs."""
    answers: Answers = pickle.loads((folder / ANSWERS).read_bytes())
    return answers
