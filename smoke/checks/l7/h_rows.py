"""The checks of L7.H: every row's own grammar over its row of logits, and what is done when nothing is left.

Owns: toy grammars that allow a set of ids, with masks of both forms, and what the logits must be afterwards: bans by a
loop over tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
NOTHING = -torch.inf
V = 37
STOPS = [4, 9]


@dataclass(frozen=True)
class Toy:
    """A grammar in some state: what it allows, whether the text is complete, whether it has ended."""

    allowed: frozenset[int]
    complete: bool = False
    terminated: bool = False
    finished: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it has nothing to say."""
        return self.terminated or self.finished


def build_toy(toy: Toy, form: str, calls: list[str], seconds: float = 0.0) -> Any:
    """Build a grammar object. ``form``: a bitmask, or booleans of its own that mean the opposite after their move.

    ``calls`` notes who was asked for what; a fill takes ``seconds``.
    """
    kind = toy_class(toy, calls, seconds)
    grammar = (kind if form == "bitmask" else boolean_class(kind, toy, calls))()
    grammar.finished = toy.finished
    return grammar


def toy_class(toy: Toy, calls: list[str], seconds: float) -> Any:
    """Define a grammar object whose state nothing changes."""
    import time

    from mini_engine.grammar.base import GrammarObject

    class ToyGrammar(GrammarObject):
        """A state that nothing changes."""

        def accept_token(self, token_id: int) -> None:
            calls.append("accept")

        def rollback(self, count: int) -> None:
            calls.append("rollback")

        def is_terminated(self) -> bool:
            return toy.terminated

        def is_complete(self) -> bool:
            return toy.complete

        def copy(self) -> Any:
            return self

        def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
            calls.append(f"fill {row} of {len(mask)}")
            time.sleep(seconds)
            for word in range(mask.shape[1]):
                bits = sum(1 << token % 32 for token in toy.allowed if token // 32 == word)
                mask[row, word] = bits - (1 << 32) if bits >= 1 << 31 else bits

    return ToyGrammar


def boolean_class(kind: Any, toy: Toy, calls: list[str]) -> Any:
    """Define the same with a mask of another form."""

    class BooleanToy(kind):
        """Booleans, True is allowed while they are filled, and True is banned where they are applied."""

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str = "cpu") -> Tensor:
            return torch.ones(batch_size, vocab_size, dtype=torch.bool)

        def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
            calls.append(f"fill {row} of {len(mask)}")
            mask[row] = False
            mask[row, sorted(toy.allowed)] = True

        def move_vocab_mask(self, mask: Tensor, device: str) -> Tensor:
            calls.append(f"move to {device}")
            return ~mask

        def apply_vocab_mask(self, logits: Tensor, mask: Tensor) -> None:
            logits.masked_fill_(mask, NOTHING)

    return BooleanToy


def masked(grammars: Sequence[Any], stop_ids: Sequence[int], logits: Tensor) -> Tensor | None:
    """Mask a copy of the logits as the candidate does; ``None`` if there is nothing to mask."""
    from mini_engine.grammar.rows import make_mask

    mask = make_mask(grammars, frozenset(stop_ids))
    if mask is None:
        return None
    logits = logits.clone()
    mask(logits)
    return logits


def rule(toys: Sequence[Toy | None], logits: Tensor) -> Tensor | None:
    """Ban, token by token, what each row's grammar does not allow."""
    if all(toy is None or toy.is_over for toy in toys):
        return None
    logits = logits.clone()
    for row, toy in enumerate(toys):
        if toy is not None and not toy.is_over:
            for token in range(logits.shape[1]):
                if token not in toy.allowed:
                    logits[row, token] = NOTHING
    return logits


# Rows ---------------------------------------------------------------------------------------------------------------

THREE = [Toy(frozenset({row, 20 + row})) for row in range(3)]


@dataclass(frozen=True)
class Step:
    """The rows of a step: their grammars and logits."""

    toys: tuple[Toy | None, ...]
    logits: Tensor
    form: str


def steps(seed: int) -> dict[str, Step]:
    """Return steps with every mixture of rows: free, constrained, over; vocabularies with and without padding bits."""
    found = {}
    for number in range(36):
        rng = random.Random(f"rows {seed} {number}")
        vocab, count = rng.choice([31, 32, 33, 64, 97]), rng.choice([1, 2, 3, 5, 8])
        kinds = rng.choice(
            [["own"], ["own", "free"], ["own", "free", "over"], ["free", "over"], ["own", "own", "over"]]
        )
        toys: list[Toy | None] = []
        for _ in range(count):
            kind = rng.choice(kinds)
            allowed = frozenset(rng.sample(range(vocab), rng.choice([1, 2, 7, vocab - 1, vocab])))
            over = {"terminated": rng.random() < 0.5} if kind == "over" else {}
            over = {**over, "finished": not over["terminated"]} if over else {}
            toys.append(None if kind == "free" else Toy(allowed, rng.random() < 0.3, **over))
        logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed * 100 + number))
        for row in range(count):  # what stood there before the masks
            logits[row, rng.sample(range(vocab), 3)] = torch.tensor([NOTHING, 1e30, -0.0])
            if toys[row] is None and rng.random() < 0.3:
                logits[row] = rng.choice([NOTHING, torch.nan, 0.0])
        for token in range(vocab):  # nothing that is asked here leaves a row empty
            for row, toy in enumerate(toys):
                if toy is not None and token == min(toy.allowed):
                    logits[row, token] = 0.5
        form = rng.choice(["bitmask", "bitmask", "booleans"])
        found[f"step {number}: {count} rows, {vocab} ids, {form}"] = Step(tuple(toys), logits, form)
    return found


def rows_probe(seed: int) -> Values:
    """Mask every step's logits; then three rows that are named from the last to the first."""
    from mini_engine.grammar.rows import mask_rows
    from mini_engine.sampler.batch import TORCH

    values: Values = {}
    for name, step in steps(seed).items():
        grammars = [None if toy is None else build_toy(toy, step.form, []) for toy in step.toys]
        values[name] = masked(grammars, [0], step.logits)
    backwards = torch.zeros(len(THREE), V)
    last_first = [build_toy(toy, "bitmask", []) for toy in reversed(THREE)]
    mask_rows([2, 1, 0], last_first, STOPS, backwards, TORCH)
    return {**values, "rows from the last to the first": backwards}


def rows_verdict(seed: int, got: Values) -> list[Failure]:
    """Ban by the loop."""
    wanted = {name: rule(step.toys, step.logits) for name, step in steps(seed).items()}
    wanted["rows from the last to the first"] = rule(THREE, torch.zeros(len(THREE), V))
    return [failure for name, logits in wanted.items() for failure in differences(logits, got[name], None, name)]


REGISTRY.add(
    "L7.H.rows",
    "Every row has its own grammar's bans, and a row without one keeps its bits, whatever shares the step.",
    rows_probe,
    rows_verdict,
)

OVER: dict[str, tuple[Toy | None, ...]] = {
    "no rows": (),
    "no grammars": (None, None),
    "a finished one": (Toy(frozenset({1}), finished=True),),
    "a terminated one": (Toy(frozenset({1}), complete=True, terminated=True), None),
    "both": (Toy(frozenset(), finished=True), Toy(frozenset(), terminated=True), None),
    "between others": (
        None,
        Toy(frozenset({2}), terminated=True),
        Toy(frozenset({3, 4})),
        Toy(frozenset(), finished=True),
    ),
}


def over_probe(seed: int) -> Values:
    """Look what is masked and who is asked when grammars are over."""
    values: Values = {}
    for name, toys in OVER.items():
        calls: list[list[str]] = [[] for _ in toys]
        grammars = [None if toy is None else build_toy(toy, "bitmask", calls[row]) for row, toy in enumerate(toys)]
        result = masked(grammars, [0], torch.arange(40.0).repeat(len(toys), 1))
        stats = [None if grammar is None else int(grammar.stats.num_masks) for grammar in grammars]
        values[name] = {"result": result, "calls": [len(each) for each in calls], "counted": stats}
    return values


def over_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask no ended grammar, and give no mask where there is no other."""
    failures = []
    for name, toys in OVER.items():
        live = [toy is not None and not toy.is_over for toy in toys]
        want = {
            "result": rule(toys, torch.arange(40.0).repeat(len(toys), 1)),
            "calls": [int(is_live) for is_live in live],
            "counted": [None if toy is None else int(is_live) for toy, is_live in zip(toys, live, strict=True)],
        }
        failures += differences(want, got[name], None, name)
    return failures


REGISTRY.add(
    "L7.H.over",
    "A grammar that has ended, or whose request has, is not asked any more and masks nothing; without any other there "
    "is no mask at all.",
    over_probe,
    over_verdict,
)

# Nothing left -------------------------------------------------------------------------------------------------------

FAR_BELOW = "what is left is -3e38, whose exponential is 0"
# What the grammar allows, whether its text is complete, which ids were banned before it, and what can be chosen then.
LEFT: dict[str, tuple[list[int], bool, list[int], list[int]]] = {
    "only the stop tokens, and these banned": ([4, 9], True, [4, 9], [4, 9]),
    "one stop token is left": ([4, 9], True, [4], [9]),
    "something else is left": ([4, 9, 20], True, [4, 9], [20]),
    "all that it allows is banned, stop tokens among it": ([4, 9, 20, 36], True, [4, 9, 20, 36], [4, 9]),
    "the stop tokens are not banned": ([4, 9], True, [20], [4, 9]),
    FAR_BELOW: ([20, 21], True, [21], [20]),
    "not complete, and all is banned": ([20, 21], False, [20, 21], []),
    "not complete, and one is left": ([20, 21], False, [20], [21]),
    "it allows nothing, and is complete": ([], True, [], [4, 9]),
    "it allows nothing, and is not complete": ([], False, [], []),
}


def left_logits(seed: int) -> Tensor:
    """Return the logits of every case in one step, a free row between each two."""
    logits = torch.randn(2 * len(LEFT), V, generator=torch.Generator().manual_seed(seed))
    logits[2 * list(LEFT).index(FAR_BELOW), 20] = -3e38
    for row, (_, _, banned, _) in enumerate(LEFT.values()):
        logits[2 * row, banned] = NOTHING
        logits[2 * row + 1, banned] = NOTHING
    logits[1] = NOTHING  # a free row that other bans have emptied
    return logits


def left_probe(seed: int) -> Values:
    """Mask all cases together, and each alone."""
    logits = left_logits(seed)
    toys = [Toy(frozenset(allowed), done) for allowed, done, _, _ in LEFT.values()]
    rows = [each for toy in toys for each in (build_toy(toy, "bitmask", []), None)]
    alone = [masked([build_toy(toy, "bitmask", [])], STOPS, logits[2 * i : 2 * i + 1]) for i, toy in enumerate(toys)]
    return {"together": masked(rows, STOPS, logits), "alone": alone}


def left_verdict(seed: int, got: Values) -> list[Failure]:
    """Look which ids can be chosen, and that logits which are not banned are what they were."""
    logits = left_logits(seed)
    failures = []
    together = got["together"]
    failures += differences(logits[1::2], together[1::2], None, "rows without a grammar")
    for index, (name, (allowed, done, banned, choice)) in enumerate(LEFT.items()):
        kind = f"{name} (complete)" if done else name
        for where, row in (("", together[2 * index]), (", alone", got["alone"][index][0])):
            finite = row.isfinite().nonzero().flatten().tolist()
            failures += differences(choice, finite, None, f"{kind}{where}: ids that can be chosen")
            kept = sorted(set(allowed) - set(banned))
            failures += differences(logits[2 * index, kept], row[kept], None, f"{kind}{where}: logits that are allowed")
    return failures


REGISTRY.add(
    "L7.H.left",
    "When bans leave nothing of what the grammar allows, the stop tokens come back if the text is complete; if it is "
    "not, the row stays empty.",
    left_probe,
    left_verdict,
)


def broken_probe(seed: int) -> Values:
    """Mask rows of NaN, of a NaN among numbers, and of infinities, of which one is all that is left."""
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(seed))
    logits[0] = torch.nan
    logits[1, 6] = torch.nan
    logits[2:4, 6] = torch.inf
    logits[3, 4:6] = NOTHING
    toys = [Toy(frozenset({4, 5, 6}), complete=True) for _ in logits]
    return {"logits": logits, "masked": masked([build_toy(toy, "bitmask", []) for toy in toys], STOPS, logits)}


def broken_verdict(seed: int, got: Values) -> list[Failure]:
    """Ban around what is broken, and heal nothing."""
    toys = [Toy(frozenset({4, 5, 6}), complete=True)] * 5
    kinds = "rows of NaN, with a NaN, with infinity, with infinity alone, sound"
    return differences(rule(toys, got["logits"]), got["masked"], None, kinds)


REGISTRY.add(
    "L7.H.broken",
    "Logits that are NaN or infinite stay so where the grammar allows them, so that the sampler can say what is wrong.",
    broken_probe,
    broken_verdict,
)


def stats_probe(seed: int) -> Values:
    """Mask four steps with a slow grammar and a quick one."""
    slow, quick = (build_toy(Toy(frozenset({1, 2})), "bitmask", [], seconds) for seconds in (0.05, 0.0))
    for grammars in ([slow, None, quick], [quick, slow], [slow, quick], [None, quick]):
        masked(grammars, STOPS, torch.zeros(len(grammars), V))
    return {
        name: [int(each.stats.num_masks), float(each.stats.mask_s)] for name, each in (("slow", slow), ("quick", quick))
    }


def stats_verdict(seed: int, got: Values) -> list[Failure]:
    """Count the masks; 50 ms of sleep count for the grammar that slept."""
    failures = differences([3, 4], [got["slow"][0], got["quick"][0]], None, "masks of the slow and the quick grammar")
    slow, quick = got["slow"][1], got["quick"][1]
    if not slow >= 0.15:
        failures.append(Failure("the slow grammar", "mask_s", "at least 0.15: three masks of 0.05 s", str(slow)))
    if not 0 < quick < slow / 3:
        wanted = "its own time, above 0 and below a third of the slow one"
        failures.append(Failure("the quick grammar", "mask_s", wanted, str(quick)))
    return failures


REGISTRY.add(
    "L7.H.stats",
    "Every filled row is counted, and its time goes to the grammar that took it.",
    stats_probe,
    stats_verdict,
)

# In the sampler -----------------------------------------------------------------------------------------------------

ALLOWED = [3, 8, 11, 30]
# Parameters of a row, each of which would lead it out of the grammar.
TEMPTATIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a bias of 100 outside": {"logit_bias": {5: 100.0, 6: 100.0}},
    "a bias of -100 inside": {"logit_bias": dict.fromkeys(ALLOWED, -100.0)},
    "allowed ids, of which one is inside": {"allowed_token_ids": [5, 6, 8]},
    "drawn hot": {"temperature": 50.0, "seed": 3},
    "drawn among the best": {"temperature": 1.0, "seed": 4, "top_k": 2, "top_p": 0.9},
    "top-p of next to nothing": {"temperature": 1.0, "seed": 5, "top_p": 0.01},
    "min-p": {"temperature": 2.0, "seed": 6, "min_p": 0.5},
}
DRAWS = 20


def sampler_probe(seed: int) -> Values:
    """Sample with each of the parameters, with and without a grammar; report processed log-probabilities."""
    from mini_engine.grammar.rows import make_mask
    from mini_engine.sampler.batch import SamplingBatch, SamplingRequest
    from mini_engine.sampler.params import SamplingParams
    from mini_engine.sampler.processors.base import Vocabulary
    from mini_engine.sampler.sampler import Sampler

    report: dict[str, Any] = {"logprobs": len(ALLOWED) + 1, "logprobs_mode": "processed"}
    requested = [SamplingParams(**params, **report) for params in TEMPTATIONS.values() for _ in range(2)]
    values: dict[str, list[Any]] = {name: [] for name in TEMPTATIONS}
    for draw in range(DRAWS):
        logits = 4 * torch.randn(1, V, generator=torch.Generator().manual_seed(seed * DRAWS + draw))
        logits = logits.repeat(len(requested), 1)
        requests = [SamplingRequest([1] * (draw + 1), each) for each in requested]
        batch = SamplingBatch.from_requests(requests, Vocabulary(V, frozenset(STOPS)))
        grammars = [
            build_toy(Toy(frozenset(ALLOWED)), "bitmask", []) if row % 2 == 0 else None for row in range(len(requested))
        ]
        batch.final_mask = make_mask(grammars, frozenset(STOPS))
        output = Sampler()(logits, batch)
        for row, name in enumerate(TEMPTATIONS):
            entries = [[int(e.token_id), float(e.logprob)] for e in output.logprobs[2 * row] or []]
            values[name].append([int(output.token_ids[2 * row]), int(output.token_ids[2 * row + 1]), entries])
    return {"logits": logits, **values}


def sampler_verdict(seed: int, got: Values) -> list[Failure]:
    """Choose inside; the probabilities of what is inside sum to one, and what is outside has none."""
    failures = []
    for name, params in TEMPTATIONS.items():
        outside = 0
        for draw, (token, free, entries) in enumerate(got[name]):
            logits = 4 * torch.randn(1, V, generator=torch.Generator().manual_seed(seed * DRAWS + draw))[0]
            case = f"{name}, draw {draw}"
            inside = torch.full((V,), NOTHING)
            inside[ALLOWED] = logits[ALLOWED]
            outside += free not in ALLOWED
            if token not in ALLOWED:
                failures.append(Failure(case, "the id", f"one of {ALLOWED}", str(token)))
            if not params:
                failures += differences(int(inside.argmax()), token, None, case)
                want = float(inside.log_softmax(-1)[token])
                failures += differences(want, entries[0][1], 1e-4, f"{case}, its log-probability")
            total = sum(2.718281828459045**logprob for each, logprob in {e[0]: e[1] for e in entries}.items())
            failures += differences(1.0, total, 1e-4, f"{case}, probabilities of all that is left")
        if not outside:
            failures.append(Failure(name, "rows without the grammar", "ids outside, or this proves nothing", "none"))
    return failures


REGISTRY.add(
    "L7.H.last",
    "The mask is the last word before temperature, filters and softmax: no bias lets a token back in, and the "
    "probabilities of what is left sum to one.",
    sampler_probe,
    sampler_verdict,
)
