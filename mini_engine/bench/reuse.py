"""How much of a load is shared prefixes: the least that must be computed, and what a scheduler computes.

    prompt    | whole pages that a cache may give, k = (n - 1) // page_size | tail: 1 … page_size tokens |
    computed  | by the first request that needs them                        | by every request           |

Every request computes its tail, because a step needs a row to sample from. If no prompt is a prefix of another and
prompts part between pages, the least is the sum of the edges of their radix tree: each edge once (theorem of Zheng et
al., 2024). If several prompts are equal and end with a page, each of them computes that last page.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, takewhile

from mini_engine.attention.allocator import pages_needed
from mini_engine.radix_cache import RadixCache
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import make_policy
from mini_engine.scheduler.request import Request
from mini_engine.scheduler.scheduler import Scheduler, SchedulerLimits
from mini_engine.scheduler.sharing import SharingLimits

Prompt = Sequence[int]
Chunk = tuple[str, int, int]  # request id, first position, number of tokens: as in ``StepOutput.chunks``
NEVER = 10**9


def edge_tokens(prompts: Iterable[Prompt]) -> int:
    """Return the sum of the edges of the radix tree of ``prompts``, in tokens: the number of different prefixes.

    In sorted order, a prompt adds the tokens that it does not share with the one before.
    """
    ordered = sorted(map(tuple, prompts))
    shared = sum(shared_tokens(one, other) for one, other in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def shared_tokens(one: Prompt, other: Prompt) -> int:
    """Return the length of the common prefix of two prompts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def least_tokens(prompts: Sequence[Prompt], page_size: int) -> int:
    """Return how many prompt tokens every order must compute if whole pages are cached.

    Every different page is computed once, and every request computes the tokens after its whole pages. Every request
    needs a row, so a last whole page is computed by every prompt that ends with it.
    """
    whole = [tuple(prompt[: len(prompt) // page_size * page_size]) for prompt in prompts]
    rests = sum(len(prompt) % page_size for prompt in prompts)
    ended = Counter(pages for pages, prompt in zip(whole, prompts, strict=True) if len(pages) == len(prompt))
    again = sum(times - 1 for times in ended.values())
    pages = [[p[i : i + page_size] for i in range(0, len(p), page_size)] for p in whole]
    numbers: dict[tuple[int, ...], int] = {}  # a page's tokens -> a number, so that pages can be sorted like tokens
    numbered = [[numbers.setdefault(page, len(numbers)) for page in own] for own in pages]
    return (edge_tokens(numbered) + again) * page_size + rests


def computed_tokens(chunks: Iterable[Chunk], prompt_lengths: dict[str, int]) -> int:
    """Return how many prompt tokens ``chunks`` computed, repeated ones included and answers not."""
    return sum(max(min(start + size, prompt_lengths[name]) - start, 0) for name, start, size in chunks)


@dataclass(frozen=True)
class Reuse:
    """One run of a load. ``chunks``: what was computed, in order; the id of request i is ``str(i)``."""

    policy: str
    running: int
    num_pages: int
    num_tokens: int
    num_least: int
    num_computed: int
    num_evicted: int = 0
    chunks: list[Chunk] = field(default_factory=list, repr=False)

    @property
    def order(self) -> list[int]:
        """The indices of the prompts in the order of their first admission."""
        return [int(name) for name in dict.fromkeys(chunk[0] for chunk in self.chunks)]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return 1 - self.num_computed / self.num_tokens

    @property
    def best_hit_rate(self) -> float:
        """The highest hit rate that any order can reach."""
        return 1 - self.num_least / self.num_tokens

    @property
    def gap(self) -> float:
        """How much more than the least was computed, as a share of the least."""
        return self.num_computed / self.num_least - 1


def run_load(
    prompts: Sequence[Prompt],
    page_size: int = 1,
    policy: str = "lpm",
    *,
    running: int = 1,
    num_pages: int | None = None,
    eviction: str = "lru",
    new_tokens: int = 1,
    tokens_per_step: int | None = None,
    wait_for_prefix: int | None = None,
) -> Reuse:
    """Serve ``prompts``, which all arrive at once, with the scheduler and the radix cache but without a model.

    ``num_pages``: ``None`` is a pool as large as the longest request, enough for the bound with one request at a time.
    Generated tokens occur in no prompt. No request gains priority by waiting, so that only the policy sets the order.
    """
    pages = num_pages or max(pages_needed(len(prompt) + new_tokens - 1, page_size) for prompt in prompts)
    sharing = SharingLimits(wait_for_prefix, wait_below_match=NEVER)
    limits = SchedulerLimits(running, tokens_per_step, False, max_steps_waited=NEVER, sharing=sharing)
    cache = RadixCache(page_size, eviction)
    scheduler = Scheduler(pages, page_size, limits, make_policy(policy), cache)
    for arrival, prompt in enumerate(prompts):
        scheduler.add(Request(str(arrival), list(prompt), SamplingParams(max_new_tokens=new_tokens), arrival))
    chunks = run_steps(scheduler)
    lengths = {str(index): len(prompt) for index, prompt in enumerate(prompts)}
    least = least_tokens(prompts, page_size)
    computed = computed_tokens(chunks, lengths)
    evicted = cache.stats.num_pages_evicted
    return Reuse(policy, running, pages, sum(lengths.values()), least, computed, evicted, chunks)


def run_steps(scheduler: Scheduler) -> list[Chunk]:
    """Step until the work is done, and return what was computed. Mutates."""
    fresh = count(-1, -1)
    chunks = list[Chunk]()
    while scheduler.has_work:
        batch = scheduler.schedule()
        chunks += [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in batch.chunks]
        scheduler.update(batch, {chunk.request.request_id: [next(fresh)] for chunk in batch.chunks if chunk.samples})
        for request in [r for r in scheduler.running if r.num_output_tokens == r.params.max_new_tokens]:
            scheduler.finish(request, "length")
    return chunks


def tree_load(source: random.Random, page_size: int, leaves: int, depth: int = 3, stretch: int = 4) -> list[list[int]]:
    """Draw a tree of shared beginnings and return its ``leaves`` prompts, shuffled; each has an end of its own.

    Prompts part between pages. An edge has 1 to ``stretch`` pages, an end 1 to as many tokens as a page and a half.
    """
    fresh = count()
    stems: list[list[int]] = [[]]
    prompts = []
    for _ in range(leaves):
        stem = source.choice(stems)
        if len(stem) < depth * stretch * page_size:
            stem = [*stem, *(next(fresh) for _ in range(source.randint(1, stretch) * page_size))]
            stems.append(stem)
        prompts.append([*stem, *(next(fresh) for _ in range(source.randint(1, page_size + page_size // 2)))])
    source.shuffle(prompts)
    return prompts


def gap_table(rows: Iterable[Reuse]) -> str:
    """Return the runs of a load as a table that shows how far each is from the bound."""
    head = f"{'policy':<12}{'running':>8}{'pages':>7}{'computed':>10}{'least':>8}{'hit rate':>10}{'bound':>8}{'gap':>8}"
    lines = [
        f"{r.policy:<12}{r.running:>8}{r.num_pages:>7}{r.num_computed:>10}{r.num_least:>8}{r.hit_rate:>10.1%}"
        f"{r.best_hit_rate:>8.1%}{r.gap:>8.1%}"
        for r in rows
    ]
    return "\n".join([head, *lines])
