"""The radix cache from outside: its errors, an order of eviction of one's own, and what ``check`` sees.

Lesson 6 checks its operations against a dict of prefixes.
"""

import pytest

from mini_engine.radix_cache import EVICTIONS, RadixCache, register_eviction


def test_errors_say_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.radix_cache.EVICTIONS", dict(EVICTIONS))
    with pytest.raises(ValueError, match="no eviction order 'clock'; choose one of lru, lfu, fifo, mru, priority"):
        RadixCache(1, "clock")
    with pytest.raises(ValueError, match="'lru' exists already"):
        register_eviction("lru", lambda node: (0,))
    register_eviction("longest", lambda node: (-len(node.pages),))
    cache = RadixCache(1, "longest")
    cache.insert([1], [0])
    cache.insert([2, 3, 4], [1, 2, 3])
    cache.insert([5, 6], [4, 5])
    assert sorted(cache.evict(4)) == [1, 2, 3, 5]
    with pytest.raises(AssertionError, match="1 pages cannot hold 2 pages"):
        cache.insert([7, 8], [0])


def broken(cache: RadixCache, what: str) -> None:
    _, node = next(cache.descend())
    leaf = next(iter(cache.leaves.values()))
    match what:
        case "pages counted":
            cache.num_pages += 1
        case "evictable pages miscounted":
            cache.num_evictable -= 1
        case "hang nowhere":
            cache.nodes[99] = leaf
        case "leaves miscounted":
            cache.leaves[node.number] = node
        case "pages differ":
            leaf.tokens.append(5)
        case "misnamed":
            name, child = node.children.popitem()
            node.children[(*name, 99)] = child
        case "another parent":
            leaf.parent = leaf
        case "locked more often":
            leaf.lock_count = 1
            cache.num_evictable -= len(leaf.pages)
        case "used later":
            leaf.last_used = 10**6
        case "held":
            leaf.pages[0] = node.pages[0]


@pytest.mark.parametrize(
    "what",
    [
        "pages counted",
        "evictable pages miscounted",
        "hang nowhere",
        "leaves miscounted",
        "pages differ",
        "misnamed",
        "another parent",
        "locked more often",
        "used later",
        "held",
    ],
)
def test_check_sees_a_broken_tree(what: str) -> None:
    cache = RadixCache(1)
    cache.insert([1, 2, 3], [0, 1, 2])
    cache.insert([1, 2, 4, 5], [3, 4, 5, 6])
    cache.check()
    broken(cache, what)
    with pytest.raises(AssertionError, match=what):
        cache.check()
