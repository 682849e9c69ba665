"""The checks of L5.K: the samples of one prompt share one prefill, and no bit changes.

Owns: probes of the copy and of whole runs with ``n`` and ``best_of``, and what they must give: the run alone with the
seed counted up, and a prompt that is computed once. Needs L1 to L4 and all of L5.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from smoke.checks.l3 import driver as l3
from smoke.checks.l4 import k_driver as l4
from smoke.checks.l4 import spec_distribution as distribution
from smoke.checks.l4.k_driver import make_params
from smoke.checks.l5.j_engine import (
    MOST_STEPS,
    alone,
    build_engine,
    entries_of,
    poison_freed_pages,
    run_out,
    table_of,
    unlike,
)
from smoke.framework.cases import ModelCase, embedded_case, random_case, random_ids, random_tensor
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences
from smoke.framework.pretend_gpu import PretendGpu, device_of

REGISTRY = Registry()


# How much can be copied ----------------------------------------------------------------------------------------------

# Per case: tokens of the prompt, then for each sibling its state, how many of its tokens are computed and how many
# tokens it has generated. The first one asks.
Sibling = tuple[str, int, int]
FAMILIES: dict[str, tuple[int, list[Sibling]]] = {
    "no other": (9, [("running", 0, 0)]),
    "the other waits": (9, [("running", 0, 0), ("waiting", 0, 0)]),
    "the other is at the prompt's end": (9, [("running", 0, 0), ("running", 9, 1)]),
    "the other is far beyond the prompt": (9, [("running", 0, 0), ("running", 14, 6)]),
    "the other is in its prompt": (9, [("running", 0, 0), ("running", 4, 0)]),
    "own tokens are computed already": (9, [("running", 3, 0), ("running", 7, 0)]),
    "as far as the other": (9, [("running", 4, 0), ("running", 4, 0)]),
    "further than the other": (9, [("running", 6, 0), ("running", 4, 0)]),
    "all but the last, and the other has all": (9, [("running", 8, 0), ("running", 9, 1)]),
    "back from a preemption, with output": (9, [("running", 0, 5), ("running", 12, 4)]),
    "back, and beyond the prompt": (9, [("running", 10, 5), ("running", 12, 4)]),
    "back, and the other is in its prompt": (9, [("running", 0, 5), ("running", 6, 0)]),
    "the furthest of three": (9, [("running", 1, 0), ("running", 5, 0), ("running", 7, 0), ("running", 2, 0)]),
    "the furthest has ended": (9, [("running", 0, 0), ("finished", 9, 1), ("running", 2, 0)]),
    "the furthest was preempted": (9, [("running", 0, 0), ("preempted", 9, 1), ("running", 3, 0)]),
    "a prompt of one token": (1, [("running", 0, 0), ("running", 1, 1)]),
    "a prompt of two tokens": (2, [("running", 0, 0), ("running", 2, 1)]),
    "who asks stands last": (9, [("running", 0, 0), ("running", 5, 0)]),
}


def family_probe(seed: int) -> Values:
    """Build the siblings of every case by hand and ask what the first of them would copy."""
    from mini_engine.scheduler.request import Request, RequestState
    from mini_engine.scheduler.scheduler import prefix_to_copy

    values: Values = {}
    for name, (length, members) in FAMILIES.items():
        siblings: list[Any] = []
        for index, (state, computed, generated) in enumerate(members):
            request = Request(str(index), list(range(length)), make_params({"max_new_tokens": 20}), siblings=siblings)
            request.state = RequestState(state)
            request.num_computed_tokens = computed
            request.num_scheduled_tokens = 2 if index else 0
            request.output_ids = list(range(generated))
            siblings.append(request)
        asking = siblings[0]
        if name == "who asks stands last":
            siblings.reverse()
        source, count = prefix_to_copy(asking)
        values[name] = [None if source is None else int(source.request_id), int(count)]
    return values


def family_spec(seed: int) -> Values:
    """Go through the tokens one by one: prompt tokens that a running request has, and never the newest token."""
    values: Values = {}
    for name, (length, ((_, computed, generated), *others)) in FAMILIES.items():
        running = {index: own for index, (state, own, _) in enumerate(others, 1) if state == "running"}
        best = None
        count = 0
        for index, done in running.items():
            wanted = [p for p in range(length) if computed <= p < done and p < length + generated - 1]
            if len(wanted) > count:
                best = index
                count = len(wanted)
        values[name] = [best, count]
    return values


REGISTRY.add(
    "L5.K.how_much",
    "A sample copies what the sibling that runs and is furthest has computed of their prompt beyond its own, and never "
    "its newest token.",
    family_probe,
    bitwise(family_spec),
)


# The copy -----------------------------------------------------------------------------------------------------------

# page size, pages of the source, own pages, first position, how many are copied
COPIES: dict[str, tuple[int, list[int], list[int], int, int]] = {
    "from the beginning": (4, [0, 1, 2], [5, 6, 7], 0, 9),
    "from the middle of a page": (4, [0, 1, 2], [6, 3, 7], 3, 4),
    "one token": (4, [2, 0, 1], [7, 5, 3], 5, 1),
    "scattered pages": (2, [9, 1, 7, 3], [0, 8, 2, 6], 1, 6),
    "pages of one token": (1, [0, 3, 5, 7, 9], [1, 2, 4, 6, 8], 1, 3),
    "more pages than needed": (4, [4, 5, 6], [0, 1], 0, 5),
}


def numbers(case: ModelCase, seed: int, page_size: int) -> list[Tensor]:
    """Draw what a pool of ten pages holds: keys and values of every layer."""
    hf = case.hf_config
    shape = (hf["num_key_value_heads"], 10 * page_size + 1, hf["head_dim"])
    return [random_tensor(*shape, seed=seed + layer) for layer in range(2 * hf["num_hidden_layers"])]


def copy_probe(seed: int) -> Values:
    """Fill the pool with numbers, copy, and return all of it."""
    from mini_engine.scheduler.scheduler import ScheduledChunk

    case = random_case(l3.SMALL, seed)
    values = Values()
    for name, (page_size, theirs, own, first, count) in COPIES.items():
        engine = build_engine(case, page_size=page_size, num_pages=10)
        prompt = random_ids(case.vocab_size, 12 if page_size == 4 else 4, seed)
        params = make_params({"max_new_tokens": 2})
        source, target = (engine.entries[engine.add_request(prompt, params)] for _ in range(2))
        source.request.pages = list(theirs)
        target.request.pages = list(own)
        source.output.prompt_logprobs = [None]
        pool = [*engine.worker.pool.keys, *engine.worker.pool.values]
        for tensor, number in zip(pool, numbers(case, seed, page_size), strict=True):
            tensor.copy_(number)
        chunk = ScheduledChunk(target.request, first + count, 1, True, count, source.request)
        engine.worker.pool.copy(*engine.copy_prefix(chunk, source.request))
        own_report = target.output.prompt_logprobs is not source.output.prompt_logprobs
        values[name] = {"pool": pool, "report": table_of(target.output.prompt_logprobs), "own report": own_report}
        target.output.prompt_logprobs = [None, None]
        engine.copy_prefix(chunk, source.request)
        values[name]["a longer report stays"] = len(target.output.prompt_logprobs)
        engine.driver.config = replace(engine.driver.config, device="cuda")
        with PretendGpu():
            values[name]["slots on a GPU"] = [device_of(x).type for x in engine.copy_prefix(chunk, source.request)]
    return values


def copy_spec(seed: int) -> Values:
    """Copy position by position: page and place in it."""
    case = random_case(l3.SMALL, seed)
    values = Values()
    for name, (size, theirs, own, first, count) in COPIES.items():
        pool = numbers(case, seed, size)
        for tensor in pool:
            for place in range(first, first + count):
                source, target = (pages[place // size] * size + place % size for pages in (theirs, own))
                tensor[:, target] = tensor[:, source]
        values[name] = {"pool": pool, "report": [None], "own report": True, "a longer report stays": 2}
        values[name]["slots on a GPU"] = ["cuda", "cuda"]
    return values


REGISTRY.add(
    "L5.K.copy",
    "Keys and values of exactly the copied positions come from the source's pages into the own ones, in every layer; "
    "the report about the prompt comes with them, as a separate list.",
    copy_probe,
    bitwise(copy_spec),
)


# Whole runs ---------------------------------------------------------------------------------------------------------

PROMPT_TOKENS = 19
SAMPLES: dict[str, dict[str, Any]] = {
    "n=4": {"temperature": 1.2, "seed": 40, "n": 4, "max_new_tokens": 9, "logprobs": 1, "prompt_logprobs": 1},
    "n=2, best_of=5": {"temperature": 1.5, "seed": -3, "n": 2, "best_of": 5, "max_new_tokens": 7},
}
LOADS: dict[str, dict[str, Any]] = {
    "all at once": {"max_running_requests": 8, "num_pages": 60, "page_size": 4},
    "5 rows a step": {"max_running_requests": 8, "num_pages": 60, "page_size": 8, "max_tokens_per_step": 5},
    "two at a time": {"max_running_requests": 2, "num_pages": 40, "page_size": 4, "max_tokens_per_step": 16},
    "pages run out": {"max_running_requests": 8, "num_pages": 34, "page_size": 1, "preemption": True},
}
CASES = (("the embedded model", "float32"), (l3.SMALL, "bfloat16"))


def sample_case(name: str, seed: int) -> ModelCase:
    """Return the embedded model or a random one."""
    return embedded_case() if name == "the embedded model" else random_case(name, seed)


def samples_probe(seed: int) -> Values:
    """Generate several samples together with another request, and each seed on its own with L4's driver."""
    values: Values = {}
    for name, dtype in CASES:
        case = sample_case(name, seed)
        prompt = random_ids(case.vocab_size, PROMPT_TOKENS, seed)
        other = random_ids(case.vocab_size, 3, seed)
        driver = l4.build_driver(case, dtype=dtype, batch_invariant=True)
        for wanted, params in SAMPLES.items():
            count = params.get("best_of", params["n"])
            single = [{**params, "n": 1, "best_of": None, "seed": params["seed"] + i} for i in range(count)]
            values[f"{name}, {wanted}, alone"] = [alone(driver, prompt, own) for own in single]
            for load, options in LOADS.items():
                engine = build_engine(case, dtype=dtype, batch_invariant=True, **options)
                poison_freed_pages(engine)
                several = [make_params(params), make_params({"max_new_tokens": 12})]
                samples, _ = squeezed(engine, "preemption" in options).generate([prompt, other], several)
                values[f"{name}, {wanted}, {load}"] = {
                    "samples": [sample_of(sample) for sample in samples],
                    "preempted": sum(len(step.preempted) for step in engine.log),
                    "pages not free": engine.scheduler.allocator.num_pages - engine.scheduler.allocator.num_free,
                }
    return values


def squeezed(engine: Any, squeeze: bool) -> Any:
    """Let requests in as if none would grow, if asked to, and have every step counted. Mutates the engine."""
    step = engine.step
    steps = iter(range(MOST_STEPS))

    def counted() -> Any:
        if next(steps, None) is None:
            raise RuntimeError(f"not done after {MOST_STEPS} steps")
        engine.scheduler.growth.ratio = 0.0 if squeeze else engine.scheduler.growth.ratio
        return step()

    engine.step = counted
    return engine


def sample_of(output: Any) -> dict[str, Any]:
    """Return a sample as plain values, without its logits, which outputs do not keep."""
    return {
        "ids": [int(token) for token in output.token_ids],
        "logprobs": [entries_of(entries) for entries in output.logprobs],
        "prompt_logprobs": table_of(output.prompt_logprobs),
        "finish_reason": [output.finish_reason],
    }


def samples_verdict(seed: int, got: Values) -> list[Failure]:
    """Rank the runs alone; the samples must be the best of them, in order, whatever the load."""
    failures = []
    for name, _ in CASES:
        for wanted, params in SAMPLES.items():
            runs = got[f"{name}, {wanted}, alone"]
            best = ranked(runs, params)
            for load, options in LOADS.items():
                where = f"{name}, {wanted}, {load}"
                run = got[f"{name}, {wanted}, {load}"]
                parts = ["ids", "prompt_logprobs", "finish_reason", *(["logprobs"] if "logprobs" in params else [])]
                want = [{part: runs[index][part] for part in parts} for index in best]
                failures += differences(len(want), len(run["samples"]), None, f"{where}, samples")
                for each, sample in zip(want, run["samples"], strict=False):
                    failures += unlike(each, sample, f"{where}, samples {best}")
                failures += differences(0, run["pages not free"], None, f"{where}, pages that are not free at the end")
                if "preemption" in options and not run["preempted"]:
                    failures.append(Failure(where, "preemptions", "some", "none"))
            if len({tuple(run["ids"]) for run in runs}) < 2:
                failures.append(Failure(f"{name}, {wanted}", "", "answers that differ from seed to seed", "one answer"))
    return failures


def ranked(runs: list[dict[str, Any]], params: dict[str, Any]) -> list[int]:
    """Return which of the runs alone come back: the likeliest n, in their order."""
    if "best_of" not in params:
        return list(range(len(runs)))
    sums = [
        sum(distribution.log_softmax(row)[token] for row, token in zip(run["logits"].tolist(), run["ids"], strict=True))
        for run in runs
    ]
    return sorted(sorted(range(len(runs)), key=lambda index: -sums[index])[: params["n"]])


REGISTRY.add(
    "L5.K.samples",
    "Sample i is what the seed plus i gives alone, to the bit, reports included: in chunks, two at a time, and when "
    "pages run out.",
    samples_probe,
    samples_verdict,
    seconds=60.0,
)


def once_probe(seed: int) -> Values:
    """Generate samples and keep what every step computed and copied."""
    case = random_case(l3.SMALL, seed)
    values = Values()
    for load, options in LOADS.items():
        if "preemption" in options:
            continue
        for length in (1, 2, PROMPT_TOKENS):
            engine = build_engine(case, **options)
            params = make_params({**SAMPLES["n=4"], "prompt_logprobs": None})
            squeezed(engine, False).generate([random_ids(case.vocab_size, length, seed)], params)
            values[f"{load}, prompt of {length}"] = {
                "length": length,
                "steps": [
                    {"chunks": [list(chunk) for chunk in step.chunks], "copied": dict(step.copied)}
                    for step in engine.log
                ],
            }
    return values


def once_verdict(seed: int, got: Values) -> list[Failure]:
    """Count for every position of the prompt who computed it and who copied it."""
    failures = []
    for name, run in got.items():
        length = run["length"]
        computed = [0] * run["length"]
        copied = 0
        for step in run["steps"]:
            for _, first, rows in step["chunks"]:
                for place in range(first, min(first + rows, length)):
                    computed[place] += 1
            copied += sum(step["copied"].values())
        want = [1] * (length - 1) + [4]  # every sample computes the last token, to have a row to sample from
        failures += differences(want, computed, None, f"{name}, how often each of its tokens is computed")
        failures += differences(3 * (length - 1), copied, None, f"{name}, tokens that are copied")
        if len(run["steps"]) > MOST_STEPS // 2:
            failures.append(Failure(name, "steps", "few", str(len(run["steps"]))))
    return failures


REGISTRY.add(
    "L5.K.once",
    "A prompt is computed once for all of its samples: of what the first has computed, the others compute the last "
    "token alone and copy the rest.",
    once_probe,
    once_verdict,
)


# When a sibling is missing -------------------------------------------------------------------------------------------


def orphan_params(index: int = 0, n: int = 1) -> dict[str, Any]:
    """Return a sample's parameters."""
    return {"temperature": 1.1, "seed": 7 + index, "n": n, "max_new_tokens": 8, "prompt_logprobs": 0}


# Steps before it happens, and what happens then: the first sample is aborted; or that, a step later the second one is
# preempted, and the third overtakes it; or the second one is preempted and comes back next to the others.
MISHAPS = (*((steps, "abort") for steps in range(7)), (1, "abort, overtaken"), (4, "preempted"), (8, "preempted"))


def orphans_probe(seed: int) -> Values:
    """Let something happen to the samples while they wait, copy or run; and ask for what is refused."""
    case = random_case(l3.SMALL, seed)
    prompt = random_ids(case.vocab_size, 15, seed)
    driver = l4.build_driver(case, batch_invariant=True)
    values: Values = {"alone": [alone(driver, prompt, orphan_params(index)) for index in range(3)]}
    for steps, what in MISHAPS:
        engine = build_engine(
            case,
            batch_invariant=True,
            max_running_requests=4,
            max_tokens_per_step=6,
            page_size=4,
            num_pages=40,
            policy="shortest" if "overtaken" in what else "fcfs",
        )
        poison_freed_pages(engine)
        names = engine.add_samples(prompt, make_params(orphan_params(n=3)))
        families = [engine.entries[name].request.siblings for name in names]
        values[f"one family, {what} after {steps} steps"] = all(family is families[0] for family in families)
        for _ in range(steps):
            engine.step()
        happen(engine, names, what)
        run_out(engine)
        outputs = [engine.take_output(name) for name in names]
        values[f"{what} after {steps} steps"] = [sample_of(output) for output in outputs]
    engine = build_engine(case, num_pages=2)
    values["refused"] = []
    for wrong in ([], [5] * 40, [5, case.vocab_size]):
        answers = [engine.take_output(name) for name in engine.add_samples(wrong, make_params(orphan_params(n=3)))]
        values["refused"].append([[a.finish_reason, isinstance(a.error, str), list(a.token_ids)] for a in answers])
    values["work after refusals"] = engine.scheduler.has_work
    values["the third of four is refused"] = third_refused(build_engine(case, num_pages=40), prompt)
    return values


def third_refused(engine: Any, prompt: Sequence[int]) -> Values:
    """Let the engine refuse the third sample; return how each that has an id ended, and how many were asked for."""
    add = engine.add_request
    calls = itertools.count(1)

    def adding(*given: Any, **more: Any) -> Any:
        if next(calls) == 3:
            raise ValueError("it does not fit any more")
        return add(*given, **more)

    engine.add_request = adding
    names = engine.add_samples(prompt, make_params(orphan_params(n=4)))
    run_out(engine)
    return {"ends": [engine.take_output(name).finish_reason for name in names], "asked": next(calls) - 1}


def happen(engine: Any, names: list[str], what: str) -> None:
    """Abort the first sample, or send the second one back, or both. Mutates the engine."""
    if "abort" in what:
        engine.abort(names[0])
    if "overtaken" in what:
        engine.step()
    second = engine.entries[names[1]].request
    if what != "abort" and second.state == "running":
        engine.scheduler.preempt(second)


def orphans_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare the samples that were left with their runs alone; a refusal is one finished answer."""
    failures = []
    for steps, what in MISHAPS:
        name = f"{what} after {steps} steps"
        failures += differences(True, got[f"one family, {name}"], None, f"{name}, the samples share one list")
        for index, sample in enumerate(got[name]):
            want = {part: got["alone"][index][part] for part in ("ids", "prompt_logprobs", "finish_reason")}
            if index == 0 and "abort" in what:
                want = {"finish_reason": ["abort"]}
            failures += unlike(want, sample, f"{name}, sample {index}")
    failures += differences([[["error", True, []]]] * 3, got["refused"], None, "refused requests, [reason, why, ids]")
    want = {"ends": ["length", "length", "error"], "asked": 3}
    failures += differences(want, got["the third of four is refused"], None, "the third of four is refused")
    return failures + differences(False, got["work after refusals"], None, "work is left after refusals")


REGISTRY.add(
    "L5.K.orphans",
    "A sample whose source was aborted goes on with what it copied, or computes it; one that was preempted copies the "
    "prompt again and nothing else; a refused request is one finished answer that says why.",
    orphans_probe,
    orphans_verdict,
)
