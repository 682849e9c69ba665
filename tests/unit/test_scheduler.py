"""The scheduler without a model: what lesson 5 does not check, because students do not write it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import POLICIES, make_policy, register_policy
from mini_engine.scheduler.request import Request
from mini_engine.scheduler.scheduler import Scheduler, SchedulerLimits


def make_request(name: int, prompt: int, most: int) -> Request:
    return Request(str(name), [7] * prompt, SamplingParams(max_new_tokens=most), name)


def make_scheduler(pages: int = 100, max_running_requests: int = 8, **limits: Any) -> Scheduler:
    return Scheduler(pages, 4, SchedulerLimits(max_running_requests, **limits), make_policy("fcfs"))


def test_a_waiting_prompt_is_not_copied_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, to look it up in a prefix cache that no policy asked about: 10,000 requests took minutes."""
    scheduler = make_scheduler(400, max_running_requests=16, max_tokens_per_step=512)
    for name in range(600):
        scheduler.add(make_request(name, 40, 5))
    copied = Counter[str]()
    plain = Request.tokens

    def tokens(self: Request, start: int, stop: int) -> list[int]:
        copied[self.request_id] += 1
        return plain(self, start, stop)

    monkeypatch.setattr(Request, "tokens", tokens)
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.update(batch, {c.request.request_id: [7] for c in batch.chunks if c.samples})
        for request in [r for r in scheduler.running if r.num_output_tokens == 5]:
            scheduler.finish(request, "length")
    assert max(copied.values()) <= 4, "a look-up and two offers each"


def test_the_registry_takes_new_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.scheduler.policy.POLICIES", dict(POLICIES))

    class Backwards:
        def order(self, waiting: Sequence[Request], hits: object) -> list[Request]:
            return sorted(waiting, key=lambda request: -request.arrival)

    register_policy("lifo", Backwards)
    assert isinstance(make_policy("lifo"), Backwards)
    with pytest.raises(ValueError, match="'fcfs' exists already"):
        register_policy("fcfs", Backwards)


def test_check_pages_sees_a_page_without_an_owner_and_one_with_two() -> None:
    """It used to ask only that no more pages were in use than were not free, so a leak passed."""
    scheduler = make_scheduler()
    for name in range(2):
        scheduler.add(make_request(name, 4, 4))
    scheduler.schedule()
    scheduler.check_pages()
    one, other = (request.pages for request in scheduler.running)
    page = one[0]
    one[0] = other[0]
    with pytest.raises(AssertionError, match="two owners"):
        scheduler.check_pages()
    one.clear()
    with pytest.raises(AssertionError, match="1 have no owner"):
        scheduler.check_pages()
    one.append(page)
    scheduler.check_pages()
