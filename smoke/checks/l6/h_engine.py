"""The checks of the engine with a prefix cache (L6.H) and of prompts that are computed once (L6.I).

Owns: visits that begin alike, and what they must give: the bits of L4's run alone from a cold cache,
whatever was found in the cache, evicted, preempted or computed in chunks. Needs L1 to L5 and all of L6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoke.checks.l3 import driver as l3
from smoke.checks.l4 import k_driver as l4
from smoke.checks.l4.k_driver import make_params
from smoke.checks.l5.j_engine import agreement, alone, answer, build_engine, poison_freed_pages, unlike
from smoke.framework import peer
from smoke.framework.cases import ModelCase, random_case, random_ids
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
MOST_STEPS = 500  # no run needs more
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Visit:
    """A request of a run: its prompt, its parameters, and before which steps it comes and is aborted."""

    prompt: list[int]
    params: dict[str, Any]
    arrives: int = 0
    key: str | None = None
    aborted: int | None = None

    @property
    def single(self) -> list[dict[str, Any]]:
        """The parameters of each sample alone."""
        count = self.params.get("n", 1)
        seeds = [{"seed": self.params["seed"] + index} if "seed" in self.params else {} for index in range(count)]
        return [{**self.params, "n": 1, **seed} for seed in seeds]


def drive(engine: Any, visits: Sequence[Visit], *, squeeze: bool = False) -> Values:
    """Run visits through the engine and keep what every sample was told and what every step computed.

    ``squeeze`` lets requests in as if none would grow, so that pages run out.
    """
    names: dict[str, tuple[int, int]] = {}
    deltas: dict[str, list[Any]] = {}
    chunks: list[Any] = []
    copied = 0
    for number in range(MOST_STEPS):
        for index, visit in enumerate(visits):
            if visit.arrives == number:
                for sample, name in enumerate(enter(engine, visit)):
                    names[name] = (index, sample)
                    deltas[name] = []
        for name in [name for name, (index, _) in names.items() if visits[index].aborted == number]:
            engine.abort(name)
        engine.scheduler.growth.ratio = 0.0 if squeeze else engine.scheduler.growth.ratio
        output = engine.step()
        engine.scheduler.check_pages()
        for delta in output.deltas:
            deltas[delta.request_id].append(delta)
        chunks.append([[*names[name], start, count] for name, start, count in output.chunks])
        copied += sum(output.copied.values())
        arrived = {index for index, _ in names.values()}
        if len(arrived) == len(visits) and not engine.scheduler.has_work and not engine.deltas:
            break
    scheduler = engine.scheduler
    whose = {f"{index}.{sample}": name for name, (index, sample) in names.items()}
    return {
        "requests": {place: answer(deltas[name], engine.take_output(name)) for place, name in whose.items()},
        "chunks": chunks,
        "copied": copied,
        "preempted": sum(len(step.preempted) for step in engine.log),
        "pages": [scheduler.allocator.num_pages, scheduler.allocator.num_free, scheduler.cache.num_pages],
        "locked": scheduler.cache.num_pages - scheduler.cache.num_evictable,
        "statistics": statistics(scheduler.cache),
    }


def enter(engine: Any, visit: Visit) -> list[str]:
    """Give a visit to the engine and return the ids of its samples."""
    from mini_engine.scheduler.request import RequestOptions

    params = make_params(visit.params)
    if params.n > 1:
        return list(engine.add_samples(visit.prompt, params))
    return [engine.add_request(visit.prompt, params, options=RequestOptions(visit.key))]


def statistics(cache: Any) -> list[int] | None:
    """Return requests, tokens found and pages evicted, if it is a cache that counts."""
    stats = getattr(cache, "stats", None)
    return None if stats is None else [stats.num_uses, stats.num_tokens_hit, stats.num_pages_evicted]


def reference_runs(case: ModelCase, dtype: str, visits: Sequence[Visit]) -> Values:
    """Run every sample alone and cold with L4's driver."""
    driver = l4.build_driver(case, dtype=dtype, batch_invariant=True)
    return {
        f"{index}.{sample}": alone(driver, visit.prompt, params)
        for index, visit in enumerate(visits)
        for sample, params in enumerate(visit.single)
    }


def like_alone(run: Values, cold: Values, visits: Sequence[Visit], where: str) -> list[Failure]:
    """Compare every sample with its reference run, an aborted one with its beginning, and count the pages."""
    failures: list[Failure] = []
    for name, request in run["requests"].items():
        visit = visits[int(name.partition(".")[0])]
        want = cold[name]
        case = f"{where}, request {name} {visit.params}"
        failures += agreement(request, case)
        if visit.aborted is not None and request["finish_reason"] == ["abort"]:
            want = {"ids": want["ids"][: len(request["ids"])]}
        failures += unlike(want, request, case)
    total, free, cached = run["pages"]
    failures += differences(total, free + cached, None, f"{where}, free and cached pages at the end")
    return failures + differences(0, run["locked"], None, f"{where}, locked pages at the end")


# Warm ---------------------------------------------------------------------------------------------------------------


def warm_visits(case: ModelCase, seed: int) -> list[Visit]:
    """Return visits of two stems: equal prompts, longer ones, one token apart, keys, samples, reports, an abort."""
    stem = random_ids(case.vocab_size, 21, seed)
    other = random_ids(case.vocab_size, 18, seed + 1)
    more = [random_ids(case.vocab_size, length, seed + 2) for length in (5, 3, 9, 6)]
    sampled = {"temperature": 1.1, "seed": 4, "top_k": 40}
    return [
        Visit([*stem, *more[0]], {"max_new_tokens": 6, "logprobs": 1}),
        Visit([*stem, *more[1]], {"max_new_tokens": 9, **sampled}),
        Visit([*stem[:10], *more[2]], {"max_new_tokens": 5, "repetition_penalty": 1.5}, 1),
        Visit([*other, *more[3]], {"max_new_tokens": 7}, 1, "tenant"),
        Visit([*stem, *more[0]], {"max_new_tokens": 8, "frequency_penalty": 1.2}, 3),
        Visit([*stem, *more[0]], {"max_new_tokens": 5, "prompt_logprobs": 1}, 4),
        Visit([*other, *more[3]], {"max_new_tokens": 6, **sampled}, 5, "tenant"),
        Visit(stem[:20], {"max_new_tokens": 7, **sampled, "n": 3}, 6),
        Visit([*other, *more[3]], {"max_new_tokens": 6}, 7),
        Visit([*stem, *more[1], 1, 2], {"max_new_tokens": 12}, 8, None, 14),
        Visit([*stem, *more[0]], {"max_new_tokens": 6, "logprobs": 0}, 18),
    ]


LOADS: dict[str, dict[str, Any]] = {
    "one at a time": {"page_size": 4, "num_pages": 40},
    "chunks of up to 6 tokens": {
        "page_size": 4,
        "num_pages": 70,
        "max_running_requests": 6,
        "max_tokens_per_step": 6,
        "wait_for_prefix": 8,
    },
    "pages run out": {
        "page_size": 2,
        "num_pages": 26,
        "max_running_requests": 8,
        "preemption": True,
        "policy": "lpm",
        "max_tokens_per_step": 13,
    },
    "pages of one token, the rarest used go first": {
        "page_size": 1,
        "num_pages": 58,
        "max_running_requests": 4,
        "preemption": True,
        "policy": "dfs-weight",
        "eviction": "lfu",
    },
}


RUNS = [*(("float32", load) for load in LOADS), ("bfloat16", "chunks of up to 6 tokens"), ("bfloat16", "pages run out")]


def warm_probe(seed: int) -> Values:
    """Run all visits under every load, freed pages poisoned, and each alone."""
    case = random_case(l3.SMALL, seed)
    values = Values()
    visits = warm_visits(case, seed)
    for dtype in DTYPES:
        values[f"{dtype}, alone"] = reference_runs(case, dtype, visits)
    for dtype, load in RUNS:
        engine = build_engine(case, dtype=dtype, batch_invariant=True, prefix_cache="radix", **LOADS[load])
        poison_freed_pages(engine)
        values[f"{dtype}, {load}"] = drive(engine, visits, squeeze="preemption" in LOADS[load])
    return values


def warm_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare every sample under every load with its reference run, and the reference run with transformers' logits."""
    case = random_case(l3.SMALL, seed)
    failures = list[Failure]()
    visits = warm_visits(case, seed)
    totals = [0, 0, 0]
    for dtype, load in RUNS:
        run = got[f"{dtype}, {load}"]
        failures += like_alone(run, got[f"{dtype}, alone"], visits, f"{dtype}, {load}")
        _, found, evicted = run["statistics"]
        totals = [a + b for a, b in zip(totals, (found, evicted, run["preempted"]), strict=True)]
    ids = got["float32, alone"]["0.0"]["ids"]
    want = peer.logits(case, "float32", "sdpa", [*visits[0].prompt, *ids])[len(visits[0].prompt) - 1 : -1]
    failures += differences(want, got["float32, alone"]["0.0"]["logits"], 1e-4, "request 0, alone, logits of its ids")
    for what, total in zip(("tokens found", "pages evicted", "preemptions"), totals, strict=True):
        if not total:
            failures.append(Failure("all loads", what, "some", "none"))
    return failures[:8]


REGISTRY.add(
    "L6.H.warm",
    "From a warm cache, in chunks, while pages are evicted and requests preempted, every answer has the logits, "
    "log-probabilities and ids of its run alone from a cold cache, to the bit (under batch_invariant).",
    warm_probe,
    warm_verdict,
    needs=("L6.F", "L6.G", "L6.I"),
    seconds=60.0,
)

# Off ----------------------------------------------------------------------------------------------------------------


def off_visits(case: ModelCase, seed: int) -> list[Visit]:
    """Return the same prompt again and again."""
    prompt = random_ids(case.vocab_size, 19, seed)
    return [
        Visit(prompt, {"max_new_tokens": 6}),
        Visit([*prompt, 3], {"max_new_tokens": 5}, 1),
        Visit(
            prompt,
            {
                "max_new_tokens": 8,
                "temperature": 0.8,
                "seed": 3,
            },
            2,
        ),
    ]


def off_probe(seed: int) -> Values:
    """Run them with the cache off, in plain arithmetic, and each alone with L4's driver."""
    case = random_case(l3.SMALL, seed)
    values = Values()
    visits = off_visits(case, seed)
    for dtype in DTYPES:
        driver = l4.build_driver(case, dtype=dtype)
        values[dtype] = drive(build_engine(case, dtype=dtype, page_size=4), visits)
        values[f"{dtype}, alone"] = {f"{i}.0": alone(driver, v.prompt, v.params) for i, v in enumerate(visits)}
    return values


def off_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare with the reference runs, and ask that every token of every prompt was computed."""
    visits = off_visits(random_case(l3.SMALL, seed), seed)
    failures: list[Failure] = []
    for dtype in DTYPES:
        failures += like_alone(got[dtype], got[f"{dtype}, alone"], visits, dtype)
        want = [len(visit.prompt) + visit.params["max_new_tokens"] - 1 for visit in visits]
        failures += differences(want, computed_by(got[dtype], len(visits)), None, f"{dtype}, tokens computed")
        failures += differences(got[dtype]["pages"][0], got[dtype]["pages"][1], None, f"{dtype}, free pages at the end")
    return failures


def computed_by(run: Values, count: int) -> list[int]:
    """Return how many tokens were computed for each visit."""
    totals = [0] * count
    for step in run["chunks"]:
        for index, _, _, rows in step:
            totals[index] += rows
    return totals


REGISTRY.add(
    "L6.H.off",
    "Without a prefix cache the bits are those of the driver alone, every token is computed and every page is free at "
    "the end.",
    off_probe,
    off_verdict,
    needs=("L6.I",),
)

# A talk -------------------------------------------------------------------------------------------------------------

TURNS = (13, 1, 6, 2, 9)  # tokens that the user adds
ANSWERS = (7, 4, 5, 1, 6)
TALK_LOADS: dict[str, dict[str, Any]] = {
    "pages of 1": {"page_size": 1},
    "pages of 4": {"page_size": 4},
    "pages of 16, chunks of 5": {"page_size": 16, "max_tokens_per_step": 5},
}


def talk_probe(seed: int) -> Values:
    """Let a talk go on: each prompt is all that was said and a little more."""
    case = random_case(l3.SMALL, seed)
    values = Values()
    for load, options in TALK_LOADS.items():
        engine = build_engine(case, batch_invariant=True, prefix_cache="radix", num_pages=120, **options)
        poison_freed_pages(engine)
        said: list[int] = []
        turns = []
        for turn, (asked, answered) in enumerate(zip(TURNS, ANSWERS, strict=True)):
            said += random_ids(case.vocab_size, asked, seed + turn)
            visit = Visit(list(said), {"max_new_tokens": answered})
            run = drive(engine, [visit])
            turns.append({"prompt": visit.prompt, "run": run, "alone": reference_runs(case, "float32", [visit])})
            said += run["requests"]["0.0"]["ids"]
        values[load] = turns
    return values


def talk_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask each turn for its cold run, and for no more tokens than lie after the last whole page that was written."""
    failures: list[Failure] = []
    for load, options in TALK_LOADS.items():
        size = options["page_size"]
        written = 0
        for turn, values in enumerate(got[load]):
            where = f"{load}, turn {turn}"
            visit = Visit(values["prompt"], {"max_new_tokens": ANSWERS[turn]})
            failures += like_alone(values["run"], values["alone"], [visit], where)
            start = min(written, len(visit.prompt) - 1) // size * size
            rows = len(visit.prompt) + ANSWERS[turn] - 1 - start
            failures += differences([rows], computed_by(values["run"], 1), None, f"{where}, tokens computed")
            failures += differences(start, values["run"]["chunks"][0][0][2], None, f"{where}, where it begins")
            # The last token of the answer was sampled and never computed.
            written = len(visit.prompt) + ANSWERS[turn] - 1
    return failures[:8]


REGISTRY.add(
    "L6.H.talk",
    "Each turn of a talk starts after the last whole page of what was computed before, answers included, and is what "
    "it is from cold.",
    talk_probe,
    talk_verdict,
    needs=("L6.F", "L6.G", "L6.I"),
    seconds=40.0,
)

# Once ---------------------------------------------------------------------------------------------------------------

STEM = 48
ONCE_LOADS: dict[str, dict[str, Any]] = {
    "they wait": {"wait_for_prefix": 16},
    "they do not": {},
    "not for so little": {"wait_for_prefix": 100},
    "they wait, 24 rows a step": {"wait_for_prefix": 16, "max_tokens_per_step": 24},
}


def once_visits(case: ModelCase, seed: int) -> list[Visit]:
    """Return four prompts of one stem and one of another key, all at once."""
    stem = random_ids(case.vocab_size, STEM, seed)
    tails = [[index, *random_ids(case.vocab_size, 4 + index, seed)] for index in range(4)]
    visits = [Visit([*stem, *tail], {"max_new_tokens": 3}) for tail in tails]
    return [*visits, Visit([*stem, 9], {"max_new_tokens": 3}, 0, "tenant")]


def once_probe(seed: int) -> Values:
    """Let them come at once."""
    case = random_case(l3.SMALL, seed)
    values = Values()
    for load, options in ONCE_LOADS.items():
        engine = build_engine(
            case,
            batch_invariant=True,
            prefix_cache="radix",
            page_size=8,
            num_pages=80,
            max_running_requests=8,
            **options,
        )
        values[load] = drive(engine, once_visits(case, seed))
    values["alone"] = reference_runs(case, "float32", once_visits(case, seed))
    return values


def once_verdict(seed: int, got: Values) -> list[Failure]:
    """Count how often each position of the stem is computed for the first four."""
    visits = once_visits(random_case(l3.SMALL, seed), seed)
    failures: list[Failure] = []
    for load in ONCE_LOADS:
        failures += like_alone(got[load], got["alone"], visits, load)
        times = [0] * STEM
        for index, _, start, rows in (chunk for step in got[load]["chunks"] for chunk in step):
            for position in range(start, min(start + rows, STEM)):
                times[position] += index < 4
        if load.startswith("they wait"):
            failures += differences([1] * STEM, times, None, f"{load}, how often each token of the stem is computed")
        elif max(times) < 2:
            failures.append(Failure(load, "tokens of the stem", "some are computed more than once", str(times)))
        if load == "they wait":
            first = sorted(index for index, *_ in got[load]["chunks"][0])
            failures += differences([0, 4], first, None, f"{load}, who is in the first step")
    return failures[:8]


REGISTRY.add(
    "L6.I.once",
    "Requests that come at once and wait compute their common beginning once; those of another key and with other "
    "thresholds do not wait, and no request waits for ever.",
    once_probe,
    once_verdict,
    needs=("L6.F", "L6.G", "L6.H"),
    seconds=40.0,
)
