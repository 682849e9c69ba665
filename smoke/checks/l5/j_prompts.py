"""The check of L5.J's reports about prompts, against transformers' logits of each whole prompt."""

from typing import Any

from smoke.checks.l3 import driver as l3
from smoke.checks.l4 import spec_distribution as distribution
from smoke.checks.l4.k_driver import make_params
from smoke.checks.l5.j_engine import Plan, build_engine, drive, run_out, table_of
from smoke.framework import peer
from smoke.framework.cases import random_case
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences, remember

REGISTRY = Registry()

ASKING: tuple[Plan, ...] = (
    Plan(19, {"max_new_tokens": 3, "prompt_logprobs": 2}),
    Plan(1, {"max_new_tokens": 4, "prompt_logprobs": 0}),
    Plan(2, {"max_new_tokens": 3, "prompt_logprobs": 1}),
    Plan(11, {"max_new_tokens": 3}),
    Plan(12, {"max_new_tokens": 4, "prompt_logprobs": 0}, 1),
    Plan(6, {"max_new_tokens": 9, "prompt_logprobs": 1}, 2),
)
STARTS = (1, 7, 18, 19, 40)  # the prompt has 19 tokens
ASKING_LOADS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "1 row a step": {"max_tokens_per_step": 1},
    "2 rows a step": {"max_tokens_per_step": 2},
    "5 rows a step": {"max_tokens_per_step": 5, "page_size": 4},
    "7 rows a step, pages run out": {"max_tokens_per_step": 7, "page_size": 1, "num_pages": 24, "preemption": True},
}


def asking_probe(seed: int) -> Values:
    """Run requests that ask about their prompt; send one back in the middle of its prompt; ask for a part of it."""
    from mini_engine.scheduler.request import RequestOptions

    case = random_case(l3.SMALL, seed)
    given = [plan.prompt(case, seed, index) for index, plan in enumerate(ASKING)]
    values: Values = {}
    for load, changes in ASKING_LOADS.items():
        engine = build_engine(case, max_running_requests=4, **changes)
        run = drive(engine, ASKING, given, squeeze="preemption" in changes)
        values[load] = [request["prompt_logprobs"] for request in run["requests"]]
    for chunk in (4, 5, 6):
        engine = build_engine(case, max_running_requests=2, max_tokens_per_step=chunk)
        other = engine.add_request(given[1], make_params({"max_new_tokens": 50}))
        engine.step()
        name = engine.add_request(given[0], make_params(ASKING[0].params))
        for _ in range(2):
            engine.step()
        engine.scheduler.preempt(engine.entries[name].request)
        engine.abort(other)  # from now on the chunks are one token longer, and their borders are others
        run_out(engine)
        values[f"{chunk} rows a step, preempted in the prompt"] = table_of(engine.take_output(name).prompt_logprobs)
    for start in STARTS:
        engine = build_engine(case, max_tokens_per_step=5)
        options = RequestOptions(prompt_logprobs_start=start)
        name = engine.add_request(given[0], make_params(ASKING[0].params), options=options)
        run_out(engine)
        values[f"from token {start} on"] = table_of(engine.take_output(name).prompt_logprobs)
    return values


def asking_spec(seed: int) -> Values:
    """Work out every report from transformers' logits of the whole prompt."""
    case = random_case(l3.SMALL, seed)
    tables = []
    for index, plan in enumerate(ASKING):
        ids = plan.prompt(case, seed, index)
        count = plan.params.get("prompt_logprobs")
        rows = [distribution.log_softmax(row) for row in peer.logits(case, "float32", "sdpa", ids).tolist()]
        deltas = [distribution.report(row, token, count or 0) for row, token in zip(rows, ids[1:], strict=False)]
        tables.append(None if count is None else [None, *deltas])
    first: list[Any] = tables[0] or []
    preempted = {f"{chunk} rows a step, preempted in the prompt": tables[0] for chunk in (4, 5, 6)}
    parts = {f"from token {start} on": [None] * len(first[:start]) + first[start:] for start in STARTS}
    return {**dict.fromkeys(ASKING_LOADS, tables), **preempted, **parts}


ASKING_SPEC = remember(asking_spec)


def asking_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare to 1e-4: transformers computes each prompt whole and alone."""
    return differences(ASKING_SPEC(seed), got, 1e-4, "about the prompts: [id, log-probability, rank]")


REGISTRY.add(
    "L5.J.prompt_logprobs",
    "The report about a prompt has every token but the first once, however the prompt was cut into chunks and wherever "
    "its request was preempted.",
    asking_probe,
    asking_verdict,
)
