"""What a program appends to its state: constants, generated text, choices, and turns of a chat."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mini_engine.other_names import explanation
from mini_engine.sampler.params import SamplingParams

Method = Literal["mean", "greedy", "unconditional"]
TYPES: dict[type, str] = {  # the type of a value -> what its text must match
    int: r"-?(0|[1-9][0-9]{0,17})",
    float: r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?",
    bool: r"True|False",
}
SAMPLING = frozenset(each.name for each in fields(SamplingParams)) - {"n", "best_of", "prompt_logprobs", "receipt"}


class Expression:
    """A piece of a prompt. ``+`` puts pieces and texts one after the other."""

    def __add__(self, other: "Expression | str") -> "Chain":
        """Return this piece and then ``other``."""
        return Chain((*parts(self), *parts(other)))

    def __radd__(self, other: str) -> "Chain":
        """Return the text ``other`` and then this piece."""
        return Chain((*parts(other), *parts(self)))


@dataclass(frozen=True)
class Chain(Expression):
    """Pieces, one after the other."""

    pieces: tuple[Expression, ...]


@dataclass(frozen=True)
class Constant(Expression):
    """A text that the program knows."""

    text: str


@dataclass(frozen=True)
class Gen(Expression):
    """Text that the model writes. ``sampling``: what was said of it; the rest comes from the defaults of the run."""

    name: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    kind: type = str


@dataclass(frozen=True)
class Select(Expression):
    """One of ``choices``: the one to which the model gives the highest score."""

    name: str | None
    choices: tuple[str, ...]
    method: Method = "mean"


@dataclass(frozen=True)
class Turn(Expression):
    """A turn of a chat: ``body`` between what the chat template writes before and after it."""

    role: str
    body: tuple[Expression, ...]


def parts(piece: Expression | str) -> tuple[Expression, ...]:
    """Return the pieces of an expression. Raises ``ValueError`` for what is none."""
    if isinstance(piece, str):
        return (Constant(piece),) if piece else ()
    if not isinstance(piece, Expression):
        raise ValueError(f"{piece!r} cannot be appended; give a text, or gen, select, system, user, assistant")
    return piece.pieces if isinstance(piece, Chain) else (piece,)


def gen(
    name: str | None = None, *, choices: Sequence[str] | None = None, type: type = str, **sampling: Any
) -> Expression:
    """Let the model write; ``state[name]`` is what it wrote.

    ``sampling``: any field of ``SamplingParams`` for one answer, such as ``max_new_tokens``, ``stop``, ``regex`` or
    ``json_schema``. ``choices``: the same as ``select``. ``type``: ``int``, ``float`` or ``bool``; the text is held to
    that form and the value has that type. Raises ``ValueError`` for sampling parameters that are unknown or wrong, and
    for ``type`` or ``choices`` together with a grammar.
    """
    unknown = sampling.keys() - SAMPLING
    if unknown:
        wrong = f"{min(unknown)} is not a sampling parameter of gen; see help(SamplingParams)"
        raise ValueError(explanation(min(unknown), "SamplingParams") or wrong)
    if type not in (str, *TYPES):
        raise ValueError(f"type is {type!r}; choose str, int, float or bool")
    if choices is not None:
        if sampling or type is not str:
            raise ValueError("choices are scored, not sampled; leave out type and the sampling parameters")
        return select(name, choices)
    given = SamplingParams(**sampling)
    if type is not str:
        if given.grammar is not None:
            raise ValueError(f"type is {type.__name__} and there is a {given.grammar[0]}; give one of them")
        sampling = {**sampling, "regex": TYPES[type]}
    return Gen(name, sampling, type)


def select(name: str | None, choices: Sequence[str], method: Method = "mean") -> Select:
    """Append the choice with the highest score; ``state[name]`` is that choice.

    ``method``: "mean" of the log-probabilities of its tokens; "greedy", token by token as a greedy decoder would walk;
    "unconditional", the mean less what the tokens have without the prompt. ``state.answer(name).scores`` has all three.
    Raises ``ValueError`` for an unknown method, and for choices that are empty, equal, or no texts.
    """
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"choices are {choices!r}; give a list of at least one text, none of them empty")
    if len(set(choices)) < len(choices):
        raise ValueError(f"choices are {choices!r}; two of them are equal")
    if method not in ("mean", "greedy", "unconditional"):
        raise ValueError(f"method is {method!r}; choose mean, greedy or unconditional")
    return Select(name, tuple(choices), method)


def turn(role: str, body: Expression | str) -> Turn:
    """Return a turn of ``role``. Raises ``ValueError`` for a turn inside it."""
    pieces = parts(body)
    inner = next((piece for piece in pieces if isinstance(piece, Turn)), None)
    if inner is not None:
        raise ValueError(f"there is a turn of the {inner.role} inside a turn of the {role}; put one after the other")
    return Turn(role, pieces)


def system(body: Expression | str) -> Turn:
    """Return a turn of the system."""
    return turn("system", body)


def user(body: Expression | str) -> Turn:
    """Return a turn of the user."""
    return turn("user", body)


def assistant(body: Expression | str) -> Turn:
    """Return a turn of the assistant; what the model writes belongs here."""
    return turn("assistant", body)


def image(*_: Any) -> Expression:
    """Raise ``ValueError``: the models of this engine read text."""
    raise ValueError("the models of this engine read text, not images; describe the picture in words")
