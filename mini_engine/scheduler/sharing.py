"""L6: a request and the prefix cache: what it starts from, what it leaves there, and when waiting for more pays."""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_engine.attention.allocator import pages_needed
from mini_engine.scheduler.prefix_cache import PrefixCache, PrefixHit
from mini_engine.scheduler.request import Request, RequestState


@dataclass(frozen=True)
class SharingLimits:
    """When a request waits for what another one is just computing.

    It does while the other computes at least ``wait_for_prefix`` more of its tokens than it has found in the prefix
    cache, and only if those are at most ``wait_below_match``. ``None`` is never. SGLang's thresholds are 32 and 32.
    """

    wait_for_prefix: int | None = None
    wait_below_match: int = 32


def match_prefix(request: Request, cache: PrefixCache) -> PrefixHit:
    """Look a request up; its newest token stays out, because the step needs at least one row to sample from.

    A request that reports its prompt's log-probabilities needs the row before every token that it reports, so only what
    comes before the first of these rows is looked up. From token 0 or 1 on, that is nothing.
    """
    if request.options.prompt_logprobs_start > 1:
        end = min(request.options.prompt_logprobs_start, request.num_tokens) - 1
        return cache.match(request.tokens(0, end), request.options.cache_key)
    if request.params.prompt_logprobs is not None:
        return PrefixHit()
    return cache.match(request.tokens(0, request.num_tokens - 1), request.options.cache_key)


def share_pages(request: Request, cache: PrefixCache, page_size: int) -> list[int]:
    """Offer ``cache`` the whole computed pages, go on with those that it has, and return what to free. Mutates.

    pages   | of the hit: the cache's | own and whole: the cache's now, or a duplicate to free | own, in part |
    done    | stay locked             | locked from now on                                     | stays own    |

    Computed means written: the newest token has no keys and values yet and is never among them.
    """
    whole = request.num_computed_tokens // page_size
    before = len(request.hit.pages)
    tokens = request.tokens(0, whole * page_size)
    hit = cache.insert(tokens, request.pages[:whole], request.options.cache_key, request.options.cache_priority)
    if len(hit.pages) <= before:
        return []
    replaced = zip(request.pages[before:], hit.pages[before:], strict=False)
    duplicates = [own for own, cached in replaced if own != cached]
    cache.lock(hit)
    cache.unlock(request.hit)
    request.pages[: len(hit.pages)] = hit.pages
    request.hit = hit
    return duplicates


def could_share_soon(
    request: Request, hit: PrefixHit, running: Sequence[Request], page_size: int, limits: SharingLimits
) -> bool:
    """Whether one of ``running`` is just computing what ``request``, which has found ``hit``, would have to compute.

    A sibling's prompt is the same, and one that has all of it is copied from at once. Others' prompts are compared if a
    prefix cache will pass on what they share.
    """
    siblings = [sibling for sibling in request.siblings if sibling.state is RequestState.RUNNING]
    if siblings:
        return all(sibling.is_computing_prompt for sibling in siblings)
    least = limits.wait_for_prefix
    matched = len(hit.pages) * page_size
    if least is None or matched > limits.wait_below_match or request.params.prompt_logprobs is not None:
        return False
    # Only whole pages are passed on, and never the newest token: without them the wait would be for nothing.
    end = pages_needed(matched + least, page_size) * page_size
    shared = request.prompt_ids[:end]
    return len(shared) == end < request.num_tokens and any(
        other.is_computing_prompt
        and other.options.cache_key == request.options.cache_key
        and other.prompt_ids[:end] == shared
        for other in running
    )
