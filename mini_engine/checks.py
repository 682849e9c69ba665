"""What an option may hold: for each kind of value a check, which returns the value as it is kept.

Owns: the kinds, and the names of what can be registered. Must not know: which options there are. Imports no torch.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, get_args

Check = Callable[[str, Any], Any]  # option and value -> the value as it is kept; raises ValueError
DEVICE = re.compile(r"cpu(:0)?|meta|(cuda|mps|xpu)(:\d+)?")  # of torch's devices those that compute, and "meta"


def key_twice(pairs: Sequence[tuple[str, Any]]) -> str | None:
    """Return a key that a JSON object holds twice, ``None`` if there is none. Readers differ on which one counts."""
    counts = Counter(key for key, _ in pairs)
    return next((key for key, count in counts.items() if count > 1), None)


def plain_number(value: Any) -> Any:
    """Return a number of another library, such as NumPy's, as Python's own; anything else as it is."""
    if isinstance(value, bool):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value
    except OverflowError:  # a fraction above all floats
        return value


def whole(least: int) -> Check:
    """Return the check of a whole number of at least ``least``; a bool is not one."""

    def check(name: str, value: Any) -> int:
        number = plain_number(value)
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        return number

    return check


def seconds(name: str, value: Any) -> float:
    """Return a duration. Raises ``ValueError`` unless it is finite and above 0."""
    number = plain_number(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0 seconds")
    return number


def flag(name: str, value: Any) -> bool:
    """Return a switch. Raises ``ValueError`` for anything but True and False: "no" would be on."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it is True or False")
    return value


def one_of(words: Any) -> Check:
    """Return the check of one of the words of a ``Literal``."""

    def check(name: str, value: Any) -> str:
        return choice(name, value, get_args(words))

    return check


def choice(name: str, value: Any, words: Iterable[str], remedy: str = "") -> str:
    """Return ``value``. Raises ``ValueError`` naming the ``words`` unless it is one of them."""
    known = list(words)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(known)}{remedy}")
    return value


def or_none(check: Check) -> Check:
    """Return a check that takes ``None`` too."""

    def checked(name: str, value: Any) -> Any:
        try:
            return None if value is None else check(name, value)
        except ValueError as error:
            raise ValueError(f"{error}, or None") from None

    return checked


def device_name(name: str, value: Any) -> str:
    """Return the name of a torch device. Raises ``ValueError`` for another; ``device.py`` knows which are here."""
    if not isinstance(value, str) or not DEVICE.fullmatch(value):
        raise ValueError(f"{name} {value!r} cannot be used; give the name of a device: cpu, cuda, cuda:1, …")
    return value


REGISTERED: dict[str, list[Iterable[str]]] = {}  # option -> tables whose keys are its names


def names_from(name: str, table: Iterable[str]) -> None:
    """Let the keys of ``table`` be names for the option ``name``, also those that are added to it later. Mutates."""
    REGISTERED.setdefault(name, []).append(table)


def registered(words: Any) -> Check:
    """Return the check of one of the words of a ``Literal``, or of a name that was registered."""

    def check(name: str, value: Any) -> str:
        tables = [get_args(words), *REGISTERED.get(name, ())]
        return choice(name, value, dict.fromkeys(key for table in tables for key in table), ", or register it first")

    return check
