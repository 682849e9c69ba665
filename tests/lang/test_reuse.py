"""What a program computes: the tokens of its prefix tree, and never a prefix twice."""

import pytest

from mini_engine import lang
from mini_engine.bench.reuse import least_tokens
from mini_engine.lang import backends
from tests.lang.conftest import make_llm

STORY = "Once upon a time there was a fox named Mila who lived in a small house near the river."


@lang.program
def essay(s, word):
    s += lang.system(STORY) + lang.user(f"Tell me about the {word}.")
    forks = s.fork(3)
    for index, aspect in enumerate(("color", "name", "friend")):
        forks[index] += lang.assistant(f"The {aspect}: " + lang.gen("fact", max_new_tokens=6, stop="."))
    s.join(forks)
    s += lang.assistant(
        "It is" + lang.select("kind", [" big", " very small", " red"]) + lang.gen("why", max_new_tokens=5)
    )


class Recorded(backends.InProcess):
    """Keeps every call."""

    def __init__(self, llm):
        super().__init__(llm)
        self.made = []

    def submit(self, call):
        super().submit(call)
        self.made.append(call)


def known_prefix(call, ended, page_size):
    """The whole pages at the beginning of a call that ended calls have computed, by comparing with each of them.

    The last token that a call writes is never computed. One row at least is computed anew: the one before the first
    token that is scored, or the last.
    """
    last = len(call.ids) - 1 if call.start is None else call.start - 1
    longest = 0
    for other in ended:
        written = [*other.ids, *other.output.token_ids[:-1]] if other.start is None else other.ids
        same = next((i for i, (a, b) in enumerate(zip(call.ids, written, strict=False)) if a != b), None)
        agree = min(len(call.ids), len(written)) if same is None else same
        longest = max(longest, min(agree, last) // page_size * page_size)
    return longest


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_workers", [1, 8])
def test_every_call_starts_from_all_that_was_computed_before(page_size, num_workers):
    llm = make_llm(page_size=page_size, num_pages=16_384 // page_size)
    backend = Recorded(llm)
    states = essay.run_batch(
        [{"word": w} for w in ("fox", "dog", "fox", "owl")], backend=backend, num_workers=num_workers
    )
    assert [s.error for s in states] == [None] * 4
    ended = []
    for call in sorted(backend.made, key=lambda c: c.output.times.started):
        before = [other for other in ended if other.output.times.finished <= call.output.times.started]
        assert call.output.num_cached_tokens >= known_prefix(call, before, page_size)
        ended.append(call)
    if page_size == 1:
        check_bound(backend.made)


def check_bound(calls):
    """Every different prefix is computed once, and every call computes the rows that it needs of its own."""
    written = [[*call.ids, *call.output.token_ids[:-1]] for call in calls]
    prefixes = {tuple(ids[:end]) for ids in written for end in range(1, len(ids) + 1)}
    own = sum(1 if call.start is None else len(call.ids) - call.start + 1 for call in calls)
    computed = sum(len(ids) - call.output.num_cached_tokens for ids, call in zip(written, calls, strict=True))
    assert len(prefixes) <= computed <= len(prefixes) + own


def test_ids_and_scores_do_not_depend_on_workers_or_on_the_cache():
    words = [{"word": w} for w in ("fox", "dog", "fox", "owl", "cat", "bear")]

    def results(llm, num_workers):
        states = essay.run_batch(words, backend=llm, num_workers=num_workers)
        return [(s.ids, s["fact"], s.answer("kind").scores, s.answer("kind").logprobs) for s in states]

    llm = make_llm()
    cold = results(llm, 64)
    assert results(llm, 1) == cold  # warm
    assert results(make_llm(), 1) == cold
    assert results(make_llm(prefix_cache=None, wait_for_prefix=None, wait_below_match=32), 64) == cold


@lang.program
def question(s, text, word):
    s += text + f" What about the {word}?" + lang.gen(max_new_tokens=2)


def test_an_order_that_follows_the_tree_computes_each_text_once_and_first_come_does_not():
    texts = [f"{name} {STORY} {STORY}" for name in ("Ben", "Anna", "Leo", "Ida")]
    inputs = [{"text": text, "word": word} for word in ("fox", "dog", "owl", "cat") for text in texts]
    computed = {}
    for order in ("lpm", "fcfs"):
        llm = make_llm(policy=order, page_size=4, num_pages=40, max_running_requests=1)
        backend = Recorded(llm)
        question.run_batch(inputs, backend=backend)
        computed[order] = backend.stats["prompt_tokens"] - backend.stats["cached_tokens"]
    prompts = [call.ids for call in backend.made]
    assert computed["lpm"] == least_tokens(prompts, 4)
    assert computed["fcfs"] > 2 * computed["lpm"]
