"""To which worker a request goes: to the one that holds most of its prompt, unless too many wait there.

It believes what it was told: what was sent to a worker and what came back, less what the worker says that it dropped.
It knows neither clocks nor processes, so that equal calls give equal choices.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mini_engine.router.tree import TokenTree, as_tokens

MOST_TOKENS = 2**18  # in a worker's tree: 1 MB, and 0.1 GB if no two requests begin with the same token


class NoWorker(RuntimeError):  # noqa: N818
    """No worker can take a request."""


@dataclass
class Worker:
    """One worker: ``queue`` requests were begun there and did not end; a drained one gets no more."""

    tree: TokenTree
    queue: int = 0
    drained: bool = False


class PrefixPolicy:
    """Sends a request where the longest beginning of its prompt is, or where fewest requests are.

    ``share``: a match is more than this part of the prompt. A queue is too far ahead if it has more than ``most_ahead``
    requests more than the shortest one, and more than ``ratio_ahead`` times as many. ``most_tokens``: in the tree of
    each worker.
    """

    def __init__(
        self, *, share: float = 0.5, most_ahead: int = 4, ratio_ahead: float = 1.5, most_tokens: int = MOST_TOKENS
    ) -> None:
        """Start without workers. Raises ``ValueError`` for a limit that cannot be."""
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}; it is a part of the prompt, 0 to 1")
        for name, value, least in (
            ("most_ahead", most_ahead, 0),
            ("ratio_ahead", ratio_ahead, 1),
            ("most_tokens", most_tokens, 1),
        ):
            if not value >= least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        self.share = share
        self.most_ahead = most_ahead
        self.ratio_ahead = ratio_ahead
        self.most_tokens = most_tokens
        self.workers: dict[str, Worker] = {}

    def add(self, worker: str) -> None:
        """Let a new worker take requests; it holds nothing. Raises ``ValueError`` if the name is taken. Mutates."""
        if worker in self.workers:
            raise ValueError(f"there is a worker {worker!r} already; remove it first or choose another name")
        self.workers[worker] = Worker(TokenTree(self.most_tokens))

    def remove(self, worker: str) -> None:
        """Forget a worker that is dead, with its tree and its queue; an unknown one is forgotten already. Mutates."""
        self.workers.pop(worker, None)

    def drain(self, worker: str) -> None:
        """Send ``worker`` no new request; what it has may end. Raises ``ValueError`` for an unknown one. Mutates."""
        self.known(worker).drained = True

    def resume(self, worker: str) -> None:
        """Let a drained worker take requests again. Raises ``ValueError`` for an unknown one. Mutates."""
        self.known(worker).drained = False

    def choose(self, tokens: Sequence[int], without: Collection[str] = ()) -> str:
        """Return the worker for a prompt, none of ``without``. Raises ``NoWorker`` if none can take it.

        Of equal matches the shortest queue, of equal queues the smallest tree, then the first name. A match that is too
        far ahead does not count.
        """
        able = {name: own for name, own in self.workers.items() if not own.drained and name not in without}
        if not able:
            raise NoWorker(self.why_none(without))
        shortest = min(own.queue for own in able.values())
        prompt = as_tokens(tokens)

        def rank(name: str) -> tuple[int, int, int, str]:
            own = able[name]
            matched = 0 if self.too_far_ahead(own.queue, shortest) else own.tree.match(prompt)
            return (-matched if matched > self.share * len(prompt) else 0, own.queue, own.tree.num_tokens, name)

        return min(able, key=rank)

    def begin(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a prompt was sent to ``worker``. Raises ``ValueError`` for an unknown one. Mutates."""
        own = self.known(worker)
        own.tree.insert(tokens)  # first: tokens that are none raise an error, and then nothing has begun
        own.queue += 1

    def end(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a request ended there; ``tokens``: its prompt and its answer. Mutates.

        A request of a worker that was removed counts no more. Raises ``ValueError`` if more requests end than began.
        """
        own = self.workers.get(worker)
        if own is None:
            return
        if own.queue == 0:
            raise ValueError(f"worker {worker!r} has no request that could end; call begin first, and end only once")
        own.queue -= 1
        own.tree.insert(tokens)

    def dropped(self, worker: str, tokens: Sequence[int], length: int) -> None:
        """Note that ``worker`` holds of ``tokens`` and of all that begins with them only the first ``length``. Mutates.

        What it says after it was removed does not count. Raises ``ValueError`` if there are no ``length`` tokens.
        """
        if worker in self.workers:
            self.workers[worker].tree.forget(tokens, length)

    def held(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that ``worker`` holds ``tokens``, perhaps with those of an answer. Mutates.

        What it says after it was removed does not count.
        """
        if worker in self.workers:
            self.workers[worker].tree.insert(tokens)

    def matched(self, worker: str, tokens: Sequence[int]) -> int:
        """Return how many of the first ``tokens`` ``worker`` is believed to hold, 0 for an unknown one."""
        return self.workers[worker].tree.match(tokens) if worker in self.workers else 0

    def too_far_ahead(self, queue: int, shortest: int) -> bool:
        """Say whether a queue exceeds the shortest one by both limits."""
        return queue - shortest > self.most_ahead and queue > self.ratio_ahead * shortest

    def known(self, worker: str) -> Worker:
        """Return a worker. Raises ``ValueError`` for an unknown one, with the names that exist."""
        if worker not in self.workers:
            raise ValueError(f"there is no worker {worker!r}; there are {', '.join(self.workers) or 'none'}")
        return self.workers[worker]

    def why_none(self, without: Collection[str]) -> str:
        """Say why no worker can take a request."""
        drained = ", ".join(name for name, own in self.workers.items() if own.drained) or "none"
        left_out = ", ".join(sorted(without)) or "none"
        return (
            f"none of {len(self.workers)} workers can take the request (drained: {drained}; left out: {left_out}); "
            "add a worker or resume one"
        )

    def check(self) -> None:
        """Assert that no queue is negative and that every tree is one."""
        for name, own in self.workers.items():
            assert own.queue >= 0, f"{name} has a queue of {own.queue}"
            own.tree.check()
