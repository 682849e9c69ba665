"""The checks of L5.J: the engine's step. Many requests share it, and each gets what it gets alone.

Owns: runs of ``mini_engine.engine`` under many loads, and what they must give: transformers' bits with everything off,
the bits of L4's run alone under ``batch_invariant``, and everywhere the token that the specs choose from the logits,
the past and the parameters of its own request. Needs L1 to L4 and all of L5 but the shared prefill.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l3 import driver as l3
from smoke.checks.l4 import k_driver as l4
from smoke.checks.l4 import spec_distribution as distribution
from smoke.checks.l4.k_driver import choose, make_params
from smoke.checks.l4.spec_histories import Past
from smoke.checks.l5 import spec_text as text
from smoke.framework import peer
from smoke.framework.cases import ModelCase, embedded_case, embedded_eos_ids, prompts, random_case, random_ids
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
MOST_STEPS = 400  # no run needs more


@dataclass(frozen=True)
class Plan:
    """A request of a run: tokens of its prompt, its parameters, and before which steps it comes and is aborted."""

    length: int
    params: dict[str, Any]
    arrives: int = 0
    aborted: int | None = None

    def prompt(self, case: ModelCase, seed: int, index: int) -> list[int]:
        """Draw the prompt of the request number ``index``."""
        return random_ids(case.vocab_size, self.length, seed + index)


def build_engine(
    case: ModelCase,
    *,
    eos: Sequence[int] = (),
    gather: Any = None,
    with_text: bool = False,
    constraints: Any = None,
    **options: Any,
) -> Any:
    """Build the candidate's engine; ``options`` are those of L3's driver, ``gather`` sees the product of the head."""
    from mini_engine.llm import make_engine
    from mini_engine.sampler.head import LogitsHead

    driver = l4.build_driver(case, eos=eos, **options)
    driver.head = LogitsHead(gather=gather)
    return make_engine(driver, text.tokenizer() if with_text else None, constraints=constraints)


def few_pages(plans: Sequence[Plan], page_size: int) -> int:
    """Return how many pages the longest request needs, and so how few a pool can have."""
    return max(-(-(plan.length + int(plan.params["max_new_tokens"])) // page_size) for plan in plans)


def drive(
    engine: Any, plans: Sequence[Plan], given: Sequence[list[int]], *, squeeze: bool = False, rng: Any = None
) -> dict[str, Any]:
    """Run all plans through the engine, step by step, and keep what each request was sent and what each step did.

    ``squeeze`` lets requests in as if none would grow, so that pages run out; ``rng`` shuffles the running requests.
    """
    names: dict[str, int] = {}
    deltas: list[list[Any]] = [[] for _ in plans]
    steps = []
    preempted = 0
    for number in range(MOST_STEPS):
        for index, plan in enumerate(plans):
            if plan.arrives == number:
                names[engine.add_request(given[index], make_params(plan.params))] = index
        for name in [name for name, index in names.items() if plans[index].aborted == number]:
            engine.abort(name)
        engine.scheduler.growth.ratio = 0.0 if squeeze else engine.scheduler.growth.ratio
        if rng is not None:
            rng.shuffle(engine.scheduler.running)
        output = engine.step()
        engine.scheduler.check_pages()
        preempted += len(output.preempted)
        for delta in output.deltas:
            deltas[names[delta.request_id]].append(delta)
        sampled = [names[delta.request_id] for delta in output.deltas if delta.token_id is not None]
        steps.append({"chunks": [[names[n], start, count] for n, start, count in output.chunks], "sampled": sampled})
        if len(names) == len(plans) and not engine.scheduler.has_work and not engine.deltas:
            break
    answers = {index: engine.take_output(name) for name, index in names.items()}
    free = engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages
    return {
        "requests": [answer(deltas[index], answers[index]) for index in range(len(plans))],
        "steps": steps,
        "preempted": preempted,
        "all pages free": free,
    }


def run_out(engine: Any) -> None:
    """Step until nothing is left to do. Mutates the engine."""
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            break
        engine.step()


def answer(deltas: Sequence[Any], output: Any) -> dict[str, Any]:
    """Return what a request was sent and what its output holds, as plain values. The two must agree."""
    tokens = [delta for delta in deltas if delta.token_id is not None]
    return {
        "ids": [int(delta.token_id) for delta in tokens],
        "logits": stacked([delta.logits for delta in tokens]),
        "logprobs": [entries_of(delta.logprobs) for delta in tokens if delta.logprobs is not None],
        "prompt_logprobs": table_of(output.prompt_logprobs),
        "text": "".join(delta.text for delta in deltas),
        "finish_reason": [str(delta.finish_reason) for delta in deltas if delta.finish_reason is not None],
        "output": {
            "ids": [int(token) for token in output.token_ids],
            "text": output.text,
            "matched": output.matched,
            "logprobs": [entries_of(entries) for entries in output.logprobs],
            "finish_reason": [output.finish_reason],
            "error": output.error,
            "times": len(output.times.tokens),
        },
    }


def stacked(logits: Sequence[Tensor]) -> Tensor | None:
    """Return rows [V] as one tensor, nothing for no rows."""
    return torch.stack(list(logits)) if logits else None


def entries_of(entries: Sequence[Any]) -> list[list[Any]]:
    """Return reported tokens as plain values."""
    return [[int(entry.token_id), float(entry.logprob), int(entry.rank)] for entry in entries]


def table_of(table: Any) -> list[Any] | None:
    """Return the report about a prompt as plain values."""
    return None if table is None else [None if entries is None else entries_of(entries) for entries in table]


def agreement(request: dict[str, Any], name: str) -> list[Failure]:
    """Ask a request's output for what its deltas said."""
    said = {part: request[part] for part in ("ids", "text", "logprobs", "finish_reason")}
    output = {part: request["output"][part] for part in said}
    return differences(said, output, None, f"{name}, its output against its deltas")


# Off ----------------------------------------------------------------------------------------------------------------


def off_probe(seed: int) -> Values:
    """Stream requests that ask for nothing but a length, with the configuration that asks for nothing."""
    values: Values = {}
    for index, dtype, count in l4.OFF_RUNS:
        engine = build_engine(embedded_case(), dtype=dtype, eos=tuple(embedded_eos_ids()))
        deltas = list(engine.stream(prompts(seed)[index], make_params({"max_new_tokens": count})))
        ids = [int(delta.token_id) for delta in deltas]
        logits = stacked([delta.logits for delta in deltas])
        values[f"prompt {index}, {dtype}"] = {"ids": ids, "logits": logits}
    return values


REGISTRY.add(
    "L5.J.off",
    "With everything off the engine gives the ids and logits of L3 and of transformers, to the bit.",
    off_probe,
    bitwise(l4.off_peer),
    seconds=40.0,
)


# Together -----------------------------------------------------------------------------------------------------------

PLANS: tuple[Plan, ...] = (
    Plan(9, {"max_new_tokens": 12, "logprobs": 0}),
    Plan(2, {"max_new_tokens": 3}),
    Plan(1, {"max_new_tokens": 16, "temperature": 1.0, "seed": 5, "top_k": 30}),
    Plan(17, {"max_new_tokens": 12, "temperature": 0.9, "seed": 6, "repetition_penalty": 1.4, "logprobs": 2}, 1),
    Plan(4, {"max_new_tokens": 18, "repetition_penalty": 1.9, "frequency_penalty": 1.8, "presence_penalty": 1.9}, 2),
    Plan(
        14,
        {"max_new_tokens": 14, "temperature": 1.3, "seed": -5, "top_p": 0.8, "min_p": 0.01, "bad_words": [[1], [9, 2]]},
        3,
    ),
    Plan(
        6,
        {"max_new_tokens": 14, "temperature": 1.0, "seed": 5, "logit_bias": {7: 3.0, 8: 3.0}, "frequency_penalty": 1.5},
        3,
    ),
    Plan(8, {"max_new_tokens": 24, "temperature": 1.2, "seed": 9}, 0, 9),
    Plan(21, {"max_new_tokens": 6, "prompt_logprobs": 1, "min_new_tokens": 6}, 5),
    Plan(
        12,
        {"max_new_tokens": 16, "min_new_tokens": 7, "stop_token_ids": list(range(0, 96, 2)), "presence_penalty": 1.0},
        6,
    ),
)
SHORTEST_FIRST = {"max_running_requests": 8, "preemption": True, "policy": "shortest"}
# What shares the steps, in how many pieces, and with how many pages: ``None`` are as few as the longest request needs.
LOADS: dict[str, dict[str, Any]] = {
    "four at a time": {"max_running_requests": 4, "num_pages": 40},
    "chunks of up to 5 tokens": {"max_running_requests": 6, "max_tokens_per_step": 5, "page_size": 4, "num_pages": 90},
    "pages run out": {**SHORTEST_FIRST, "max_tokens_per_step": 11, "page_size": 1, "num_pages": None},
}
MODELS = (("the embedded model", "float32"), (l3.SMALL, "bfloat16"))


def model_case(name: str, seed: int) -> ModelCase:
    """Return the embedded model or a random one."""
    return embedded_case() if name == "the embedded model" else random_case(name, seed)


def load_options(load: str, plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the configuration of a load."""
    options = dict(LOADS[load])
    options["num_pages"] = options["num_pages"] or few_pages(plans, options["page_size"])
    return options


def poison_freed_pages(engine: Any) -> None:
    """Fill freed pages with NaN, so that a later read shows. Mutates the engine."""
    plain = engine.scheduler.allocator.free
    pool = engine.worker.pool

    def free(pages: Any) -> None:
        plain(pages)
        pool.poison(list(pages))

    engine.scheduler.allocator.free = free


def together_probe(seed: int) -> Values:
    """Run all plans under every load, and each alone with L4's driver."""
    values: Values = {}
    for name, dtype in MODELS:
        case = model_case(name, seed)
        given = [plan.prompt(case, seed, index) for index, plan in enumerate(PLANS)]
        driver = l4.build_driver(case, dtype=dtype, batch_invariant=True)
        for load in LOADS:
            engine = build_engine(case, dtype=dtype, batch_invariant=True, **load_options(load, PLANS))
            poison_freed_pages(engine)
            rng = random.Random(seed)
            values[f"{name}, {load}"] = drive(engine, PLANS, given, squeeze=engine.scheduler.limits.preemption, rng=rng)
        values[f"{name}, alone"] = [alone(driver, p, plan.params) for p, plan in zip(given, PLANS, strict=True)]
    return values


def alone(driver: Any, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """Run one request with L4's driver, which knows no scheduler."""
    (done,) = driver.complete(prompt, make_params(params))
    return {
        "ids": [int(token) for token in done.token_ids],
        "logits": stacked([step.logits for step in done.steps]),
        "logprobs": [entries_of(step.logprobs) for step in done.steps if step.logprobs is not None],
        "prompt_logprobs": table_of(done.steps[0].prompt_logprobs),
        "finish_reason": [str(done.finish_reason)],
    }


def together_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare every request under every load with its run alone, and that with transformers' logits of its ids."""
    failures = []
    for name, dtype in MODELS:
        alone_runs = got[f"{name}, alone"]
        for load, options in LOADS.items():
            run = got[f"{name}, {load}"]
            for index, plan in enumerate(PLANS):
                where = f"{name}, {load}, request {index} {plan.params}"
                failures += like_alone(run["requests"][index], alone_runs[index], plan, where)
            if not run["all pages free"] or ("preemption" in options and run["preempted"] < 2):
                failures.append(Failure(f"{name}, {load}", "pages", "they run out, and are free at the end", str(run)))
        if dtype == "float32":
            failures += anchored(model_case(name, seed), alone_runs, seed)
    return failures


def unlike(want: dict[str, Any], have: dict[str, Any], where: str) -> list[Failure]:
    """Compare the parts of ``want`` to the bit, but the report about a prompt to 1e-5: float32 and float64 both do."""
    return [
        failure
        for part, value in want.items()
        for failure in differences(value, have[part], 1e-5 if part == "prompt_logprobs" else None, f"{where}, {part}")
    ]


def like_alone(request: dict[str, Any], alone_runs: dict[str, Any], plan: Plan, where: str) -> list[Failure]:
    """Compare a request with its run alone; an aborted one with the run's beginning."""
    failures = agreement(request, where)
    if request["finish_reason"] != ["abort"] or plan.aborted is None:
        return failures + unlike(alone_runs, request, where)
    count = len(request["ids"])
    beginning = {"ids": alone_runs["ids"][:count], "logprobs": alone_runs["logprobs"][:count]}
    failures += unlike(beginning, request, where)
    return failures + (differences(alone_runs["logits"][:count], request["logits"], None, where) if count else [])


def anchored(case: ModelCase, alone_runs: Sequence[dict[str, Any]], seed: int) -> list[Failure]:
    """Compare the runs alone with transformers' logits of the same ids."""
    failures = []
    for index, (plan, run) in enumerate(zip(PLANS, alone_runs, strict=True)):
        prompt = plan.prompt(case, seed, index)
        want = peer.logits(case, "float32", "sdpa", [*prompt, *run["ids"]])[len(prompt) - 1 : -1]
        failures += differences(want, run["logits"], 1e-4, f"request {index}, alone, logits of its own ids")
    return failures


REGISTRY.add(
    "L5.J.together",
    "Whatever shares its steps, in whichever chunks, preempted or not, a request has the ids, logits and "
    "log-probabilities that it has alone, to the bit (under batch_invariant).",
    together_probe,
    together_verdict,
    seconds=60.0,
)


# Rows ---------------------------------------------------------------------------------------------------------------

ROW_PLANS: tuple[Plan, ...] = (
    Plan(13, {"max_new_tokens": 5}),
    Plan(3, {"max_new_tokens": 9}),
    Plan(1, {"max_new_tokens": 4}),
    Plan(10, {"max_new_tokens": 3}, 2),
    Plan(7, {"max_new_tokens": 6}, 4),
)
ROW_LOADS: dict[str, dict[str, Any]] = {
    "no limit": {},
    "6 rows a step": {"max_tokens_per_step": 6},
    "1 row a step": {"max_tokens_per_step": 1},
}


def rows_probe(seed: int) -> Values:
    """Count the rows of logits of every step."""
    case = random_case(l3.SMALL, seed)
    given = [plan.prompt(case, seed, index) for index, plan in enumerate(ROW_PLANS)]
    values: Values = {}
    for load, options in ROW_LOADS.items():
        rows: list[int] = []
        engine = build_engine(case, gather=counter(rows), max_running_requests=4, **options)
        plain = engine.step
        before: list[int] = []

        def step(plain: Any = plain, before: list[int] = before, rows: list[int] = rows) -> Any:
            before.append(sum(rows))
            return plain()

        engine.step = step
        run = drive(engine, ROW_PLANS, given)
        ends = [*before[1:], sum(rows)]
        values[load] = {
            "steps": [[s["chunks"], s["sampled"], b - a] for s, a, b in zip(run["steps"], before, ends, strict=True)],
            "ids": [request["ids"] for request in run["requests"]],
        }
    return values


def counter(rows: list[int]) -> Any:
    """Return a stage of the head that notes how many rows pass it."""

    def count(logits: Tensor) -> Tensor:
        rows.append(len(logits))
        return logits

    return count


def rows_peer(seed: int) -> list[list[int]]:
    """Return transformers' greedy ids."""
    case = random_case(l3.SMALL, seed)
    return [
        peer.generate(case, "float32", tuple(plan.prompt(case, seed, i)), plan.params["max_new_tokens"], ())[0]
        for i, plan in enumerate(ROW_PLANS)
    ]


def rows_verdict(seed: int, got: Values) -> list[Failure]:
    """Follow every step: a chunk samples exactly if it reaches the newest token, and only such chunks have logits."""
    failures = []
    for load in ROW_LOADS:
        computed = [0] * len(ROW_PLANS)
        tokens = [plan.length for plan in ROW_PLANS]
        for number, (chunks, sampled, rows) in enumerate(got[load]["steps"]):
            due = []
            for index, start, count in chunks:
                case = f"{load}, step {number}, request {index}"
                failures += differences(computed[index], start, None, f"{case}, first position")
                computed[index] = start + count
                if computed[index] == tokens[index]:
                    due.append(index)
                    tokens[index] += 1
            failures += differences(sorted(due), sorted(sampled), None, f"{load}, step {number}, who gets a token")
            failures += differences(len(due), rows, None, f"{load}, step {number}, rows given to the head")
        failures += differences(rows_peer(seed), got[load]["ids"], None, f"{load}, ids of every request")
    return failures[:8]


REGISTRY.add(
    "L5.J.rows",
    "The head computes one row for each chunk that reaches its request's newest token, and none for the others, which "
    "sample nothing.",
    rows_probe,
    rows_verdict,
)


# Each by its own past -----------------------------------------------------------------------------------------------


def past_probe(seed: int) -> Values:
    """Run all plans with plain arithmetic, whose bits follow the batch, while pages run out."""
    case = random_case(l3.SMALL, seed)
    given = [plan.prompt(case, seed, index) for index, plan in enumerate(PLANS)]
    values: Values = {}
    for load in ("chunks of up to 5 tokens", "pages run out"):
        engine = build_engine(case, **load_options(load, PLANS))
        rng = random.Random(seed + 1)
        values[load] = drive(engine, PLANS, given, squeeze=engine.scheduler.limits.preemption, rng=rng)["requests"]
    return values


def past_verdict(seed: int, got: Values) -> list[Failure]:
    """Choose every token anew from its logits, its request's whole past and parameters, and work out its report."""
    case = random_case(l3.SMALL, seed)
    failures = []
    for load, requests in got.items():
        for index, (plan, request) in enumerate(zip(PLANS, requests, strict=True)):
            where = f"{load}, request {index} {plan.params}"
            prompt = plan.prompt(case, seed, index)
            ids = request["ids"]
            logits = [] if request["logits"] is None else request["logits"].tolist()
            pasts = [Past(tuple(prompt), tuple(ids[:count])) for count in range(len(ids))]
            chosen = [choose(row, past, plan.params) for row, past in zip(logits, pasts, strict=True)]
            failures += differences(chosen, ids, None, f"{where}, ids by its logits and past")
            count = plan.params.get("logprobs")
            if count is not None:
                rows = [distribution.log_softmax(row) for row in logits]
                want = [distribution.report(row, token, count) for row, token in zip(rows, ids, strict=True)]
                failures += differences(want, request["logprobs"], 1e-5, f"{where}, log-probabilities")
            failures += agreement(request, where)
            failures += right_end(request, plan, where)
    return failures


def right_end(request: dict[str, Any], plan: Plan, where: str) -> list[Failure]:
    """Ask for the reason that follows from the ids; an abort may come before it."""
    ids = request["ids"]
    stops = plan.params.get("stop_token_ids", ())
    early = [place for place, token in enumerate(ids[:-1]) if token in stops]
    if early or len(ids) > plan.params["max_new_tokens"]:
        return [Failure(where, "ids", "none after the end", str(ids))]
    if plan.aborted is not None and request["finish_reason"] == ["abort"]:
        return []
    reason = "stop" if ids and ids[-1] in stops else "length"
    if reason == "length" and len(ids) < plan.params["max_new_tokens"]:
        return [Failure(where, "number of ids", str(plan.params["max_new_tokens"]), str(len(ids)))]
    return differences([reason], request["finish_reason"], None, f"{where}, finish reason")


REGISTRY.add(
    "L5.J.past",
    "Every token is the one that its own logits, past and parameters ask for, and so is its report, with plain "
    "arithmetic too: penalties, seeds and counters survive preemption and changing neighbours.",
    past_probe,
    past_verdict,
    seconds=40.0,
)
