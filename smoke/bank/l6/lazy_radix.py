"""A wheat: nodes hold tuples, the walk is recursive, and one heap is kept for all evictions.

An entry of the heap is true if its node is still an unlocked leaf of that rank; whatever changes a rank adds a new one.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from mini_engine.scheduler.prefix_cache import PrefixHit

Page = tuple[int, ...]
Rank = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """One edge, its tokens and pages in tuples."""

    number: int
    tokens: Sequence[int]
    pages: Sequence[int]
    parent: "Node | None" = field(repr=False)
    created: int = 0
    last_used: int = 0
    num_uses: int = 0
    priority: int = 0
    lock_count: int = 0
    children: dict[Page, "Node"] = field(default_factory=dict, repr=False)
    cache_key: str | None = None


EVICTIONS: dict[str, Callable[[Node], Rank]] = {
    "lru": lambda node: (node.last_used,),
    "lfu": lambda node: (node.num_uses, node.last_used),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.last_used,),
    "priority": lambda node: (node.priority, node.last_used),
}


def register_eviction(name: str, rank: Callable[[Node], Rank]) -> None:
    """Add an order."""
    if name in EVICTIONS:
        raise ValueError(f"the eviction order {name!r} exists already; choose another name")
    EVICTIONS[name] = rank


@dataclass
class RadixStats:
    """What a cache has done."""

    num_uses: int = 0
    num_tokens: int = 0
    num_tokens_hit: int = 0
    num_pages_inserted: int = 0
    num_pages_evicted: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of tokens that were found."""
        return self.num_tokens_hit / max(self.num_tokens, 1)


class RadixCache:
    """A prefix cache."""

    def __init__(self, page_size: int, eviction: str = "lru") -> None:
        """Start empty."""
        if eviction not in EVICTIONS:
            raise ValueError(f"there is no eviction order {eviction!r}; choose one of {', '.join(EVICTIONS)}")
        self.page_size = page_size
        self.rank = EVICTIONS[eviction]
        self.numbers = count()
        self.now = 0
        self.roots: dict[str | None, Node] = {}
        self.nodes: dict[int, Node] = {}
        self.leaves: dict[int, Node] = {}
        self.num_pages = self.num_evictable = 0
        self.stats = RadixStats()
        self.heap: list[tuple[Rank, int]] = []

    def note(self, node: Node) -> None:
        """Put a node that could be evicted on the heap."""
        if node.number in self.leaves and not node.lock_count:
            heapq.heappush(self.heap, (self.rank(node), node.number))

    def match(self, token_ids: Sequence[int], key: str | None = None) -> PrefixHit:
        """Find the longest beginning."""
        return hit_of(self.walk(token_ids, key))

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], key: str | None = None, priority: int = 0
    ) -> PrefixHit:
        """Take over what is new."""
        path = self.walk(token_ids, key)
        known = len(hit_of(path).pages)
        whole = len(token_ids) // self.page_size
        if whole > known:
            stretch = slice(known * self.page_size, whole * self.page_size)
            parent = path[-1] if path else self.root(key)
            path.append(self.grow(parent, list(token_ids[stretch]), list(pages[known:whole])))
            self.stats.num_pages_inserted += whole - known
        for node in path:
            node.priority = max(node.priority, priority)
            self.note(node)
        return hit_of(path)

    def lock(self, hit: PrefixHit) -> int:
        """Protect a hit."""
        newly = [node for node in self.ancestry(hit) if not node.lock_count]
        for node in self.ancestry(hit):
            node.lock_count += 1
        taken = sum(len(node.pages) for node in newly)
        self.num_evictable -= taken
        return taken

    def unlock(self, hit: PrefixHit) -> None:
        """Undo one lock."""
        for node in self.ancestry(hit):
            assert node.lock_count, f"node {node.number} has no lock"
            node.lock_count -= 1
            if not node.lock_count:
                self.num_evictable += len(node.pages)
                self.note(node)

    def record(self, hit: PrefixHit, num_tokens: int) -> None:
        """Count a use."""
        self.stats.num_uses += 1
        self.stats.num_tokens += num_tokens
        self.stats.num_tokens_hit += len(hit.pages) * self.page_size
        for node in self.ancestry(hit):
            node.num_uses += 1
            self.note(node)

    def evict(self, count: int) -> list[int]:
        """Give up pages."""
        evicted: list[int] = []
        while self.heap and len(evicted) < count:
            rank, number = heapq.heappop(self.heap)
            node = self.leaves.get(number)
            if node is None or node.lock_count or self.rank(node) != rank:
                continue
            kept = max(len(node.pages) - (count - len(evicted)), 0)
            evicted += list(node.pages)[kept:]
            node.pages, node.tokens = tuple(node.pages)[:kept], tuple(node.tokens)[: kept * self.page_size]
            self.note(node if kept else self.remove(node))
        self.num_pages -= len(evicted)
        self.num_evictable -= len(evicted)
        self.stats.num_pages_evicted += len(evicted)
        return evicted

    def drop(self, hit: PrefixHit) -> list[int]:
        """Give up what nobody else needs of a hit."""
        dropped: list[int] = []
        for node in list(self.ancestry(hit)):
            if node.lock_count or node.children:
                return self.give_away(dropped)
            dropped.extend(node.pages)
            self.note(self.remove(node))
        return self.give_away(dropped)

    def give_away(self, pages: list[int]) -> list[int]:
        """Count pages out."""
        self.num_pages, self.num_evictable = self.num_pages - len(pages), self.num_evictable - len(pages)
        return pages

    def walk(self, token_ids: Sequence[int], key: str | None) -> list[Node]:
        """Go down, and make what was passed the latest used."""
        self.now += 1
        path = self.follow(self.roots[key], tuple(token_ids)) if key in self.roots else []
        for node in path:
            node.last_used = self.now
            self.note(node)
        return path

    def follow(self, node: Node, tokens: tuple[int, ...]) -> list[Node]:
        """Return the nodes below ``node`` that agree."""
        name = tokens[: self.page_size]
        if len(name) < self.page_size or name not in node.children:
            return []
        child = node.children[name]
        agreeing = self.agreeing_pages(child, list(tokens), 0)
        child = child if agreeing == len(child.pages) else self.split(child, agreeing)
        return [child, *self.follow(child, tokens[len(child.tokens) :])]

    def agreeing_pages(self, node: Node, tokens: list[int], start: int) -> int:
        """Count tokens, then pages."""
        agreeing = 0
        for own, token in zip(node.tokens, tokens[start:], strict=False):
            if own != token:
                break
            agreeing += 1
        return agreeing // self.page_size

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node in two."""
        parent = node.parent
        cut = num_pages * self.page_size
        assert parent is not None, "a root has nothing to cut"
        upper = Node(
            next(self.numbers),
            tuple(node.tokens)[:cut],
            tuple(node.pages)[:num_pages],
            parent,
            node.created,
            node.last_used,
            node.num_uses,
            node.priority,
            node.lock_count,
        )
        node.tokens, node.pages, node.parent = tuple(node.tokens)[cut:], tuple(node.pages)[num_pages:], upper
        upper.children = {self.first_page(node): node}
        self.nodes[upper.number] = parent.children[self.first_page(upper)] = upper
        return upper

    def grow(self, parent: Node, tokens: list[int], pages: list[int]) -> Node:
        """Hang a new leaf."""
        leaf = Node(next(self.numbers), tuple(tokens), tuple(pages), parent, created=self.now, last_used=self.now)
        if parent.number in self.leaves:
            del self.leaves[parent.number]
        parent.children[self.first_page(leaf)] = self.nodes[leaf.number] = self.leaves[leaf.number] = leaf
        self.num_pages, self.num_evictable = self.num_pages + len(pages), self.num_evictable + len(pages)
        self.note(leaf)
        return leaf

    def remove(self, node: Node) -> Node:
        """Take a leaf out."""
        parent = node.parent
        assert parent is not None, "a root is not removed"
        parent.children = {name: child for name, child in parent.children.items() if child is not node}
        del self.nodes[node.number], self.leaves[node.number]
        if not parent.children:
            if parent.parent is None:
                self.roots.pop(parent.cache_key)
            else:
                self.leaves[parent.number] = parent
        return parent

    def root(self, key: str | None) -> Node:
        """Return a key's root."""
        return self.roots.setdefault(key, Node(next(self.numbers), (), (), None, cache_key=key))

    def first_page(self, node: Node) -> Page:
        """Name a node."""
        return tuple(node.tokens)[: self.page_size]

    def ancestry(self, hit: PrefixHit) -> Iterator[Node]:
        """Go up."""
        if hit.path:
            node: Node | None = self.nodes[hit.path[-1]]
            while node is not None and node.parent is not None:
                yield node
                node = node.parent

    def descend(self) -> Iterator[tuple[int, Node]]:
        """Go down through all nodes."""
        for root in self.roots.values():
            yield from self.descend_from(root, 0)

    def descend_from(self, parent: Node, depth: int) -> Iterator[tuple[int, Node]]:
        """Go down from one."""
        for child in sorted(parent.children.values(), key=lambda child: -child.num_uses):
            yield depth, child
            yield from self.descend_from(child, depth + 1)

    @property
    def total_size(self) -> int:
        """Tokens."""
        return self.num_pages * self.page_size

    @property
    def evictable_size(self) -> int:
        """Tokens that nobody locks."""
        return sum(len(node.tokens) for node in self.nodes.values() if not node.lock_count)

    @property
    def protected_size(self) -> int:
        """Tokens that somebody locks."""
        return sum(len(node.tokens) for node in self.nodes.values() if node.lock_count)

    def check(self) -> None:
        """Recount the pages."""
        pages = [page for node in self.nodes.values() for page in node.pages]
        assert len(pages) == len(set(pages)) == self.num_pages, "pages miscounted"


def hit_of(path: list[Node]) -> PrefixHit:
    """Join the pages."""
    pages: tuple[int, ...] = ()
    for node in path:
        pages += tuple(node.pages)
    return PrefixHit(pages, tuple(node.number for node in path))
