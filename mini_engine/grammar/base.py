"""L7: what a grammar is to the engine, and what compiles one.

A grammar object follows one request. Every step the engine asks it for a mask, chooses a token and tells it which:

    fill_vocab_mask ──► apply_vocab_mask ──► sampler ──► accept_token ──► is_terminated?

Parallel to SGLang's ``constrained/base_grammar_backend.py``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, get_args

from torch import Tensor

from mini_engine.checks import names_from
from mini_engine.config import Whitespace
from mini_engine.constraints import ConstraintError, GrammarStats
from mini_engine.grammar.masks import allocate_bitmask, apply_bitmask, apply_bitmask_on_cpu
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKey, GrammarKind

KINDS = get_args(GrammarKind)
ANY_LEVELS = 2  # of arrays and objects in each other, where any JSON is valid and finitely many states write it
SHALLOW = f"any JSON is written at most {ANY_LEVELS} levels deep"  # in ``GrammarStats.narrowed``


class GrammarError(ValueError):
    """A grammar cannot be compiled: the message says what is wrong with it and what to do instead."""


class UnsupportedKeywordError(GrammarError):
    """A JSON Schema asks for something outside the documented list. ``keyword`` at ``path`` (a JSON pointer)."""

    def __init__(self, keyword: str, path: str, reason: str) -> None:
        """Name the keyword, where it stands and why it is refused."""
        super().__init__(f"{keyword!r} at {path or '/'} {reason}")
        self.keyword = keyword
        self.path = path


class TooManyStatesError(GrammarError):
    """The automaton of a grammar would have more than ``limit`` states; ``largest`` says what has most of them."""

    def __init__(self, limit: int, largest: str = "") -> None:
        """Name the limit and the part."""
        super().__init__(
            f"the grammar needs an automaton of more than {limit} states{largest and f'; {largest}'}; shorten its "
            "repeats, require more of its members, or take the backend xgrammar or llguidance"
        )
        self.limit = limit


class TokenRefusedError(ConstraintError):
    """A token that the grammar does not allow here; the state is what it was."""


class GrammarObject(ABC):
    """The state of one request in one grammar. ``finished`` is set by the engine when the request has ended."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self.finished = False
        self.stats = GrammarStats()

    @abstractmethod
    def accept_token(self, token_id: int) -> None:
        """Take in the token that was chosen. Raises ``TokenRefusedError`` and changes nothing if it is not allowed.

        A stop token is allowed where the text is complete, and nothing is after it. Mutates.
        """

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens; 0 undoes none. Raises ``ValueError`` for more than there are."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether a stop token was accepted: the normal end, after which nothing may come."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the text so far is valid as a whole: a stop token would be allowed, or was accepted."""

    @abstractmethod
    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        """Write which tokens may come next, after the end none, into ``mask[row]``. Mutates the mask.

        The mask has this backend's form and lies on the CPU.
        """

    @abstractmethod
    def copy(self) -> Self:
        """Return a grammar in the same state that goes its own way from here on."""

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str = "cpu") -> Tensor:
        """Return a mask of ``batch_size`` rows that ban nothing: int32 [N, ceil(V / 32)], 1 is allowed."""
        return allocate_bitmask(batch_size, vocab_size, device)

    def move_vocab_mask(self, mask: Tensor, device: str) -> Tensor:
        """Return the filled mask on ``device``."""
        return mask.to(device, non_blocking=True)

    def apply_vocab_mask(self, logits: Tensor, mask: Tensor) -> None:
        """Write minus infinity over what ``mask`` bans. ``logits`` [N, V]. Mutates ``logits``."""
        (apply_bitmask_on_cpu if logits.device.type == "cpu" else apply_bitmask)(logits, mask)

    def try_jump_forward(self) -> bytes:
        """Return the bytes that must come next, whatever the model thinks; empty if there is a choice or an end."""
        return b""


def check_rollback(count: int, most: int) -> None:
    """Raise ``ValueError`` for a number of tokens that cannot be undone."""
    if not 0 <= count <= most:
        raise ValueError(f"rollback of {count} tokens; {most} were accepted, so give a number from 0 to {most}")


@dataclass(frozen=True)
class GrammarOptions:
    """How grammars are compiled. ``whitespace`` between the tokens of JSON: "spaced" as ``json.dumps`` writes it.

    "compact": none. "any": what JSON allows, which forces hardly any text. ``max_states``: of the ``fsm`` backend.
    """

    whitespace: Whitespace = "spaced"
    max_states: int = 20_000

    def __post_init__(self) -> None:
        """Check the words and numbers. Raises ``ValueError``."""
        if self.whitespace not in get_args(Whitespace):
            raise ValueError(f"whitespace is {self.whitespace!r}; choose one of {', '.join(get_args(Whitespace))}")
        if self.max_states < 1:
            raise ValueError(f"max_states is {self.max_states}; an automaton has at least 1 state")


class GrammarBackend(ABC):
    """Compiles grammars for one vocabulary. ``compile`` may be called from any thread, and by several at a time."""

    name: str
    kinds: Sequence[GrammarKind] = KINDS

    def __init__(self, table: TokenTable, options: GrammarOptions | None = None) -> None:
        """Compile for the tokens of ``table``."""
        self.table = table
        self.options = options or GrammarOptions()

    def compile(self, key: GrammarKey) -> GrammarObject:
        """Compile a grammar, at its beginning. Slow. Raises ``GrammarError`` for one that cannot be compiled."""
        kind, text = key
        self.check_kind(kind)
        if "\0" in text:
            raise GrammarError(f"the {kind} holds a NUL character, which no backend is safe with; write \\x00 for it")
        grammar = self.build(kind, text)
        grammar.stats.kind = kind
        grammar.stats.backend = grammar.stats.backend or self.name
        return grammar

    def check_kind(self, kind: GrammarKind) -> None:
        """Raise ``GrammarError`` for a kind of grammar that this backend does not compile."""
        if kind not in self.kinds:
            raise GrammarError(
                f"the grammar backend {self.name!r} has no {kind}, only {', '.join(self.kinds)}; "
                "choose another one, xgrammar for example"
            )

    @abstractmethod
    def build(self, kind: GrammarKind, text: str) -> GrammarObject:
        """Compile ``text``, of one of ``kinds``. Raises ``GrammarError``."""


BackendFactory = Callable[[TokenTable, GrammarOptions], GrammarBackend]


REGISTRY: dict[str, BackendFactory] = {}  # by name; they are found before the built-in ones of the same name
names_from("grammar_backend", REGISTRY)


def register_grammar_backend(name: str) -> Callable[[BackendFactory], BackendFactory]:
    """Return a decorator that makes a class or function the backend ``name``. Raises ``ValueError`` for "none"."""
    if name == "none":
        raise ValueError("the grammar backend 'none' means that there is none; register another name")

    def keep(factory: BackendFactory) -> BackendFactory:
        REGISTRY[name] = factory
        return factory

    return keep
