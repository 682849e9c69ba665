"""Inputs of probes that a spec has a part in: made where the spec is, and handed to where the candidate is.

Owns: which functions those are, what they were asked, and their answers. Must not know: checks, processes.

A probe may need a table that transformers computes, or a threshold that lies just above the mass of a few tokens. The
code that makes them could answer checks. So the grader calls it beforehand, and a candidate's process has the answers
alone. Everywhere else such a function is an ordinary one.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

from smoke.framework.check import is_tensor

Given = ParamSpec("Given")
Made = TypeVar("Made")
Answers = dict[str, Any]  # by question


@dataclass(eq=False)
class Prepared:
    """A function whose answers depend on its arguments alone, never on what a candidate computed."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function; what makes its results one by one gives a list of them."""
        recorded, BOOK.recorded = BOOK.recorded, None  # what it asks in turn is not asked there
        try:
            made = self.function(*args, **options)
            made = list(made) if isinstance(made, Iterator) else made
        finally:
            BOOK.recorded = recorded
        if recorded is not None:
            recorded[question(self.name, args, options)] = copy.deepcopy(made)
        return made


@dataclass
class Book:
    """Every prepared function of this process, and what is being recorded."""

    functions: list[Prepared] = field(default_factory=list)
    recorded: Answers | None = None


BOOK = Book()


def prepared(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Mark a function as one whose answers are handed to a candidate's process, and that is not there itself."""
    made = Prepared(f"{function.__module__}.{function.__qualname__}", function)
    BOOK.functions.append(made)
    return cast(Callable[Given, Made], made)


@contextmanager
def recording() -> Iterator[Answers]:
    """Record what prepared functions are asked in this process, and what they answer, by question."""
    BOOK.recorded = {}
    try:
        yield BOOK.recorded
    finally:
        BOOK.recorded = None


def hand_in(answers: Answers) -> None:
    """Let every prepared function know ``answers`` and nothing else, for good."""

    def answering(name: str) -> Callable[..., Any]:
        def answer(*args: Any, **options: Any) -> Any:
            asked = question(name, args, options)
            if asked not in answers:
                raise RuntimeError(f"this input was not made before: {asked[:200]}")
            return copy.deepcopy(answers[asked])  # a candidate may write into what it is given

        return answer

    for each in BOOK.functions:
        each.function = answering(each.name)


def question(name: str, args: Any, options: Any) -> str:
    """Return a text that tells calls apart."""
    return f"{name} {told(args)} {told(sorted(options.items()))}"


def told(value: Any) -> str:
    """Return all of a value as a text: that of a long tensor would leave something out."""
    if is_tensor(value):
        return f"{value.dtype} {list(value.shape)} {value.tolist()}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(told, value))})"
    return repr(value)
