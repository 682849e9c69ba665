"""The policy of the router beside brute force: every prefix that a worker holds, one by one, with its last use."""

from collections import Counter
from collections.abc import Iterable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_engine.router.policy import NoWorker, PrefixPolicy
from mini_engine.router.tree import TokenTree

TOKENS = st.lists(st.integers(0, 2), max_size=7)


class Prefixes:
    """A set of prefixes, each with the time of its last use. The oracle of ``TokenTree``."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.now = 0
        self.used: dict[tuple[int, ...], int] = {}

    def match(self, tokens: Sequence[int]) -> int:
        return max(n for n in range(len(tokens) + 1) if n == 0 or tuple(tokens[:n]) in self.used)

    def is_end(self, prefix: tuple[int, ...]) -> bool:
        return not any(other[: len(prefix)] == prefix and other != prefix for other in self.used)

    def insert(self, tokens: Sequence[int]) -> None:
        self.now += 1
        self.used |= {tuple(tokens[: n + 1]): self.now for n in range(len(tokens))}
        while len(self.used) > self.most_tokens:
            del self.used[min(filter(self.is_end, self.used), key=self.used.__getitem__)]

    def forget(self, tokens: Sequence[int], length: int) -> None:
        own = tuple(tokens)
        self.used = {p: t for p, t in self.used.items() if p[: len(own)] != own or p == own}
        for n in range(len(own), length, -1):
            if own[:n] in self.used and self.is_end(own[:n]):
                del self.used[own[:n]]


class Routing(RuleBasedStateMachine):
    """Requests, answers, reports, and workers that come and go."""

    @initialize(
        share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        most_ahead=st.integers(0, 3),
        ratio_ahead=st.sampled_from([1.0, 1.5]),
        most_tokens=st.integers(1, 20),
    )
    def start(self, share: float, most_ahead: int, ratio_ahead: float, most_tokens: int) -> None:
        self.share, self.most_ahead, self.ratio_ahead = share, most_ahead, ratio_ahead
        self.policy = PrefixPolicy(share=share, most_ahead=most_ahead, ratio_ahead=ratio_ahead, most_tokens=most_tokens)
        self.most_tokens = most_tokens
        self.held: dict[str, Prefixes] = {}
        self.begun: dict[str, list[list[int]]] = {}
        self.drained: set[str] = set()
        self.add("a")

    def add(self, name: str) -> None:
        self.policy.add(name)
        self.held[name] = Prefixes(self.most_tokens)
        self.begun[name] = []

    @rule(name=st.sampled_from("abc"))
    def come_or_go(self, name: str) -> None:
        if name not in self.held:
            return self.add(name)
        self.policy.remove(name)
        self.drained.discard(name)
        del self.held[name], self.begun[name]
        return None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drain_or_resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        (self.policy.resume if name in self.drained else self.policy.drain)(name)
        self.drained ^= {name}

    def expected(self, tokens: list[int], without: set[str]) -> str | None:
        able = sorted(self.held.keys() - self.drained - without)
        if not able:
            return None
        queues = {name: len(self.begun[name]) for name in able}
        least = min(queues.values())
        matched = {}
        for name in able:
            far = queues[name] > least + self.most_ahead and queues[name] > self.ratio_ahead * least
            length = self.held[name].match(tokens)
            matched[name] = length if length > self.share * len(tokens) and not far else 0
        best = [name for name in able if matched[name] == max(matched.values())]
        return min(best, key=lambda name: (queues[name], len(self.held[name].used), name))

    @rule(tokens=TOKENS, without=st.sets(st.sampled_from("abc"), max_size=2))
    def send(self, tokens: list[int], without: set[str]) -> None:
        expected = self.expected(tokens, without)
        if expected is None:
            with pytest.raises(NoWorker):
                self.policy.choose(tokens, without)
            return
        chosen = self.policy.choose(tokens, without)
        assert chosen == expected == self.policy.choose(tokens, without)
        able = self.held.keys() - self.drained - without
        shortest = min(len(self.begun[name]) for name in able)
        self.policy.begin(chosen, tokens)
        self.held[chosen].insert(tokens)
        self.begun[chosen].append(tokens)
        most = max(shortest + self.most_ahead, self.ratio_ahead * shortest)
        assert len(self.begun[chosen]) - 1 <= most, "a queue that was too far ahead got one more"

    @precondition(lambda self: any(self.begun.values()))
    @rule(data=st.data(), answer=TOKENS)
    def finish(self, data: st.DataObject, answer: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, begun in self.begun.items() if begun)))
        prompt = self.begun[name].pop(data.draw(st.integers(0, len(self.begun[name]) - 1)))
        self.policy.end(name, prompt + answer)
        self.held[name].insert(prompt + answer)

    @rule(data=st.data(), end=st.lists(st.integers(0, 2), max_size=1), name=st.sampled_from("abc"))
    def drop(self, data: st.DataObject, end: list[int], name: str) -> None:
        """Of what is held or only begins like it; the worker's view may differ."""
        held = sorted(self.held[name].used) if name in self.held else []
        tokens = [*(data.draw(st.sampled_from(held)) if held else ()), *end]
        length = data.draw(st.integers(0, len(tokens)))
        self.policy.dropped(name, tokens, length)
        if name in self.held:
            self.held[name].forget(tokens, length)

    @rule(tokens=TOKENS)
    def look(self, tokens: list[int]) -> None:
        for name in "abc":
            expected = self.held[name].match(tokens) if name in self.held else 0
            assert self.policy.matched(name, tokens) == expected

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "policy"):
            return
        self.policy.check()
        for name, held in self.held.items():
            own = self.policy.workers[name]
            assert own.queue == len(self.begun[name])
            assert own.tree.num_tokens == len(held.used) <= self.most_tokens
            assert all(own.tree.match(prefix) == len(prefix) for prefix in held.used)


class TestRouting(Routing.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_match_before_queue_and_queue_before_no_match() -> None:
    policy = PrefixPolicy(share=0.5, most_ahead=1)
    policy.add("a")
    policy.add("b")
    policy.begin("b", [1, 2, 3, 4])
    assert policy.choose([1, 2, 3, 9]) == "b"  # 3 of 4 tokens
    assert policy.choose([1, 2, 8, 9]) == "a"  # half is not more than half
    policy.begin("b", [1, 2, 3, 5])
    assert policy.choose([1, 2, 3, 9]) == "a"  # two ahead
    policy.begin("a", [7])
    assert policy.choose([1, 2, 3, 9]) == "b"
    assert policy.choose([1, 2, 3, 9], without={"b"}) == "a"


def test_both_limits_count_and_only_workers_that_can_take_it() -> None:
    policy = PrefixPolicy(most_ahead=0, ratio_ahead=1.5)
    for name, queue in (("a", 3), ("b", 2), ("c", 0)):
        policy.add(name)
        for _ in range(queue):
            policy.begin(name, [ord(name)])
    policy.drain("c")
    assert policy.choose([ord("a")]) == "a"  # one ahead of b, but not more than 1.5 times as many
    policy.begin("a", [ord("a")])
    assert policy.choose([ord("a")]) == "b"
    policy.resume("c")
    assert policy.choose([ord("b")]) == "c"


def sent(policy: PrefixPolicy, prompts: Iterable[list[int]]) -> Counter[str]:
    """Send prompts that never end; return how many each worker has."""
    for prompt in prompts:
        policy.begin(policy.choose(prompt), prompt)
        policy.check()
    return Counter({name: own.queue for name, own in policy.workers.items()})


@pytest.mark.parametrize("prompt", [[7], [], [1] * 500])
def test_one_prompt_for_all_is_spread(prompt: list[int]) -> None:
    policy = PrefixPolicy(most_ahead=4)
    for name in "abcd":
        policy.add(name)
    queues = sent(policy, [prompt] * 41)
    assert max(queues.values()) - min(queues.values()) <= 5
    policy.add("late")
    queues = sent(policy, [prompt] * 20)
    assert queues["late"] >= 5, "a new worker gets what is too much for the others"
    policy.drain("a")
    assert sent(policy, [prompt] * 20)["a"] == queues["a"]
    policy.remove("b")
    policy.add("b")
    assert sent(policy, [prompt] * 5)["b"] == 5, "a worker that came back is empty, and far behind"


def test_a_flood_of_different_prompts_stays_within_the_bound() -> None:
    policy = PrefixPolicy(most_tokens=100)
    policy.add("a")
    kept = [-1, -2, -3]
    for number in range(20_000):
        prompt = [number, *range(number % 7)]
        policy.begin("a", prompt)
        policy.end("a", prompt)
        if number % 10 == 0:
            policy.begin("a", kept)
            policy.end("a", kept)
    policy.check()
    tree = policy.workers["a"].tree
    assert tree.num_tokens == 100
    assert len(tree.order) <= 100
    assert policy.matched("a", kept) == 3, "what is used again and again stays"
    policy.begin("a", list(range(1000)))
    assert policy.matched("a", list(range(1000))) == 100
    policy.dropped("a", [], 0)
    assert tree.num_tokens == 0


def test_errors_say_what_to_do() -> None:
    policy = PrefixPolicy()
    with pytest.raises(NoWorker, match=r"none of 0 workers .* add a worker"):
        policy.choose([1])
    policy.add("a")
    policy.add("b")
    with pytest.raises(ValueError, match="a worker 'a' already; remove it first"):
        policy.add("a")
    with pytest.raises(ValueError, match="no worker 'c'; there are a, b"):
        policy.begin("c", [1])
    with pytest.raises(ValueError, match="'a' has no request that could end"):
        policy.end("a", [1])
    with pytest.raises(ValueError, match="length is 2; of 1 tokens 0 to 1 can be left"):
        policy.dropped("a", [1], 2)
    with pytest.raises(OverflowError):
        policy.begin("a", [2**40])
    assert policy.workers["a"].queue == 0
    policy.drain("a")
    with pytest.raises(NoWorker, match=r"none of 2 workers .*\(drained: a; left out: b\)"):
        policy.choose([1], without=["b"])
    for wrong in ({"share": 1.1}, {"most_ahead": -1}, {"ratio_ahead": 0.5}, {"most_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PrefixPolicy(**wrong)  # type: ignore[arg-type]


def test_late_reports_of_a_removed_worker_do_not_count() -> None:
    policy = PrefixPolicy()
    policy.add("a")
    policy.begin("a", [1, 2])
    policy.remove("a")
    policy.remove("a")
    policy.end("a", [1, 2, 3])
    policy.dropped("a", [1, 2], 0)
    assert policy.matched("a", [1, 2]) == 0


@pytest.mark.parametrize(
    "what", ["counted", "held", "without tokens", "misnamed", "another parent", "not ordered", "used later"]
)
def test_check_sees_a_broken_tree(what: str) -> None:
    tree = TokenTree(5 if what == "held" else 100)
    tree.insert([1, 2])
    tree.insert([1, 2, 3])
    tree.insert([1, 4])
    edge = tree.root.children[1]
    tree.check()
    match what:
        case "counted":
            tree.num_tokens += 1
        case "held":
            tree.most_tokens = 3
        case "without tokens":
            tree.num_tokens -= 1
            del edge.children[2].tokens[:]
        case "misnamed":
            edge.children[9] = edge.children.pop(2)
        case "another parent":
            edge.children[2].parent = tree.root
        case "not ordered":
            del tree.order[edge]
        case "used later":
            tree.order.move_to_end(edge.children[2])
    with pytest.raises(AssertionError, match=what):
        tree.check()
