"""Simulated workers beside sums on paper, and the rules beside each other on loads that share beginnings."""

import random
from collections import Counter
from collections.abc import Collection, Sequence

import pytest

from mini_engine.bench.replicas import LOADS, as_one, simulate
from mini_engine.router.policy import PrefixPolicy
from mini_engine.router.rules import ConsistentHashing, QueueFirst, Random, RoundRobin, TwoChoices, Untold
from mini_engine.router.simulation import Costs, Limits, Session, Simulation, Turn
from mini_engine.router.tree import below

COSTS = Costs(step=1.0, token=0.01, row=0.1)
QUICK = Costs(step=6e-4, token=5e-5, row=3e-4)


def alone(arrival_s: float, prompt: list[int], answer: Sequence[int]) -> Session:
    return Session(arrival_s, [Turn(prompt, list(answer))])


def test_a_request_alone_takes_what_its_steps_cost() -> None:
    load = [alone(0.0, list(range(1000)), [-1, -2, -3]), alone(100.0, list(range(900)), [-1])]
    out = Simulation(RoundRobin(), 1, COSTS, Limits(pool=5000, running=2, step=512)).run(load)
    first = 2 * 1.1 + 1000 * 0.01  # 512 tokens, then 488 and a row
    second = 1.1 + 0.01  # one token must be computed
    assert out.ttft == pytest.approx([first, second])
    assert (out.num_tokens, out.num_hit) == (1900, 899)
    assert out.busy == pytest.approx((first + 2 * 1.1 + second) / (100 + second))


def test_requests_share_steps_as_far_as_there_is_room() -> None:
    load = [alone(0.0, [n] * 10, range(3)) for n in range(3)]
    out = Simulation(RoundRobin(), 1, COSTS, Limits(pool=5000, running=2, step=512)).run(load)
    # A step of the first alone, which came first; the second joins it; the third waits until the first has ended.
    one = 1 + 0.1 + 0.1
    two = 1 + 0.1 + 0.2
    assert out.ttft == pytest.approx([one, one + two, one + two + 1.2 + two])
    assert out.longest_queue == 3
    narrow = Simulation(RoundRobin(), 1, COSTS, Limits(pool=20, running=2, step=512)).run(load)
    assert narrow.ttft[1] == pytest.approx(one + 2 * 1.1 + one), "two do not fit into the pool"


def test_prompts_share_the_tokens_of_a_step_and_what_they_compute() -> None:
    limits = Limits(pool=5000, running=8, step=100)
    load = [alone(0.0, [0], range(1)), alone(0.1, [1] * 60, range(5)), alone(0.2, [2] * 60, range(1))]
    load += [alone(2.8, [1] * 60, range(1))]  # in the step that computes the second one
    out = Simulation(RoundRobin(), 1, COSTS, limits).run(load)
    first = 1.1 + 0.01
    full = first + 1.2 + 1.0  # 60 tokens and 40
    rest = (
        full + 1.3 + 0.2 + 0.01
    )  # the second one decodes beside the rest of the third and the last token of the fourth
    assert out.ttft == pytest.approx([first, full - 0.1, rest - 0.2, rest - 2.8])
    assert out.num_hit == 59


def test_what_is_found_again_stays() -> None:
    often = [1] * 40
    others = [[n] * 40 for n in (2, 3)]
    load = [alone(100.0 * n, prompt, [0]) for n, prompt in enumerate([often, *others, often, [4] * 40, often])]
    out = Simulation(RoundRobin(), 1, COSTS, Limits(pool=130)).run(load)
    assert out.num_hit == 2 * 39


def test_what_is_found_is_the_longest_beginning_that_was_computed() -> None:
    source = random.Random(0)
    load = [alone(1000.0 * n, source.choices(range(2), k=source.randint(1, 12)), [n % 2]) for n in range(60)]
    out = Simulation(RoundRobin(), 1, COSTS, Limits(pool=10**6)).run(load)
    before: list[list[int]] = []
    expected = 0
    for session in load:
        turn = session.turns[0]
        shared = [n for own in before for n in range(len(turn.own)) if own[:n] == turn.own[:n]]
        expected += max(shared, default=0)
        before.append(turn.own + turn.answer)
    assert out.num_hit == expected > 100


class Watched(PrefixPolicy):
    """Checks itself at every choice, and that no queue that is too far ahead grows."""

    def choose(self, tokens: Sequence[int], without: Collection[str] = ()) -> str:
        name = super().choose(tokens, without)
        self.check()
        queues = [own.queue for own in self.workers.values()]
        assert self.workers[name].queue <= max(min(queues) + self.most_ahead, self.ratio_ahead * min(queues))
        return name


@pytest.mark.parametrize("load", LOADS)
def test_the_policy_finds_more_than_rules_that_do_not_look(load: str) -> None:
    sessions = LOADS[load](6, 60, QUICK, 1)
    policy = Watched(most_ahead=4)
    simulation = Simulation(policy, 6, QUICK, Limits())
    out = simulation.run(sessions)
    assert out.hit_rate > 1.3 * Simulation(RoundRobin(), 6, QUICK, Limits()).run(sessions).hit_rate
    assert out.longest_queue <= 12
    assert simulate(load, "prefix", 6, 60, QUICK, 1) == simulate(load, "prefix", 6, 60, QUICK, 1)
    assert simulate(load, "prefix", 2, 120, QUICK, 1).hit_rate >= 0.95 * as_one(load, 2, 120, QUICK, 1)


def test_variants_of_the_policy_do_what_their_names_say() -> None:
    first, untold = QueueFirst(most_ahead=1), Untold()
    for policy in (first, untold):
        for name in "abc":
            policy.add(name)
        policy.begin("b", [1, 2])
        policy.dropped("b", [1, 2], 0)
    assert (first.matched("b", [1, 2]), untold.matched("b", [1, 2])) == (0, 2)
    first.begin("b", [1, 2])
    first.begin("a", [3, 4])
    assert first.choose([3, 4]) == "c", "b is two ahead of c"
    first.end("b", [1, 2])
    assert first.choose([3, 4]) == "a"


@pytest.mark.parametrize("load", LOADS)
def test_the_policy_believes_what_the_workers_hold(load: str) -> None:
    """They report what they drop; at the end nothing is under way."""
    policy = PrefixPolicy(most_tokens=10**9)
    simulation = Simulation(policy, 3, QUICK, Limits(pool=3000))
    simulation.run(LOADS[load](3, 60, QUICK, 0))
    for name, worker in simulation.workers.items():
        believed = policy.workers[name]
        assert believed.queue == worker.queue == 0
        assert believed.tree.num_tokens == worker.cache.num_tokens == 3000
        for edge in below(worker.cache.root):
            way = [edge]
            while way[-1].parent is not None:
                way.append(way[-1].parent)
            tokens = [token for one in reversed(way) for token in one.tokens]
            assert policy.matched(name, tokens) == len(tokens)


def test_the_other_rules_do_what_their_names_say() -> None:
    turns, drawn, pairs = RoundRobin(), Random(1), TwoChoices(1)
    for rule in (turns, drawn, pairs):
        for name in "abc":
            rule.add(name)
    assert [turns.choose([]) for _ in range(5)] == list("abcab")
    assert set(Counter(drawn.choose([]) for _ in range(100))) == set("abc")
    pairs.begin("a", [])
    assert Counter(pairs.choose([]) for _ in range(100))["a"] == 0
    pairs.end("a", [])
    assert {pairs.choose([]) for _ in range(50)} == set("abc")


def test_a_worker_takes_only_its_own_keys_from_the_others() -> None:
    ring = ConsistentHashing()
    for name in "abde":
        ring.add(name)
    prompts = [[n, n + 1] for n in range(500)]
    before = [ring.choose(prompt) for prompt in prompts]
    ring.add("c")
    after = [ring.choose(prompt) for prompt in prompts]
    assert min(Counter(after).values()) > 40
    assert all(new in (old, "c") for new, old in zip(after, before, strict=True))
    long = [9] * 160
    assert ring.choose([*long, 1]) == ring.choose([*long, 2])
