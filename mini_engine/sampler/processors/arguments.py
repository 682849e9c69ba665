"""L4: reading the arguments of registered processors, which come from outside.

Owns: typed look-ups with errors that name processor, argument, value and remedy. Must not know: the processors.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def check_names(processor: str, arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ``ValueError`` for an argument that ``processor`` does not know: nothing is accepted and ignored."""
    unknown = sorted(set(arguments) - set(known), key=str)
    if unknown:
        raise ValueError(f"{processor} has no argument {unknown[0]!r}; it takes {', '.join(known)}")


def count_argument(
    processor: str, arguments: Mapping[str, Any], name: str, least: int, default: int | None = None
) -> int | None:
    """Return a whole number of at least ``least``, or ``default`` where it is absent or ``None``."""
    value = arguments.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} of {processor} is {value!r}; it must be a whole number of at least {least}")
    return value


def required_count(processor: str, arguments: Mapping[str, Any], name: str, least: int) -> int:
    """Return a whole number of at least ``least``. Raises ``ValueError`` if it is absent."""
    value = count_argument(processor, arguments, name, least)
    if value is None:
        raise ValueError(f"{processor} needs the argument {name}: a whole number of at least {least}")
    return value


def ids_argument(processor: str, arguments: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    """Return a list of token ids of the vocabulary; absent is an empty one."""
    ids = arguments.get(name)
    if ids is None:
        return []
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ValueError(f"{name} of {processor} is {ids!r}; it must be a list of token ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"{name} of {processor} holds {token!r}; token ids go from 0 to {vocab_size - 1}")
    return list(ids)
