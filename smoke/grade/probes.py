"""What is left of the checks in a candidate's process: the probes of its lesson, and nothing that knows an answer.

Owns: which names of ``smoke.checks`` and ``smoke.framework`` the probes use, and transformers' part in their inputs.
Must not know: single checks, files.

Probes and verdicts lie in the same modules. Before a candidate's first line, everything that its lesson's probes do not
use is deleted from them: verdicts, expectations, the probes of other lessons. Some probes ask transformers for inputs,
such as the table that heads are turned by. The grader asks it beforehand and hands the answers in, so the library's
models are not in that process.
"""

import copy
import functools
import importlib
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from smoke.framework.check import VERDICTS, Check, ProbeError, Values, all_checks, run_probe
from smoke.runner.transport import read_answer, write_answer

PEER = "smoke.framework.peer"
PRUNED = ("smoke.checks.", "smoke.framework.", "smoke.bank.")
KEPT = ("smoke.framework.check", "smoke.framework.manifest", PEER)
ASKED = ("rotary", "rotary_table", "generate", "logits")  # what probes ask the peer for


# Which names are used ------------------------------------------------------------------------------------------------


def names_used(checks: Sequence[Check]) -> dict[str, set[str]]:
    """Return by module the names that probes reach through globals, closures and what those hold.

    A name that a function looks up in a module of the course counts as used there, whatever it means.
    """
    used: dict[str, set[str]] = defaultdict(set)
    waiting: list[Any] = [check.probe for check in checks]
    seen: dict[int, Any] = {}  # holds what it has seen, so that no id is used twice
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen:
            seen[id(thing)] = thing
            waiting += parts_of(thing, used)
    return used


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
    elif isinstance(thing, staticmethod | classmethod):
        yield thing.__func__
    elif isinstance(thing, dict):
        yield from (*thing.keys(), *thing.values())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif isinstance(thing, type) and thing.__module__.startswith("smoke."):
        used[thing.__module__].add(thing.__name__)
        yield from (*vars(thing).values(), *thing.__bases__)
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
        used[function.__globals__["__name__"]].add(name)
        if not isinstance(value, types.ModuleType):
            yield value
        elif value.__name__.startswith("smoke."):
            used[value.__name__] |= names & set(vars(value))
            yield from (vars(value)[attribute] for attribute in names & set(vars(value)))


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


def holds_something(cell: types.CellType) -> bool:
    """Whether a cell was filled: a name may be used before it is bound."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def prune(checks: Collection[str], used: dict[str, set[str]]) -> None:
    """Delete every other name of the course's modules from this process, and the verdicts. Cannot be undone."""
    registered = all_checks()
    for check_id in list(registered):
        check = registered.pop(check_id)
        if check_id in checks:
            registered[check_id] = Check(check.id, "", check.probe, no_verdict, (), check.seconds)
    for name, module in list(sys.modules.items()):
        if name.startswith(PRUNED) and name not in KEPT:
            kept = used.get(name, set())
            for attribute in list(vars(module)):
                if attribute not in kept and not attribute.startswith("__"):
                    delattr(module, attribute)


def no_verdict(seed: int, values: Values) -> list[Any]:
    """Stand in for a verdict where there is none."""
    raise RuntimeError("verdicts are not given here")


# What the peer was asked ---------------------------------------------------------------------------------------------


def install_absent_peer() -> types.ModuleType:
    """Put an empty module in the place of the peer, before any check is imported, so that it is never loaded."""
    peer = types.ModuleType(PEER)
    sys.modules[PEER] = peer
    setattr(sys.modules["smoke.framework"], "peer", peer)  # noqa: B010  # as an import would
    return peer


def question(name: str, args: Any, options: Any) -> str:
    """Return a text that tells calls apart."""
    return f"{name} {args!r} {sorted(options.items())!r}"


def ask_peer(checks: Sequence[Check], seed: int, folder: Path) -> None:
    """Run the probes that ask the peer on the reference, in this process, and write what it answered to ``folder``."""
    from smoke.framework import peer

    answers: dict[str, Any] = {}

    def asked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            answer = function(*args, **options)
            plain = {"inv_freq": answer.inv_freq} if isinstance(answer, torch.nn.Module) else answer
            answers[question(name, args, options)] = plain
            return answer

        return ask

    with VERDICTS:
        real = {name: getattr(peer, name) for name in ASKED}
        try:
            for name, function in real.items():
                setattr(peer, name, asked(name, function))
            for check in checks:
                if check.asks_peer:
                    run_probe(check, seed)
        finally:
            for name, function in real.items():
                setattr(peer, name, function)
    write_answer(folder, 0, answers, 0.0)


def answer_for_peer(folder: Path) -> None:
    """Let the empty module answer what was asked before, and nothing else."""
    answers, _ = read_answer(folder, 0)
    assert not isinstance(answers, ProbeError), "answers were written"

    def answering(name: str) -> Callable[..., Any]:
        def answer(*args: Any, **options: Any) -> Any:
            asked = question(name, args, options)
            if asked not in answers:
                raise RuntimeError(f"the peer is not here and was not asked before: {asked[:200]}")
            found = copy.deepcopy(answers[asked])  # a candidate may write into what it is given
            return SimpleNamespace(**found) if isinstance(found, dict) else found

        return answer

    for name in ASKED:
        setattr(sys.modules[PEER], name, answering(name))
