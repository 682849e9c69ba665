"""The checks of ranks in processes of their own (L12.D): parts, ids, digests and ends. No model.

Owns: what ranks are given, faults of one rank, and what every rank must know afterwards.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l12.forks import run_ranks
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
SIZES = (1, 2, 3)
PARTS = ((3, 4, "float32"), (1, 2, "bfloat16"), (0, 3, "float32"), (5, 1, "int64"))
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}


def part_of(seed: int, shape: tuple[int, int, str], rank: int, how: str) -> Tensor:
    """Return the columns of a rank, in some cases as a view of something larger."""
    rows, width, dtype = shape
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    large = torch.randint(-99, 99, (max(rows, 1) * 2, width * 2), generator=generator).to(KINDS[dtype])
    views = {"a tensor": large[:rows, :width].clone(), "a view": large[: 2 * rows : 2, ::2]}
    return views[how] if how in views else large.T.reshape(-1)[: rows * width].view(width, rows).T


HOWS = ("a tensor", "a view", "transposed")


def gather_work(seed: int, group: Any) -> dict[str, Any]:
    """Gather parts of every kind, one after the other in the same group."""
    from mini_engine.processes.together import gather

    found: dict[str, Any] = {}
    for shape in PARTS:
        for how in HOWS:
            part = part_of(seed, shape, group.rank, how)
            before = part.clone()
            found[f"{shape}, {how}"] = gather(group, part)
            found[f"{shape}, {how}, the part afterwards is as before"] = bool(torch.equal(part, before))
    return found


def everywhere(work: Callable[[Any], Any]) -> Values:
    """Run the work with every number of ranks."""
    return {f"rank {rank} of {size}": one for size in SIZES for rank, one in enumerate(run_ranks(size, work))}


def gather_probe(seed: int) -> Values:
    """Gather in groups of every size."""
    return everywhere(partial(gather_work, seed))


def gather_spec(seed: int) -> Values:
    """Put the parts side by side, as no process is needed for."""
    values: Values = {}
    for size in SIZES:
        found: dict[str, Any] = {}
        for shape in PARTS:
            for how in HOWS:
                parts = [part_of(seed, shape, rank, how) for rank in range(size)]
                found[f"{shape}, {how}"] = torch.cat(parts, dim=1).contiguous()
                found[f"{shape}, {how}, the part afterwards is as before"] = True
        values |= {f"rank {rank} of {size}": found for rank in range(size)}
    return values


REGISTRY.add(
    "L12.D.gather",
    "The columns of all ranks stand side by side in the order of ranks, on every rank, in processes of their own: one, "
    "two and three, whatever the part's layout in memory.",
    gather_probe,
    bitwise(gather_spec),
)


def drawn_ids(seed: int) -> list[list[int]]:
    """Draw lists of ids; none, one, a long text, and ids that need more than 32 bits among them."""
    rng = random.Random(f"ids {seed}")
    wide, short, long = ((2**40, 5), (1000, 40), (151_936, 3000))  # ids below, how many
    drawn = [[rng.randrange(limit) for _ in range(count)] for limit, count in (wide, short, long)]
    return [[], [7], *drawn, [0, 0], []]


def ids_work(seed: int, group: Any) -> list[Any]:
    """Pass lists on, one after the other; rank 0 has them as a list or a tuple."""
    from mini_engine.processes.together import ids_of_first

    found = []
    for number, ids in enumerate(drawn_ids(seed)):
        own = tuple(ids) if number % 2 else list(ids)
        got = ids_of_first(group, own if group.rank == 0 else None)
        kind = "the list that it was given" if got is own else f"a {type(got).__name__}"
        found.append(list(got) if kind == "a list" else kind)
    return found


def ids_probe(seed: int) -> Values:
    """Pass ids on in groups of every size."""
    return everywhere(partial(ids_work, seed))


def ids_spec(seed: int) -> Values:
    """Every rank gets what rank 0 had."""
    return {f"rank {rank} of {size}": drawn_ids(seed) for size in SIZES for rank in range(size)}


REGISTRY.add(
    "L12.D.ids",
    "Every rank gets rank 0's ids as a new list, also when there are none and when they need 64 bits; the others know "
    "neither ids nor number.",
    ids_probe,
    bitwise(ids_spec),
)

IDS = [5, 3, 9]
OTHERS = {"another id": [5, 3, 8], "another order": [3, 5, 9], "one less": [5, 3], "one more": [5, 3, 9, 0], "none": []}


def disagreements(seed: int) -> dict[str, list[list[int]]]:
    """Return the ids of four ranks: all alike, one with others, all but the first, and each its own."""
    found: dict[str, list[list[int]]] = {"all alike": [IDS] * 4, "all have none": [[]] * 4}
    for name, ids in OTHERS.items():
        found[f"rank 2 has {name}"] = [IDS, IDS, ids, IDS]
        found[f"rank 0 has {name}"] = [ids, IDS, IDS, IDS]
    found |= {"two ranks differ": [IDS, [1, 2], IDS, [2, 1]], "the same sum": [IDS, [9, 9, -1], IDS, IDS]}
    found |= {"the same digits": [[1, 23], [12, 3], [1, 23], [123]]}
    found |= {f"one id is {more} more": [IDS, [5, 3 + more, 9], IDS, IDS] for more in (2**8, 2**16, 2**32)}
    large = list(range(300))
    return found | {"the last of many differs": [large, large, large, [*large[:-1], 7]]}


def same_work(seed: int, group: Any) -> dict[str, str]:
    """Check case after case in one group, and say what was raised."""
    from mini_engine.processes.together import check_same

    found = {}
    for name, ids in disagreements(seed).items():
        try:
            check_same(group, tuple(ids[group.rank]) if group.rank == 1 else ids[group.rank])
            found[name] = "nothing"
        except ValueError as error:
            words = str(error)
            named = words[words.find("[") : words.find("]") + 1]
            found[name] = f"ValueError about ranks {named}"
    return found


def same_probe(seed: int) -> Values:
    """Compare ids in a group of four."""
    return {f"rank {rank} of 4": found for rank, found in enumerate(run_ranks(4, partial(same_work, seed)))}


def same_spec(seed: int) -> Values:
    """Compare the lists themselves."""
    found = {}
    for name, ids in disagreements(seed).items():
        others = [rank for rank, own in enumerate(ids) if own != ids[0]]
        found[name] = f"ValueError about ranks {others}" if others else "nothing"
    return {f"rank {rank} of 4": found for rank in range(4)}


REGISTRY.add(
    "L12.D.same",
    "A rank with other ids than rank 0 is a ValueError that names it on every rank: another id, another order, one "
    "more or less. Afterwards the group goes on.",
    same_probe,
    bitwise(same_spec),
)

FAULTS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("the mask is empty"),
    "KeyError": lambda: KeyError("q"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
}
WHERE = ("before", "between", "after")  # the two exchanges of the work


def broken_work(kind: str, where: str, culprit: int, group: Any) -> str:
    """Run two exchanges; one rank raises before, between or behind them, while the others want a third."""
    from mini_engine.processes.together import in_step

    def work() -> Tensor:
        """Exchange, and fail if it is this rank's turn."""
        for place in WHERE:
            if group.rank == culprit and place == where:
                raise FAULTS[kind]()
            group.all_gather(torch.ones(2))
        return torch.ones(2)

    try:
        in_step(group, work)
    except Exception as error:
        if isinstance(error, NotImplementedError):
            raise
        cause = type(error.__cause__).__name__ if group.rank == culprit else "whatever"
        return f"{type(error).__name__} {error}, from {cause}"
    return "nothing was raised"


def fine_work(seed: int, group: Any) -> list[Any]:
    """Do several steps in one group: what does not fail is returned as it is."""
    from mini_engine.processes.together import in_step

    def number() -> int:
        """Return how many ranks answered."""
        return len(group.all_gather(torch.ones(1)))

    results: list[Any] = [in_step(group, number), in_step(group, lambda: None), in_step(group, number)]
    results += [in_step(group, lambda: "a text"), "left" if group.said is not None else "still there"]
    return results


def steps_probe(seed: int) -> Values:
    """Let one of two and of three ranks fail in every way, and let none fail."""
    rng = random.Random(f"steps {seed}")
    values: Values = {}
    for kind in FAULTS:
        for size in (2, 3):
            for where in WHERE:
                culprit = rng.randrange(size)
                found = run_ranks(size, partial(broken_work, kind, where, culprit))
                for rank, words in enumerate(found):
                    values[f"{kind} on rank {culprit} of {size}, {where}: rank {rank}"] = words
    for rank, results in enumerate(run_ranks(3, partial(fine_work, seed))):
        values[f"nothing fails: rank {rank}"] = results
    return values


def steps_spec(seed: int) -> Values:
    """Every rank knows who failed, and why."""
    rng = random.Random(f"steps {seed}")
    values: Values = {}
    for kind, make in FAULTS.items():
        for size in (2, 3):
            for where in WHERE:
                culprit = rng.randrange(size)
                for rank in range(size):
                    cause = kind if rank == culprit else "whatever"
                    words = f"RankLost rank {culprit}: {kind}: {make()}, from {cause}"
                    values[f"{kind} on rank {culprit} of {size}, {where}: rank {rank}"] = words
    for rank in range(3):
        values[f"nothing fails: rank {rank}"] = [3, None, 3, "a text", "still there"]
    return values


REGISTRY.add(
    "L12.D.step",
    "Whatever one rank's work raises, and wherever, all ranks end with RankLost, its number and its reason, and none "
    "waits; work that raises nothing gives its result, and the group goes on.",
    steps_probe,
    bitwise(steps_spec),
    seconds=40.0,
)


class Ear:
    """Stands in for a group, and hears what this rank says when it leaves."""

    rank, size = 1, 4

    def __init__(self) -> None:
        """Hear nothing yet."""
        self.heard: list[Any] = []

    def leave(self, fault: Any) -> None:
        """Hear it."""
        self.heard.append([type(fault).__name__, fault.rank, fault.reason])


def throw(error: Exception) -> None:
    """Fail with the error, as a gather does."""
    raise error


def passed_probe(seed: int) -> Values:
    """Let work end with another rank's fault, which was raised as it is or is a new one."""
    from mini_engine.processes.group import RankLost
    from mini_engine.processes.together import in_step

    values: Values = {}
    for rank in (0, 1, 3):
        fault, ear = RankLost(rank, "KeyError: 'q'"), Ear()
        raised: Any = None
        try:
            in_step(ear, partial(throw, fault))  # type: ignore[arg-type]
        except RankLost as error:
            raised = error
        values[f"a fault of rank {rank}, what was said on leaving"] = ear.heard
        values[f"a fault of rank {rank}, what was raised"] = [str(raised), raised is fault]
    ear, own = Ear(), KeyError("q")
    with suppress(RankLost):
        in_step(ear, partial(throw, own))  # type: ignore[arg-type]
    return values | {"an exception of this rank, what was said on leaving": ear.heard}


def passed_spec(seed: int) -> Values:
    """Expect what came, unchanged."""
    values: Values = {}
    for rank in (0, 1, 3):
        values[f"a fault of rank {rank}, what was said on leaving"] = [["RankLost", rank, "KeyError: 'q'"]]
        values[f"a fault of rank {rank}, what was raised"] = [f"rank {rank}: KeyError: 'q'", True]
    return values | {"an exception of this rank, what was said on leaving": [["RankLost", 1, "KeyError: 'q'"]]}


REGISTRY.add(
    "L12.D.passed",
    "A rank says once why it leaves. A fault that came from another rank is passed on as it came: said, and raised.",
    passed_probe,
    bitwise(passed_spec),
)
