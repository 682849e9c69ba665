"""The arguments of a command in their plainest form, read without Typer's help.

Typer has pydantic convert each argument, and importing that takes longer than many a command. Here are texts, paths and
flags as students type them; every other form, and every error, is Typer's.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

KINDS = (str, Path, bool)


def plain_arguments(function: Callable[..., Any], words: list[str]) -> dict[str, Any] | None:
    """Return the arguments that ``words`` give to the ``function`` of a command, ``None`` if it takes Typer to know."""
    places: list[tuple[str, type]] = []
    options: dict[str, tuple[str, type]] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        match get_args(hint):
            case (type() as kind, ArgumentInfo()):
                places.append((name, kind))
            case (type() as kind, OptionInfo() as info):
                options |= {str(word): (name, kind) for word in (info.default, *(info.param_decls or ()))}
    found: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word not in options and (word.startswith("-") or not places):
            return None
        name, kind = options[word] if word in options else places.pop(0)
        if kind is not bool and word in options:
            word = waiting.pop(0) if waiting else "-"
        if kind not in KINDS or (kind is not bool and word.startswith("-")):
            return None
        found[name] = True if kind is bool else kind(word)
    needed = [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]
    return found if found.keys() >= set(needed) else None
