"""L6: the radix cache: keys and values of token sequences that were computed before, found by their beginning.

It holds page numbers only: it knows neither tensors nor which pages are free.

    root ─┬─ [system prompt: 32 pages] ─┬─ [question A: 2 pages] ── [answer A: 5 pages]
          │                             └─ [question B: 1 page ]
          └─ [another prompt: 4 pages]

An edge holds whole pages of tokens, so a node can be cut only between pages, and its children differ in their first
page. A page is in one node at most. Nodes from the root to a locked one are locked: what hangs together is kept
together, and what is evicted is always a leaf. Source: Zheng et al. 2024 (RadixAttention), SGLang ``RadixCache``.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from mini_engine.checks import names_from
from mini_engine.scheduler.prefix_cache import PrefixHit

Page = tuple[int, ...]  # the tokens of one page


@dataclass(eq=False, slots=True)
class Node:
    """One edge of the tree: the tokens of its pages, and the pages that hold their keys and values.

    ``children`` by the tokens of their first page. ``last_used`` and ``created`` are ticks of the cache's own clock.
    A root has no parent and no pages; ``cache_key`` says whose it is.
    """

    number: int
    tokens: list[int]
    pages: list[int]
    parent: "Node | None" = field(repr=False)
    created: int = 0
    last_used: int = 0
    num_uses: int = 0
    priority: int = 0
    lock_count: int = 0
    children: dict[Page, "Node"] = field(default_factory=dict, repr=False)
    cache_key: str | None = None


Rank = tuple[int, ...]
# What is evicted first has the smallest rank.
EVICTIONS: dict[str, Callable[[Node], Rank]] = {
    "lru": lambda node: (node.last_used,),  # least recently used
    "lfu": lambda node: (node.num_uses, node.last_used),  # least frequently used
    "fifo": lambda node: (node.created,),  # first in, first out
    "mru": lambda node: (-node.last_used,),  # most recently used
    "priority": lambda node: (node.priority, node.last_used),
}
names_from("eviction", EVICTIONS)


def register_eviction(name: str, rank: Callable[[Node], Rank]) -> None:
    """Add an eviction order. Raises ``ValueError`` if the name is taken."""
    if name in EVICTIONS:
        raise ValueError(f"the eviction order {name!r} exists already; choose another name")
    EVICTIONS[name] = rank


@dataclass
class RadixStats:
    """What a cache has done so far. A *use* is a request that was admitted; tokens are counted there."""

    num_uses: int = 0
    num_tokens: int = 0
    num_tokens_hit: int = 0
    num_pages_inserted: int = 0
    num_pages_evicted: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of all requests that did not have to be computed."""
        return self.num_tokens_hit / self.num_tokens if self.num_tokens else 0.0


class RadixCache:
    """A prefix cache (``scheduler.prefix_cache.PrefixCache``). Pages that it holds are not free; ``evict`` frees them.

    ``num_pages`` it holds, ``num_evictable`` of them are in no locked node.
    """

    def __init__(self, page_size: int, eviction: str = "lru") -> None:
        """Start empty. Raises ``ValueError`` for an unknown ``eviction``, listing the names that exist."""
        if eviction not in EVICTIONS:
            raise ValueError(f"there is no eviction order {eviction!r}; choose one of {', '.join(EVICTIONS)}")
        self.page_size = page_size
        self.rank = EVICTIONS[eviction]
        self.numbers = count()
        self.now = 0
        self.roots: dict[str | None, Node] = {}
        self.nodes: dict[int, Node] = {}  # without the roots
        self.leaves: dict[int, Node] = {}  # the nodes without children, locked or not
        self.num_pages = self.num_evictable = 0
        self.stats = RadixStats()

    def match(self, token_ids: Sequence[int], key: str | None = None) -> PrefixHit:
        """Return the longest cached prefix of ``token_ids``, whole pages only.

        Mutates, though it only looks: all nodes on the way become the most recently used, and a node of which only the
        beginning agrees is cut in two there, so that a lock can hold exactly what is used.
        """
        return hit_of(self.walk(token_ids, key))

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], key: str | None = None, priority: int = 0
    ) -> PrefixHit:
        """Take over the ``pages`` of ``token_ids`` that are new here; return the hit for all whole pages. Mutates.

        pages of the caller | tokens are here already: stay the caller's, the hit names the cache's | new: the cache's |

        The new ones are counted in ``stats``.
        """
        path = self.walk(token_ids, key)
        done = sum(len(node.pages) for node in path)
        whole = len(token_ids) // self.page_size
        if done < whole:
            own = list(pages[done:whole])
            assert len(own) == whole - done, f"{len(pages)} pages cannot hold {whole} pages of tokens"
            parent = path[-1] if path else self.root(key)
            path.append(self.grow(parent, list(token_ids[done * self.page_size : whole * self.page_size]), own))
            self.stats.num_pages_inserted += len(own)
        for node in path:
            node.priority = max(node.priority, priority)
        return hit_of(path)

    def lock(self, hit: PrefixHit) -> int:
        """Keep the pages of ``hit`` from eviction; return how many could be evicted until now. Mutates."""
        taken = 0
        for node in self.ancestry(hit):
            taken += len(node.pages) if node.lock_count == 0 else 0
            node.lock_count += 1
        self.num_evictable -= taken
        return taken

    def unlock(self, hit: PrefixHit) -> None:
        """Undo one ``lock``; a node that is not locked is an ``AssertionError``. Mutates."""
        for node in self.ancestry(hit):
            assert node.lock_count > 0, f"node {node.number} is unlocked more often than it was locked"
            node.lock_count -= 1
            self.num_evictable += len(node.pages) if node.lock_count == 0 else 0

    def record(self, hit: PrefixHit, num_tokens: int) -> None:
        """Note that a request of ``num_tokens`` tokens starts from ``hit``. Mutates."""
        self.stats.num_uses += 1
        self.stats.num_tokens += num_tokens
        self.stats.num_tokens_hit += len(hit.pages) * self.page_size
        for node in self.ancestry(hit):
            node.num_uses += 1

    def evict(self, count: int) -> list[int]:
        """Give up ``count`` pages, fewer if no more are unlocked, and return them: the caller owns them now. Mutates.

        Leaf after leaf in the order of the ranks; of the last one only the tail that is needed, so that the number is
        exact. A parent that has lost its last child is a leaf like others. The pages are counted in ``stats``.
        """
        heap = [(self.rank(leaf), leaf.number) for leaf in self.leaves.values() if leaf.lock_count == 0]
        heapq.heapify(heap)
        evicted: list[int] = []
        while heap and len(evicted) < count:
            node = self.nodes[heapq.heappop(heap)[1]]
            tail = min(count - len(evicted), len(node.pages))
            evicted += node.pages[-tail:]
            if tail < len(node.pages):
                del node.pages[-tail:], node.tokens[-tail * self.page_size :]
                break
            parent = self.remove(node)
            if parent.number in self.leaves and parent.lock_count == 0:
                heapq.heappush(heap, (self.rank(parent), parent.number))
        self.num_pages -= len(evicted)
        self.num_evictable -= len(evicted)
        self.stats.num_pages_evicted += len(evicted)
        return evicted

    def drop(self, hit: PrefixHit) -> list[int]:
        """Give up the nodes of ``hit`` from the last one upwards, as far as no other request needs them. Mutates.

        Returns their pages, which the caller owns now. Nodes with children or locks stay, and those above them.
        """
        dropped: list[int] = []
        for node in list(self.ancestry(hit)):
            if node.children or node.lock_count:
                break
            dropped += node.pages
            self.remove(node)
        self.num_pages -= len(dropped)
        self.num_evictable -= len(dropped)
        return dropped

    def walk(self, token_ids: Sequence[int], key: str | None) -> list[Node]:
        """Go down from the root as far as whole pages agree; return the nodes on the way. Mutates as ``match`` says."""
        tokens = list(token_ids)
        node = self.roots.get(key)
        path = list[Node]()
        start = 0
        self.now += 1
        while node is not None:
            child = node.children.get(tuple(tokens[start : start + self.page_size]))  # less than a page names no child
            if child is None:
                break
            agreeing = self.agreeing_pages(child, tokens, start)
            node = child if agreeing == len(child.pages) else self.split(child, agreeing)
            node.last_used = self.now
            path.append(node)
            start += len(node.tokens)
        return path

    def agreeing_pages(self, node: Node, tokens: list[int], start: int) -> int:
        """Return how many pages at the beginning of ``node`` are the tokens from ``start`` on; at least the first is.

        By halving: the first ``low`` pages agree, and at most the first ``high``. Slices are compared in C.
        """
        size, own = self.page_size, node.tokens
        low = 1
        high = len(node.pages)
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[start + low * size : start + middle * size] == own[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut ``node`` after ``num_pages`` pages and return the upper part. Mutates.

        The upper part is the new node. The lower part stays the node it was, with its number, children and locks: hits
        that end in it stay right, and walking up from it now passes the upper part, which has the same locks.
        """
        size, parent = self.page_size, node.parent
        assert parent is not None and 0 < num_pages < len(node.pages), "a cut leaves pages on both sides"  # noqa: PT018
        upper = Node(
            next(self.numbers),
            node.tokens[: num_pages * size],
            node.pages[:num_pages],
            parent,
            node.created,
            node.last_used,
            node.num_uses,
            node.priority,
            node.lock_count,
        )
        del node.tokens[: num_pages * size], node.pages[:num_pages]
        parent.children[self.first_page(upper)] = upper
        upper.children[self.first_page(node)] = node
        node.parent = upper
        self.nodes[upper.number] = upper
        return upper

    def grow(self, parent: Node, tokens: list[int], pages: list[int]) -> Node:
        """Hang a new leaf under ``parent`` and return it. Mutates."""
        leaf = Node(next(self.numbers), tokens, pages, parent, created=self.now, last_used=self.now)
        parent.children[self.first_page(leaf)] = leaf
        self.leaves.pop(parent.number, None)
        self.nodes[leaf.number] = self.leaves[leaf.number] = leaf
        self.num_pages += len(pages)
        self.num_evictable += len(pages)
        return leaf

    def remove(self, node: Node) -> Node:
        """Take a leaf out of the tree and return its parent; a root without children goes, too. Mutates."""
        parent = node.parent
        assert parent is not None and not node.children, f"node {node.number} is no leaf"  # noqa: PT018
        del parent.children[self.first_page(node)], self.nodes[node.number], self.leaves[node.number]
        if not parent.children and parent.parent is not None:
            self.leaves[parent.number] = parent
        elif not parent.children:
            del self.roots[parent.cache_key]
        return parent

    def root(self, key: str | None) -> Node:
        """Return the root of ``key``'s own tree, a new one if there is none. Mutates."""
        if key not in self.roots:
            self.roots[key] = Node(next(self.numbers), [], [], None, cache_key=key)
        return self.roots[key]

    def first_page(self, node: Node) -> Page:
        """Return the tokens of a node's first page, which is its name among its siblings."""
        return tuple(node.tokens[: self.page_size])

    def ancestry(self, hit: PrefixHit) -> Iterator[Node]:
        """Go from the last node of ``hit`` up to the root, without the root."""
        node = self.nodes[hit.path[-1]] if hit.path else None
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def descend(self) -> Iterator[tuple[int, Node]]:
        """Go through all nodes with their depth, parents before children, the heaviest used child first."""
        stack = [(0, child) for root in self.roots.values() for child in root.children.values()]
        while stack:
            depth, node = stack.pop()
            yield depth, node
            stack += [(depth + 1, c) for c in sorted(node.children.values(), key=lambda c: (c.num_uses, -c.number))]

    @property
    def total_size(self) -> int:
        """Tokens in the cache."""
        return self.num_pages * self.page_size

    @property
    def evictable_size(self) -> int:
        """Tokens in nodes that are not locked."""
        return self.num_evictable * self.page_size

    @property
    def protected_size(self) -> int:
        """Tokens in locked nodes."""
        return self.total_size - self.evictable_size

    def check(self) -> None:
        """Assert that the tree is one and that every counter equals a recount."""
        nodes = [child for root in self.roots.values() for child in root.children.values()]
        for node in nodes:  # grows on the way
            nodes += node.children.values()
            assert len(nodes) <= len(self.nodes), "a node hangs at two places, or is not counted"
        pages = [page for node in nodes for page in node.pages]
        assert len(pages) == len(set(pages)) == self.num_pages, f"{self.num_pages} pages counted, {pages} held"
        assert sum(len(n.pages) for n in nodes if n.lock_count == 0) == self.num_evictable, "evictable pages miscounted"
        assert {n.number: n for n in nodes} == self.nodes, "nodes that hang nowhere"
        assert {n.number: n for n in nodes if not n.children} == self.leaves, "leaves miscounted"
        for node in nodes:
            assert node.pages and len(node.tokens) == len(node.pages) * self.page_size, "tokens and pages differ"  # noqa: PT018
            assert all(self.first_page(child) == name for name, child in node.children.items()), "a child is misnamed"
            assert all(child.parent is node for child in node.children.values()), "a child has another parent"
            assert all(c.lock_count <= node.lock_count for c in node.children.values()), "a child is locked more often"
            assert all(c.last_used <= node.last_used for c in node.children.values()), "a child was used later"


def hit_of(path: list[Node]) -> PrefixHit:
    """Return the hit whose pages are those of all nodes of ``path``, root first."""
    return PrefixHit(tuple(page for node in path for page in node.pages), tuple(node.number for node in path))
