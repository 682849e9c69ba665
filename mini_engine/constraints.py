"""L5: the interface of what limits an answer, and its null form, which limits nothing. L7's grammars implement it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mini_engine.sampler.batch import TorchOps
from mini_engine.sampler.params import GrammarKind, SamplingParams
from mini_engine.scheduler.request import Request


class ConstraintError(ValueError):
    """A request's constraint refuses a token or fails. The request ends with this error; the others go on."""


@dataclass
class GrammarStats:
    """What a grammar cost its request. Times in seconds. ``compile_s``: also when another request's compile was shared.

    ``mask_s`` is summed over ``num_masks`` filled rows. ``num_forced_tokens``: appended without a forward pass of their
    own. ``backend``: which one compiled it. ``ignored``: the places of a schema's keywords that say nothing about which
    values are valid. ``narrowed``: what is allowed and never written, each with its place in the schema.
    """

    kind: GrammarKind | None = None
    compile_s: float = 0.0
    is_cache_hit: bool = False
    num_masks: int = 0
    mask_s: float = 0.0
    num_forced_tokens: int = 0
    backend: str | None = None
    ignored: Sequence[str] = ()
    narrowed: Sequence[str] = ()


class Constraints(Protocol):
    """The engine's view: when a request may start, which tokens it may take, which it must take, when it is done."""

    @property
    def num_waiting(self) -> int:
        """How many requests wait for their constraint."""

    def check(self, params: SamplingParams) -> None:
        """Raise ``ValueError`` for a request whose constraint cannot be served."""

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Begin to compile what a request with ``params`` needs; ``None`` if that is nothing or is there already.

        The future raises ``ValueError`` for what cannot be compiled. Raises ``ValueError`` as ``check`` does. Mutates.
        """

    def submit(self, request: Request) -> bool:
        """Return whether the request has to wait for its constraint; ``admit`` says when that is ready. Mutates."""

    def admit(self, wait_s: float) -> tuple[list[str], dict[str, str]]:
        """Return the ids of the requests that may start now, and why others never will. Mutates.

        Waits up to ``wait_s`` seconds for the first.
        """

    def drop(self, request: Request) -> bool:
        """Forget a request that waits; return whether it did. Mutates."""

    def mask(self, requests: Sequence[Request]) -> Callable[[Tensor, TorchOps], None] | None:
        """Return what bans tokens in logits [N, V], a row for each request; ``None`` if there is nothing to ban."""

    def accept(self, request: Request, token_id: int) -> bool:
        """Take in the newest token; return whether the answer ends with it. Raises ``ConstraintError``. Mutates."""

    def forced(self, request: Request) -> Iterator[int]:
        """Yield the tokens that must follow the newest one. Raises ``ConstraintError``."""

    def finish(self, request: Request) -> tuple[GrammarStats, bool] | None:
        """Forget a request that has ended; return its cost and whether its text is valid as a whole. Mutates."""

    def close(self) -> None:
        """Give up what was not begun. Mutates."""


class NoConstraints:
    """Limits nothing: the off value of L7."""

    num_waiting = 0

    def check(self, params: SamplingParams) -> None:
        """Refuse a request with a grammar."""
        if params.grammar is not None:
            raise ValueError(
                f"the request has a {params.grammar[0]} and this engine has no grammar backend; set "
                "grammar_backend='auto' or another one in EngineConfig"
            )

    def prepare(self, params: SamplingParams) -> None:
        """Compile nothing; refuse a request with a grammar."""
        self.check(params)

    def submit(self, request: Request) -> bool:
        """Let every request start."""
        return False

    def admit(self, wait_s: float) -> tuple[list[str], dict[str, str]]:
        """Return no request: none waits."""
        return [], {}

    def drop(self, request: Request) -> bool:
        """Know no request."""
        return False

    def mask(self, requests: Sequence[Request]) -> None:
        """Ban nothing."""

    def accept(self, request: Request, token_id: int) -> bool:
        """End no answer."""
        return False

    def forced(self, request: Request) -> Iterator[int]:
        """Force nothing."""
        return iter(())

    def finish(self, request: Request) -> None:
        """Report nothing."""

    def close(self) -> None:
        """Do nothing."""
