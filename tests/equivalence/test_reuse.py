"""The theorem of RadixAttention, exactly, on the real scheduler and cache; how far everything else is from it.

Theorem (Zheng et al. 2024, restated for an engine that caches whole pages and needs a row for every request). All
requests are there at once, they run one at a time, the pool holds the longest one. Then longest-match-first computes,
whatever the eviction order,

* exactly the edges of the radix tree, if no prompt is the beginning of another and prompts part between pages;
* always exactly what the same order computes with a pool without end: nothing is evicted that is missed later. A page
  is computed twice only as the last page of a request that it ends, which nobody spares that request.

Why, by induction: all that waiting requests find lies on the path of the request before. Let z be the longest match.
What the others find is a beginning of what z finds, and that is locked; so whatever can be evicted is of use to nobody,
and all that the others find lies on the path of z.
"""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import pytest

from mini_engine.bench.reuse import (
    Reuse,
    computed_tokens,
    edge_tokens,
    least_tokens,
    run_load,
    shared_tokens,
    tree_load,
)
from mini_engine.radix_cache import EVICTIONS

PAGE_SIZES = [1, 2, 4, 16]
Prompts = list[list[int]]


def any_load(dice: random.Random, page_size: int) -> Prompts:
    """Duplicates, prompts that begin others, prompts that part in the middle of a page."""
    stems = [[dice.randrange(3) for _ in range(dice.randint(1, 6 * page_size))] for _ in range(3)]
    prompts = []
    for _ in range(dice.randint(1, 25)):
        own = [dice.randrange(2) for _ in range(dice.randrange(2 * page_size))]
        prompts.append(dice.choice(stems)[: dice.randint(0, 6 * page_size)] + own or [1])
    return prompts


def endless(prompts: Sequence[Sequence[int]], order: Sequence[int], page_size: int) -> int:
    """Brute force: what an order computes if every page is kept for ever."""
    kept: set[tuple[int, ...]] = set()
    computed = 0
    for index in order:
        tokens = tuple(prompts[index])
        found = 0
        while found < (len(tokens) - 1) // page_size and tokens[: (found + 1) * page_size] in kept:
            found += 1
        computed += len(tokens) - found * page_size
        kept |= {tokens[: (i + 1) * page_size] for i in range(len(tokens) // page_size)}
    return computed


# ---- the bound ----


def test_the_edges_are_the_different_beginnings() -> None:
    for seed in range(200):
        prompts = any_load(random.Random(seed), 3)
        trie = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))}
        assert edge_tokens(prompts) == len(trie)
    assert edge_tokens([]) == 0
    assert shared_tokens([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_the_least_is_what_the_best_of_all_orders_computes(page_size: int) -> None:
    """All orders of up to five prompts, with nothing ever forgotten: none is below, and one is there."""
    for seed in range(60):
        prompts = any_load(random.Random(seed), page_size)[:5]
        costs = [endless(prompts, order, page_size) for order in permutations(range(len(prompts)))]
        assert least_tokens(prompts, page_size) == min(costs)


def test_computed_tokens_are_those_of_prompts_and_count_twice_when_computed_twice() -> None:
    chunks = [("a", 0, 4), ("b", 0, 3), ("a", 4, 3), ("a", 7, 1), ("a", 0, 9)]
    assert computed_tokens(chunks, {"a": 6, "b": 3}) == 4 + 3 + 2 + 0 + 6


# ---- the theorem ----


def check_tree_load(seed: int, policy: str) -> Reuse:
    dice = random.Random(seed)
    page_size = dice.choice(PAGE_SIZES)
    prompts = tree_load(dice, page_size, dice.randint(1, 40))
    reuse = run_load(
        prompts,
        page_size,
        policy,
        eviction=dice.choice(list(EVICTIONS)),
        new_tokens=dice.choice([1, 1, 5]),
        tokens_per_step=dice.choice([None, 3]),
    )
    edges = edge_tokens(prompts)
    total = sum(map(len, prompts))
    assert reuse.num_computed == edges
    assert reuse.hit_rate == reuse.best_hit_rate == 1 - edges / total
    return reuse


def check_any_load(seed: int, policy: str) -> tuple[Reuse, int]:
    dice = random.Random(seed)
    page_size = dice.choice(PAGE_SIZES)
    prompts = any_load(dice, page_size)
    reuse = run_load(prompts, page_size, policy, eviction=dice.choice(list(EVICTIONS)), new_tokens=dice.choice([1, 5]))
    computed = endless(prompts, reuse.order, page_size)
    assert reuse.num_computed == computed
    # Beyond the least: a page that ends a prompt and was computed for a longer one before.
    longer_first = {
        tuple(prompts[i])
        for place, i in enumerate(reuse.order)
        if len(prompts[i]) % page_size == 0
        and any(len(prompts[j]) > len(prompts[i]) == shared_tokens(prompts[i], prompts[j]) for j in reuse.order[:place])
        and not any(prompts[j] == prompts[i] for j in reuse.order[:place])
    }
    assert computed == least_tokens(prompts, page_size) + page_size * len(longer_first)
    return reuse, len(longer_first)


def test_theorem_each_edge_is_computed_exactly_once_on_random_loads() -> None:
    runs = [check_tree_load(seed, "lpm") for seed in range(150)]
    assert sum(run.num_evicted > 0 for run in runs) > 135, "the pool was meant to be too small for all"


def test_theorem_with_duplicates_and_prompts_that_begin_others_nothing_is_missed() -> None:
    runs = [check_any_load(seed, "lpm") for seed in range(200)]
    assert sum(run.num_evicted > 0 for run, _ in runs) > 100
    assert 10 < sum(twice > 0 for _, twice in runs) < 190, "both kinds of loads were meant to be drawn"


def test_one_page_less_than_the_longest_request_is_refused() -> None:
    with pytest.raises(ValueError, match="request 0 may need 3 pages"):
        run_load([[1, 2, 3], [1]], num_pages=2)


@pytest.mark.slow
def test_theorem_depth_first_by_weight() -> None:
    for seed in range(60):
        check_tree_load(seed, "dfs-weight")
        check_any_load(seed, "dfs-weight")


# ---- everything else ----


def alternating(branches: int, each: int, stem: int = 8) -> Prompts:
    """By turns from each branch: the worst order of arrival for a cache that holds one request."""
    return [[branch] * stem + [100 + leaf, branch] for leaf in range(each) for branch in range(branches)]


def test_first_come_first_served_computes_everything_on_an_alternating_load() -> None:
    """Two branches of 8 shared tokens, 10 prompts each: 200 tokens, of which the tree has 2 * 8 + 20 * 2."""
    prompts = alternating(2, 10)
    assert edge_tokens(prompts) == 56
    assert run_load(prompts, policy="lpm").num_computed == 56
    assert run_load(prompts, policy="fcfs").num_computed == 200
    assert run_load(prompts, policy="random").num_computed > 80
    assert run_load(prompts, policy="fcfs", num_pages=56).num_computed == 56, "with room for the tree any order will do"


# ---- side by side ----


def test_the_gap_of_continuous_batching_and_what_waiting_saves_of_it() -> None:
    """Requests that start together share nothing that is not computed yet, unless they wait for it."""
    total: Counter[str] = Counter()
    for seed in range(20):
        prompts = tree_load(random.Random(seed), 4, 24)
        pages = 8 * max(-(-len(prompt) // 4) for prompt in prompts)
        for name, options in {
            "alone": {"running": 1},
            "together": {"running": 8},
            "waiting": {"running": 8, "wait_for_prefix": 4},
            "chunks": {"running": 8, "wait_for_prefix": 4, "tokens_per_step": 7},
        }.items():
            reuse = run_load(prompts, 4, num_pages=pages, new_tokens=3, **options)
            assert reuse.num_computed >= reuse.num_least
            total[name] += reuse.num_computed - reuse.num_least
    assert total["alone"] == 0
    assert total["together"] > 300
    assert total["waiting"] == total["chunks"] == 0
