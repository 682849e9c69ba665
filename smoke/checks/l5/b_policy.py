"""The checks of L5.B: who goes first.

Owns: probes that hand waiting requests to a policy and what must come back. Hits are made up: there is no prefix cache.
"""

import random
from collections import Counter, UserDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from smoke.checks.l5 import spec_scheduling as scheduling
from smoke.checks.l5.a_request import build_request, draw_people
from smoke.checks.l5.spec_scheduling import Person
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
DRAWS = 8
LOOKED_UP = "requests that are looked up"


def queue(name: str, seed: int, count: int = 30) -> list[Person]:
    """Draw a queue with many ties; who came first does not stand in front, for preempted requests stand at the end."""
    rng = random.Random(f"queue {name} {seed}")
    people = draw_people(f"{name} {seed}", seed, count)
    for person in people:
        person.state = "waiting"
        person.most = rng.choice([8, 8, 20, 21, 40])
        person.computed = 0
        person.prompt = rng.choice([3, 3, 19, 20, 36, 50])
        person.outputs = rng.choice([0, 0, 0, 3])
        person.matched = rng.choice([0, 0, 1, 2, 5])
    rng.shuffle(people)
    return people


def hits_of(people: Sequence[Person]) -> Mapping[str, Any]:
    """Build what each request found in a prefix cache: pages of numbers that say nothing."""
    from mini_engine.scheduler.prefix_cache import PrefixHit

    rng = random.Random(len(people))
    return {p.name: PrefixHit(tuple(rng.sample(range(1000), p.matched)), p.path) for p in people}


class Looks(Mapping[str, Any]):
    """Hits as L6's cache finds them: a look-up splits the node that its path ends in, on the paths of others, too."""

    def __init__(self, people: Sequence[Person]) -> None:
        self.paths = {person.name: person.path for person in people}
        self.ends = set[tuple[int, ...]]()

    def __getitem__(self, name: str) -> Any:
        from mini_engine.scheduler.prefix_cache import PrefixHit

        self.ends.add(self.paths[name])
        return PrefixHit((), cut_path(self.paths[name], self.ends))

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


class Asked(UserDict[str, Any]):
    """Hits that note which requests are looked up."""

    def __init__(self, hits: Mapping[str, Any]) -> None:
        super().__init__(hits)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def cut_path(path: tuple[int, ...], ends: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the nodes of a path if nodes end only in ``ends``."""
    return tuple(node for depth, node in enumerate(path, start=1) if path[:depth] in ends)


def ordered(policy: Any, people: Sequence[Person], hits: Mapping[str, Any] | None = None) -> list[str]:
    """Order a queue; what comes back after a bar is a queue that the policy has changed."""
    requests = [build_request(person) for person in people]
    before = list(requests)
    order = [request.request_id for request in policy.order(requests, hits_of(people) if hits is None else hits)]
    return order if requests == before else [*order, "| the queue was changed"]


def orders_probe(seed: int) -> Values:
    """Order a few queues by each policy that has a sorting rule."""
    from mini_engine.scheduler.policy import make_policy

    values: Values = {}
    for name in ("fcfs", "lof", "shortest"):
        for draw in range(DRAWS):
            values[f"{name}, queue {draw}"] = ordered(make_policy(name), queue(f"{name} {draw}", seed))
        values[f"{name}, no request waits"] = ordered(make_policy(name), [])
    return values


def orders_spec(seed: int) -> Values:
    """Take the best of what is left, again and again."""
    values: Values = {}
    for name in ("fcfs", "lof", "shortest"):
        for draw in range(DRAWS):
            order = scheduling.in_order(name, queue(f"{name} {draw}", seed))
            values[f"{name}, queue {draw}"] = [person.name for person in order]
        values[f"{name}, no request waits"] = []
    return values


def aging_people() -> list[Person]:
    """Return a long prompt that has waited, and short ones that just came: 16 tokens are worth a step."""
    old = Person("r0", 100, arrival=0, waited=5)
    return [
        old,
        Person("r1", 21, arrival=1),  # 100 - 80 is one less
        Person("r2", 20, arrival=2),  # the same, and later
        Person("r3", 19, arrival=3),
        Person("r4", 3, arrival=4, outputs=40, waited=1),  # preempted: its output is computed again too
    ]


def aging_probe(seed: int) -> Values:
    """Order them in two arrangements."""
    from mini_engine.scheduler.policy import make_policy

    people = aging_people()
    return {
        "as they came": ordered(make_policy("shortest"), people),
        "the other way round": ordered(make_policy("shortest"), people[::-1]),
    }


def aging_spec(seed: int) -> Values:
    """Tell what 100 - 5 · 16 = 20 and 43 - 16 = 27 mean."""
    order = ["r3", "r0", "r2", "r1", "r4"]
    return {"as they came": order, "the other way round": order}


def match_people(seed: int) -> dict[str, list[Person]]:
    """Return queues of all lengths around the limit."""
    return {f"{count} wait": queue(f"match {count}", seed, count) for count in (0, 1, 5, 30, 127, 128, 129, 200)}


def match_probe(seed: int) -> Values:
    """Order by the longest match, and count how many requests are looked up."""
    from mini_engine.scheduler.policy import make_policy

    values: Values = {}
    for name, people in match_people(seed).items():
        hits = Asked(hits_of(people))
        values[name] = ordered(make_policy("lpm"), people, hits)
        values[f"{name}, {LOOKED_UP}"] = len(hits.names)
    return values


def match_spec(seed: int) -> Values:
    """Order by the most pages, then by arrival; by arrival alone in a long queue."""
    values: Values = {}
    for name, people in match_people(seed).items():
        values[name] = [person.name for person in scheduling.in_order("lpm", people)]
        values[f"{name}, {LOOKED_UP}"] = len(people) if len(people) <= 128 else 0
    return values


def tree_people(seed: int) -> dict[str, list[Person]]:
    """Return queues whose requests end at nodes of drawn trees, the root among them; deep trees and flat ones."""
    found = {}
    for draw in range(DRAWS):
        rng = random.Random(f"tree {draw} {seed}")
        number = rng.sample(range(1, 900), 15)  # of nodes: says nothing about their place
        paths: list[tuple[int, ...]] = [()]
        for node in number:
            paths.append((*rng.choice(paths[-4:] if draw % 2 else paths), node))
        people = queue(f"tree {draw}", seed, 25)
        for person in people:
            person.path = rng.choice(paths)
            person.matched = len(person.path)
        found[f"tree {draw}"] = people
    found["two branches, the lighter one is deeper"] = [
        Person(f"r{index}", 5, arrival=index, path=path, matched=len(path))
        for index, path in enumerate([(1, 2, 3, 4), (7,), (1, 2), (7,), (), (7, 8)])
    ]
    return found


def tree_probe(seed: int) -> Values:
    """Order by the weights of the tree."""
    from mini_engine.scheduler.policy import make_policy

    values: Values = {}
    for name, people in tree_people(seed).items():
        values[name] = ordered(make_policy("dfs-weight"), people)
        values[f"{name}, {SPLIT}"] = ordered(make_policy("dfs-weight"), people, Looks(people))
    return values


SPLIT = "whose nodes the look-ups split"


def split_people(people: Sequence[Person]) -> list[Person]:
    """Return the requests with the paths that they have when all have been looked up."""
    ends = {person.path for person in people}
    return [replace(person, path=cut_path(person.path, ends)) for person in people]


def tree_verdict(seed: int, got: Values) -> list[Failure]:
    """Walk every tree along the order that came back."""
    failures = []
    queues = tree_people(seed)
    queues |= {f"{name}, {SPLIT}": split_people(people) for name, people in queues.items()}
    for name, people in queues.items():
        order = [str(entry) for entry in got[name]]
        if Counter(order) != Counter(person.name for person in people):
            failures.append(Failure(name, "", "every request once, the queue unchanged", str(order)))
            continue
        faults = scheduling.walk_faults(order, {person.name: person for person in people})
        failures += [Failure(name, "", "depth first, the heaviest branch first", fault) for fault in faults][:1]
    return failures


def random_probe(seed: int) -> Values:
    """Draw orders from several generators, while other code draws from Python's own."""
    from mini_engine.scheduler.policy import make_policy

    people = queue("random", seed, 20)
    policies = {
        "no seed": make_policy("random"),
        "no seed, again": make_policy("random"),
        "seed 7": make_policy("random", 7),
        "seed 7, again": make_policy("random", 7),
        "seed 8": make_policy("random", seed=8),
        "seed 0": make_policy("random", 0),
    }
    values: Values = {name: [] for name in policies}
    for _ in range(3):
        for name, policy in policies.items():
            random.seed(len(values[name]))
            values[name].append(ordered(policy, people))
    random.seed(99)
    untouched = random.random()
    random.seed(99)
    four = queue("four", seed, 4)
    policy = make_policy("random", seed)
    values["four requests"] = [ordered(policy, four) for _ in range(600)]
    values["Python's own generator is left alone"] = random.random() == untouched
    return values


def random_verdict(seed: int, got: Values) -> list[Failure]:
    """Every order is one of the queue's, a seed repeats its orders, another one has others, and all are likely."""
    failures = []
    names = sorted(person.name for person in queue("random", seed, 20))
    for case, orders in got.items():
        if "seed" not in case:
            continue
        if any(sorted(order) != names for order in orders):
            failures.append(Failure(case, "", "every request once, the queue unchanged", str(orders[0])))
        elif len({tuple(order) for order in orders}) != len(orders):
            failures.append(Failure(case, "", "another order in every step", str(orders)))
    for case in ("no seed", "seed 7"):
        if got[case] != got[f"{case}, again"]:
            failures.append(Failure(case, "", "the same orders a second time", str(got[f"{case}, again"])))
    if got["seed 7"] == got["seed 8"]:
        failures.append(Failure("seeds 7 and 8", "", "different orders", str(got["seed 8"])))
    if got["Python's own generator is left alone"] is not True:
        failures.append(Failure("Python's own generator", "", "left alone", "drawn from"))
    seen = Counter(tuple(order) for order in got["four requests"])
    if len(seen) != 24 or sum((n - 25) ** 2 / 25 for n in seen.values()) > 75:  # 23 degrees: p is about 2e-7
        failures.append(Failure("600 orders of 4 requests", "", "24 orders, about 25 times each", str(seen)))
    return failures


DRAWING = ("'random', seed 3", "'dice', seed 3")  # another name of the same policy
NAMES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "shortest")


def names_probe(seed: int) -> Values:
    """Ask for policies that exist, that do not, and with seeds that nothing would use; and for one of one's own."""
    from mini_engine.scheduler import policy as module

    class Backwards:
        def order(self, waiting: Sequence[Any], hits: Any) -> list[Any]:
            return sorted(waiting, key=lambda request: -request.arrival)

    module.POLICIES |= {"backwards": Backwards, "dice": module.Shuffled}
    values: Values = {}
    try:
        people = queue("own", seed, 5)
        values["a policy of one's own"] = ordered(module.make_policy("backwards"), people)
        asked = [
            ("best", None),
            ("", None),
            ("FCFS", None),
            *((n, 3) for n in (*NAMES, "backwards", "dice")),
            ("fcfs", 0),
        ]
        for name, policy_seed in asked:
            try:
                module.make_policy(name, policy_seed)
                values[f"{name!r}, seed {policy_seed}"] = "no error"
            except ValueError as error:
                values[f"{name!r}, seed {policy_seed}"] = f"ValueError: {error}"
    finally:
        del module.POLICIES["backwards"], module.POLICIES["dice"]
    return values


def names_verdict(seed: int, got: Values) -> list[Failure]:
    """Refuse unknown names with a list of all, and a seed everywhere but with what draws."""
    failures = []
    people = sorted(queue("own", seed, 5), key=lambda person: -person.arrival)
    if got["a policy of one's own"] != [person.name for person in people]:
        failures.append(Failure("a policy of one's own", "", "its order", str(got["a policy of one's own"])))
    for case, answer in got.items():
        if "seed" not in case:
            continue
        words = str(answer)
        if case in DRAWING:
            wanted = words == "no error"
        elif "None" in case:
            wanted = words.startswith("ValueError") and all(name in words for name in (*NAMES, "backwards"))
        else:
            wanted = words.startswith("ValueError")
        if not wanted:
            expected = (
                "no error" if case in DRAWING else "a ValueError with the names" if "None" in case else "a refusal"
            )
            failures.append(Failure(case, "", expected, words))
    return failures


REGISTRY.add(
    "L5.B.orders",
    "By arrival, by the longest answer and by the shortest wait, ties by arrival; the queue itself stays as it was.",
    orders_probe,
    bitwise(orders_spec),
)
REGISTRY.add(
    "L5.B.aging",
    "For shortest-first a step of waiting counts as 16 tokens less, and output to be computed again counts as pending.",
    aging_probe,
    bitwise(aging_spec),
)
REGISTRY.add(
    "L5.B.match",
    "The most cached pages first, then by arrival; with more than 128 waiting requests by arrival alone.",
    match_probe,
    bitwise(match_spec),
)
REGISTRY.add(
    "L5.B.tree",
    "Depth first, the branch with the most waiting requests first, and a node's own requests after its branches, also "
    "if a look-up splits a node on the path of another request.",
    tree_probe,
    tree_verdict,
)
REGISTRY.add(
    "L5.B.random",
    "A seed gives the same orders again and every step another one, all orders are equally likely, and nothing else is "
    "drawn from.",
    random_probe,
    random_verdict,
)
REGISTRY.add(
    "L5.B.names",
    "An unknown policy is refused with the names that exist, and so is a seed that nothing would use.",
    names_probe,
    names_verdict,
)
