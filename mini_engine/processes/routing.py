"""Which worker gets a request: the one that knows its beginning, unless too many wait there.

A worker is an engine with a prefix cache. The router sees requests alone, so what it knows of a cache is a belief: what
was sent there and what was answered, less what the worker said that it dropped.
"""

from collections.abc import Sequence


class Node(dict[int, "Node"]):
    """A place in a tree of token ids: the ids that may follow there, and where each leads."""


class Tree:
    """What one worker is believed to hold. The way from the root to a node spells the ids that are held."""

    def __init__(self) -> None:
        """Hold nothing."""
        self.root = Node()

    def match(self, tokens: Sequence[int]) -> int:
        """Return how many of the first ``tokens`` are held."""
        node = self.root
        for count, token in enumerate(tokens):
            if token not in node:
                return count
            node = node[token]
        return len(tokens)

    def insert(self, tokens: Sequence[int]) -> None:
        """Hold ``tokens``, and what was held before. Mutates."""
        node = self.root
        for token in tokens:
            node = node.setdefault(token, Node())

    def dropped(self, tokens: Sequence[int], length: int) -> None:
        """Forget the token behind the first ``length`` of ``tokens``, and all that follows it there. Mutates.

        What branches off before it stays, and so do other tokens in its place. What is not held is no error.
        """
        node = self.root
        for token in tokens[:length]:
            if token not in node:
                return
            node = node[token]
        if length < len(tokens):
            node.pop(tokens[length], None)


class Router:
    """Chooses a worker for each request, and keeps what it needs for that."""

    def __init__(
        self, workers: Sequence[str], share: float = 0.5, most_ahead: int = 4, ratio_ahead: float = 1.5
    ) -> None:
        """Route to ``workers``, whose order breaks ties.

        A prefix counts if it is more than ``share`` of the request. A worker's queue is too long if it has more than
        ``most_ahead`` requests more than the shortest one, and more than ``ratio_ahead`` times as many.
        """
        self.trees = {worker: Tree() for worker in workers}
        self.queues = dict.fromkeys(workers, 0)
        self.share = share
        self.most_ahead = most_ahead
        self.ratio_ahead = ratio_ahead

    def choose(self, tokens: Sequence[int]) -> str:
        """Return the worker for a request of ``tokens``; nothing is noted yet.

        It is the worker with the longest match, if that is more than ``share`` of the request and the worker's queue is
        not too long. Otherwise it is the one with the shortest queue. Where several are alike in this, the other of the
        two decides: queue or match. Where both are alike, the earlier worker is taken.
        """
        matches = {worker: tree.match(tokens) for worker, tree in self.trees.items()}
        best = min(self.queues, key=lambda worker: (-matches[worker], self.queues[worker]))
        idle = min(self.queues, key=lambda worker: (self.queues[worker], -matches[worker]))
        least, own = self.queues[idle], self.queues[best]
        is_long = own - least > self.most_ahead and own > self.ratio_ahead * least
        return best if matches[best] > self.share * len(tokens) and not is_long else idle

    def begin(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that ``worker`` was sent a request of ``tokens``: it is in its queue, and soon in its cache. Mutates."""
        self.queues[worker] += 1
        self.trees[worker].insert(tokens)

    def end(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that ``worker`` is done with a request. ``tokens``: its prompt, and what was answered. Mutates."""
        self.queues[worker] -= 1
        self.trees[worker].insert(tokens)
