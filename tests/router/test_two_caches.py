"""Two schedulers with radix caches behind the policy find nearly what one finds that has the pages of both."""

from collections.abc import Mapping

import pytest

from mini_engine.bench.replicas import LOADS
from mini_engine.radix_cache import RadixCache
from mini_engine.router.policy import PrefixPolicy
from mini_engine.router.rules import RoundRobin, Rule
from mini_engine.router.simulation import Costs
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import make_policy
from mini_engine.scheduler.request import Request
from mini_engine.scheduler.scheduler import Scheduler, SchedulerLimits

TOGETHER = 13  # sessions whose turns come at once; odd, so that taking turns moves each of them every time
COSTS = Costs(step=6e-4, token=5e-5, row=3e-4)  # only arrivals depend on them


def run(scheduler: Scheduler, answers: Mapping[str, list[int]]) -> None:
    """Step until the work is done; a request gets its answer instead of what a model would say."""
    while scheduler.has_work:
        batch = scheduler.schedule()
        sampling = [chunk.request for chunk in batch.chunks if chunk.samples]
        scheduler.update(batch, {r.request_id: [answers[r.request_id][r.num_output_tokens]] for r in sampling})
        for request in [r for r in scheduler.running if r.num_output_tokens == r.params.max_new_tokens]:
            scheduler.finish(request, "length")


def found(load: str, rule: Rule, count: int, pages: int) -> float:
    """Return the hit rate of ``count`` schedulers with ``pages`` pages of 16 tokens each."""
    caches = {name: RadixCache(16) for name in "ab"[:count]}
    limits = SchedulerLimits(8, 512, False)
    schedulers = {name: Scheduler(pages, 16, limits, make_policy("fcfs"), cache) for name, cache in caches.items()}
    for name in caches:
        rule.add(name)
    sessions = LOADS[load](2, 120, COSTS, 0)
    for first in range(0, len(sessions), TOGETHER):
        some = sessions[first : first + TOGETHER]
        prompts = [list[int]() for _ in some]
        for turns in zip(*(session.turns for session in some), strict=True):
            sent = []
            for number, turn in enumerate(turns):
                prompts[number] += turn.own
                sent.append(rule.choose(prompts[number]))
                rule.begin(sent[-1], prompts[number])
                params = SamplingParams(max_new_tokens=len(turn.answer))
                schedulers[sent[-1]].add(Request(str(number), list(prompts[number]), params, number))
            for scheduler in schedulers.values():
                run(scheduler, {str(number): turn.answer for number, turn in enumerate(turns)})
            for number, (name, turn) in enumerate(zip(sent, turns, strict=True)):
                prompts[number] += turn.answer
                rule.end(name, prompts[number])
    stats = [cache.stats for cache in caches.values()]
    return sum(own.num_tokens_hit for own in stats) / sum(own.num_tokens for own in stats)


@pytest.mark.parametrize(("load", "pages"), [("chat", 400), ("few-shot", 900)])
def test_two_caches_find_nearly_what_one_with_both_pools_finds(load: str, pages: int) -> None:
    one = found(load, RoundRobin(), 1, 2 * pages)
    two = found(load, PrefixPolicy(), 2, pages)
    blind = found(load, RoundRobin(), 2, pages)
    assert two >= 0.95 * one
    assert blind < 0.9 * one
