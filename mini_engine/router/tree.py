"""What a worker is believed to hold: token sequences in a radix tree, found by their beginning.

It is the tree of ``mini_engine.radix_cache`` without pages: it can be cut between any two tokens, nothing is locked,
and a look changes nothing. The edges stand in the order of their last use, children before parents. So the first one
has no children, and what goes first is found at once, in a tree of any size.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Tokens = array  # of signed 32-bit numbers: a fifth of the memory of a list, and slices are compared as bytes


def as_tokens(token_ids: Sequence[int]) -> "Tokens[int]":
    """Return ids as the tree keeps them. Raises ``OverflowError`` for an id beyond 32 bits."""
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)


@dataclass(eq=False, slots=True)
class Edge:
    """Tokens that follow each other, and what follows them: ``children`` by their first token. The root has none."""

    tokens: "Tokens[int]"
    parent: "Edge | None" = field(repr=False)
    children: "dict[int, Edge]" = field(default_factory=dict, repr=False)


class TokenTree:
    """Sequences of token ids, at most ``most_tokens`` different ones in all; ``num_tokens`` are held."""

    def __init__(self, most_tokens: int) -> None:
        """Start empty."""
        self.most_tokens = most_tokens
        self.num_tokens = 0
        self.root = Edge(as_tokens([]), None)
        self.order = OrderedDict[Edge, None]()  # all edges but the root, the least recently used one first

    def match(self, token_ids: Sequence[int]) -> int:
        """Return how many of the first tokens are held."""
        return self.descend(as_tokens(token_ids))[1]

    def insert(self, token_ids: Sequence[int]) -> None:
        """Hold ``token_ids``; they are the most recently used now. Mutates.

        What was used least recently goes beyond ``most_tokens``: ends first, perhaps that of ``token_ids``, too.
        """
        tokens = as_tokens(token_ids)
        path, agreed = self.descend(tokens)
        excess = sum(len(edge.tokens) for edge in path) - agreed
        if excess:
            path[-1] = self.split(path[-1], len(path[-1].tokens) - excess)
        if agreed < len(tokens):
            parent = path[-1] if path else self.root
            path.append(Edge(tokens[agreed:], parent))
            parent.children[tokens[agreed]] = path[-1]
            self.num_tokens += len(tokens) - agreed
        for edge in reversed(path):
            self.order[edge] = None
            self.order.move_to_end(edge)
        while self.num_tokens > self.most_tokens:
            end = next(iter(self.order))
            self.shorten(end, min(self.num_tokens - self.most_tokens, len(end.tokens)))

    def forget(self, token_ids: Sequence[int], length: int) -> None:
        """Hold no more what begins with ``token_ids`` and goes on, and of them only the first ``length``. Mutates.

        What they share with other sequences stays. Raises ``ValueError`` if there are no ``length`` tokens.
        """
        tokens = as_tokens(token_ids)
        if not 0 <= length <= len(tokens):
            raise ValueError(f"length is {length}; of {len(tokens)} tokens 0 to {len(tokens)} can be left")
        path, agreed = self.descend(tokens)
        last = path[-1] if path else self.root
        excess = sum(len(edge.tokens) for edge in path) - agreed
        if agreed == len(tokens):
            self.num_tokens -= excess
            for edge in below(last):
                self.num_tokens -= len(edge.tokens)
                del self.order[edge]
            last.children.clear()
            del last.tokens[len(last.tokens) - excess :]
        elif excess:
            return
        while agreed > length and not last.children:
            shorter = min(agreed - length, len(last.tokens))
            agreed -= shorter
            last = self.shorten(last, shorter)

    def descend(self, tokens: "Tokens[int]") -> tuple[list[Edge], int]:
        """Return the edges on the way of ``tokens``, and how many tokens agree: of the last edge perhaps not all."""
        path = list[Edge]()
        agreed = 0
        edge = self.root
        while agreed < len(tokens) and tokens[agreed] in edge.children:
            edge = edge.children[tokens[agreed]]
            path.append(edge)
            agreeing = agreeing_tokens(edge.tokens, tokens, agreed)
            agreed += agreeing
            if agreeing < len(edge.tokens):
                break
        return path, agreed

    def split(self, edge: Edge, length: int) -> Edge:
        """Cut ``edge`` after ``length`` tokens and return the upper part, a new edge that is in no order. Mutates."""
        parent = edge.parent
        assert parent is not None and 0 < length < len(edge.tokens), "a cut leaves tokens on both sides"  # noqa: PT018
        upper = Edge(edge.tokens[:length], parent, {edge.tokens[length]: edge})
        parent.children[edge.tokens[0]] = upper
        edge.parent = upper
        del edge.tokens[:length]
        return upper

    def shorten(self, edge: Edge, count: int) -> Edge:
        """Take ``count`` tokens from the end of a childless edge; return it, or its parent if it is gone. Mutates."""
        parent = edge.parent
        assert parent is not None and not edge.children, "only an end can become shorter"  # noqa: PT018
        self.num_tokens -= count
        if count < len(edge.tokens):
            del edge.tokens[-count:]
            return edge
        del parent.children[edge.tokens[0]], self.order[edge]
        return parent

    def check(self) -> None:
        """Assert that the tree is one, within its bound, and that its counter equals a recount."""
        edges = list(below(self.root))
        held = sum(len(edge.tokens) for edge in edges)
        assert held == self.num_tokens <= self.most_tokens, f"{self.num_tokens} tokens counted, {held} held"
        assert all(edge.tokens for edge in edges) and not self.root.tokens, "an edge without tokens"  # noqa: PT018
        for edge in [self.root, *edges]:
            assert all(child.tokens[0] == token for token, child in edge.children.items()), "a child is misnamed"
            assert all(child.parent is edge for child in edge.children.values()), "a child has another parent"
        assert set(edges) == set(self.order), "an edge that is not ordered, or an order of what hangs nowhere"
        places = {edge: place for place, edge in enumerate(self.order)}
        for edge in edges:
            assert all(places[child] < places[edge] for child in edge.children.values()), "a child was used later"


def below(edge: Edge) -> Iterator[Edge]:
    """Go through all edges below ``edge``, parents before children."""
    stack = list(edge.children.values())
    while stack:
        child = stack.pop()
        stack += child.children.values()
        yield child


def agreeing_tokens(own: "Tokens[int]", tokens: "Tokens[int]", start: int) -> int:
    """Return how many tokens at the beginning of ``own`` are those of ``tokens`` from ``start`` on; the first one is.

    By halving: the first ``low`` agree, and at most the first ``high``. Slices are compared in C.
    """
    low = 1
    high = min(len(own), len(tokens) - start)
    if own[:high] == tokens[start : start + high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if own[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low
