"""The checks of L4.K: the head of the model and the driver with a sampler.

Owns: whole generations: with everything off those of transformers, with options on those that the specs choose from the
logits of each step. Needs L1 to L3 and all of L4 that a driver uses.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l3 import driver as l3
from smoke.checks.l4 import spec_distribution as distribution
from smoke.checks.l4 import spec_histories as histories
from smoke.checks.l4.spec_histories import Past
from smoke.framework import peer
from smoke.framework.cases import (
    ModelCase,
    embedded_case,
    embedded_eos_ids,
    prompts,
    random_case,
    random_ids,
    random_tensor,
)
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences, remember

REGISTRY = Registry()


def build_driver(case: ModelCase, *, eos: Sequence[int] = (), **options: Any) -> Any:
    """Build the candidate's driver over the candidate's model; ``options`` are those of L3's driver."""
    from mini_engine.sampler.driver import SamplingDriver
    from mini_engine.sampler.sampler import Sampler

    plain = l3.build_driver(case, eos=eos, **options)
    sampler = Sampler(generator=torch.Generator().manual_seed(0))
    attention = plain.make_attention
    return SamplingDriver(plain.model, plain.config, frozenset(eos), sampler=sampler, attention=attention)


def make_params(params: dict[str, Any]) -> Any:
    """Build the parameters."""
    from mini_engine.sampler.params import SamplingParams

    return SamplingParams(**params)


def answer_of(generation: Any) -> dict[str, Any]:
    """Return what a generation holds as plain values."""
    return {
        "ids": [int(token) for token in generation.token_ids],
        "logits": torch.stack([step.logits for step in generation.steps]),
        "finish_reason": str(generation.finish_reason),
    }


# The head -----------------------------------------------------------------------------------------------------------

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale 0.25": {"scale": 0.25},
    "soft cap 3": {"soft_cap": 3.0},
    "scale 2 and soft cap 3": {"scale": 2.0, "soft_cap": 3.0},
    "two shards, scale 0.5 and soft cap 2": {"scale": 0.5, "soft_cap": 2.0, "shards": 2},
    "two shards": {"shards": 2},
}
HEAD_ROWS: dict[str, list[int] | None] = {"all rows": None, "rows 4 0 4": [4, 0, 4], "one row": [2], "no row": []}
HEAD_VOCAB = 40


def head_inputs(seed: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Draw hidden states [T, H] and the head's weight [V, H]."""
    return random_tensor(5, 16, seed=seed, dtype=dtype), random_tensor(HEAD_VOCAB, 16, seed=seed + 1, dtype=dtype)


def head_probe(seed: int) -> Values:
    """Call every head on all rows and on some. A rank has the first half of the vocabulary and is given the rest."""
    from mini_engine.sampler.head import LogitsHead

    values: Values = {}
    for dtype in ("float32", "bfloat16"):
        hidden, weight = head_inputs(seed, dtype)
        for name, options in HEADS.items():
            for rows_name, rows in HEAD_ROWS.items():
                given = {key: value for key, value in options.items() if key != "shards"}
                product = (hidden if rows is None else hidden[rows]) @ weight.T
                width = HEAD_VOCAB // options.get("shards", 1)
                if "shards" in options:
                    given["gather"] = partial(join, product[:, width:])
                index = None if rows is None else torch.tensor(rows, dtype=torch.int64)
                values[f"{name}, {rows_name}, {dtype}"] = LogitsHead(**given)(
                    hidden, index, partial(multiply, weight, width)
                )
    return values


def join(rest: Tensor, part: Tensor) -> Tensor:
    """Put the other rank's shard after this one's."""
    return torch.cat((part, rest), dim=-1)


def multiply(weight: Tensor, width: int, hidden: Tensor) -> Tensor:
    """Return the first ``width`` columns of the product."""
    return (hidden @ weight.T)[:, :width]


def head_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the product's bits where nothing else is on, and for the formulas' values elsewhere."""
    failures = []
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.03)):
        hidden, weight = head_inputs(seed, dtype)
        for name, options in HEADS.items():
            for rows_name, rows in HEAD_ROWS.items():
                product = (hidden if rows is None else hidden[rows]) @ weight.T
                case = f"{name}, {rows_name}, {dtype}"
                plain = not {"scale", "soft_cap"} & set(options)
                cap = options.get("soft_cap")
                values = (product.double() * options.get("scale", 1.0)).tolist()
                if cap is not None:
                    values = [[cap * math.tanh(value / cap) for value in row] for row in values]
                want = product if plain else torch.tensor(values, dtype=torch.float64).view(product.shape)
                failures += differences(want, got[case], None if plain else tolerance, case)
                failures += differences(dtype, str(got[case].dtype).removeprefix("torch."), None, f"{case}, dtype")
    return failures


REGISTRY.add(
    "L4.K.head",
    "The head takes the rows, multiplies, joins the shards, scales and then caps; with everything off it is the "
    "product, to the bit.",
    head_probe,
    head_verdict,
)


# Off ----------------------------------------------------------------------------------------------------------------

OFF_RUNS = ((0, "float32", 24), (4, "float32", 40), (1, "bfloat16", 16))  # prompt, dtype, tokens


def off_probe(seed: int) -> Values:
    """Generate with parameters that ask for nothing but a length, and the same with the greedy driver."""
    values: Values = {}
    for index, dtype, count in OFF_RUNS:
        driver = build_driver(embedded_case(), dtype=dtype, eos=tuple(embedded_eos_ids()))
        done = answer_of(driver.complete(prompts(seed)[index], make_params({"max_new_tokens": count}))[0])
        values[f"prompt {index}, {dtype}"] = {"ids": done["ids"], "logits": done["logits"]}
    return values


def off_peer(seed: int) -> Values:
    """Return transformers' greedy ids and logits, which are those of L3."""
    values: Values = {}
    for index, dtype, count in OFF_RUNS:
        eos = tuple(sorted(embedded_eos_ids()))
        ids, logits = peer.generate(embedded_case(), dtype, tuple(prompts(seed)[index]), count, eos)
        values[f"prompt {index}, {dtype}"] = {"ids": ids, "logits": logits}
    return values


REGISTRY.add(
    "L4.K.off",
    "With SamplingParams() the driver gives the ids and logits of the greedy driver and of transformers, to the bit.",
    off_probe,
    bitwise(off_peer),
    seconds=40.0,
)


# Ends ---------------------------------------------------------------------------------------------------------------


def end_cases(seed: int) -> dict[str, tuple[list[int], dict[str, Any], tuple[int, ...]]]:
    """Return prompt, parameters and the model's end ids of requests whose greedy ids transformers knows."""
    prompt, limit, (token, *_) = l3.end_requests(seed)["an end id in the middle"]
    first = l3.end_requests(seed)["an end id as the first token"][2][0]
    cases: dict[str, tuple[list[int], dict[str, Any], tuple[int, ...]]] = {
        name: (own, {"max_new_tokens": most}, eos) for name, (own, most, eos) in l3.end_requests(seed).items()
    }
    place = limit - 5
    cases["an own stop id"] = (prompt, {"max_new_tokens": limit, "stop_token_ids": [token]}, ())
    cases["an own stop id as the last token"] = (prompt, {"max_new_tokens": place + 1, "stop_token_ids": [token]}, ())
    cases["an own stop id after an end id"] = (prompt, {"max_new_tokens": limit, "stop_token_ids": [token]}, (first,))
    cases["end ids ignored"] = (prompt, {"max_new_tokens": limit, "ignore_eos": True}, (token, first))
    cases["end ids ignored, an own stop id"] = (
        prompt,
        {"max_new_tokens": limit, "ignore_eos": True, "stop_token_ids": [token]},
        (first,),
    )
    return cases


# Output, least length and reason of requests whose end id is 7.
NEWEST: dict[str, tuple[tuple[int, ...], int, str | None]] = {
    "an end id that is not the newest": ((7, 5), 0, None),
    "an end id that a processor has forced": ((5, 7), 4, "stop"),
}


def ends_probe(seed: int) -> Values:
    """Complete every request, and keep ids and reason."""
    from mini_engine.sampler.batch import SamplingRequest

    case = random_case(l3.SMALL, seed)
    values: Values = {}
    for name, (prompt, params, eos) in end_cases(seed).items():
        done = answer_of(build_driver(case, eos=eos).complete(prompt, make_params(params))[0])
        values[name] = {"ids": done["ids"], "finish_reason": done["finish_reason"]}
    for name, (output, least, _) in NEWEST.items():
        request = SamplingRequest([1, 2], make_params({"max_new_tokens": 9, "min_new_tokens": least}), list(output))
        values[name] = build_driver(case, eos=(7,)).finish_reason(request)
    return values


def ends_spec(seed: int) -> Values:
    """Cut transformers' unbounded ids after the first stop id, or at the limit."""
    case = random_case(l3.SMALL, seed)
    values: Values = {name: reason for name, (_, _, reason) in NEWEST.items()}
    for name, (prompt, params, eos) in end_cases(seed).items():
        free, _ = peer.generate(case, "float32", tuple(prompt), params["max_new_tokens"], ())
        stops = histories.stop_set(params, eos)
        places = [place for place, token in enumerate(free) if token in stops]
        values[name] = {
            "ids": free[: places[0] + 1] if places else free,
            "finish_reason": "stop" if places else "length",
        }
    return values


REGISTRY.add(
    "L4.K.ends",
    'An end id or an own stop id ends a sequence with "stop", also as the last allowed token, else "length" does; '
    "ignored end ids do not, own stop ids still do.",
    ends_probe,
    bitwise(ends_spec),
    asks_peer=True,
)


# Several sequences --------------------------------------------------------------------------------------------------

# Length of the prompt and parameters of sequences that run side by side and end at different times.
TOGETHER: tuple[tuple[int, dict[str, Any]], ...] = (
    (9, {"max_new_tokens": 12}),
    (2, {"max_new_tokens": 3}),
    (1, {"max_new_tokens": 20, "temperature": 1.0, "seed": 5, "top_k": 30}),
    (3, {"max_new_tokens": 8}),
    (17, {"max_new_tokens": 5, "temperature": 0.9, "seed": 6, "repetition_penalty": 1.4}),
    (5, {"max_new_tokens": 10}),
    (4, {"max_new_tokens": 24, "repetition_penalty": 1.9, "frequency_penalty": 1.8, "presence_penalty": 1.9}),
    (
        16,
        {"max_new_tokens": 20, "temperature": 1.3, "seed": -5, "top_p": 0.8, "min_p": 0.01, "bad_words": [[1], [9, 2]]},
    ),
    (
        6,
        {"max_new_tokens": 18, "temperature": 1.0, "seed": 5, "logit_bias": {7: 3.0, 8: 3.0}, "frequency_penalty": 1.5},
    ),
)


def together_prompt(case: ModelCase, seed: int, index: int) -> list[int]:
    """Return the prompt of one sequence."""
    return random_ids(case.vocab_size, TOGETHER[index][0], seed + index)


def together_probe(seed: int) -> Values:
    """Run all sequences side by side, and each alone, with batch-invariant arithmetic."""
    from mini_engine.sampler.batch import SamplingRequest

    case = random_case(l3.SMALL, seed)
    driver = build_driver(case, batch_invariant=True, page_size=4)
    requests = [
        SamplingRequest(together_prompt(case, seed, index), make_params({**params, "logprobs": 0}))
        for index, (_, params) in enumerate(TOGETHER)
    ]
    ids: list[list[int]] = [[] for _ in requests]
    logits: list[list[Tensor]] = [[] for _ in requests]
    reported: list[list[float]] = [[] for _ in requests]
    passes: list[int] = []
    make_worker = driver.make_worker
    driver.make_worker = lambda num_pages: counting(make_worker(num_pages), passes)
    for step in (step for steps in driver.run(requests) for step in steps):
        ids[step.index].append(int(step.token_id))
        logits[step.index].append(step.logits)
        reported[step.index].append(float(step.logprobs[0].logprob))
    values: Values = {"log-probabilities": reported, "passes": list(passes)}
    for index, (_, params) in enumerate(TOGETHER):
        alone = answer_of(driver.complete(together_prompt(case, seed, index), make_params(params))[0])
        values[f"sequence {index}"] = {
            "together": {"ids": ids[index], "logits": torch.stack(logits[index])},
            "alone": {"ids": alone["ids"], "logits": alone["logits"]},
        }
    return values | resumed(driver, case, seed, ids[2])


def counting(worker: Any, passes: list[int]) -> Any:
    """Note the sequences of each forward pass of ``worker``. Mutates it."""
    run = worker.run
    worker.run = lambda step: passes.append(len(step.batch.logit_rows)) or run(step)  # type: ignore[func-returns-value]
    return worker


def resumed(driver: Any, case: ModelCase, seed: int, ids: list[int]) -> Values:
    """Run sequence 2 from its seventh token on, and its first step with a head that doubles the logits."""
    from mini_engine.sampler.batch import SamplingRequest
    from mini_engine.sampler.head import LogitsHead

    request = SamplingRequest(together_prompt(case, seed, 2), make_params(TOGETHER[2][1]), ids[:7])
    rest = [int(step.token_id) for (step,) in driver.run([request])]
    driver.head = LogitsHead(scale=2.0)  # the last that this driver does
    doubled = next(driver.stream(request.prompt_ids, request.params)).logits
    return {"resumed after 7 tokens": rest, "by a head of scale 2": doubled}


def together_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the same bits, transformers' logits of the same ids, and the ids that the specs choose from them."""
    case = random_case(l3.SMALL, seed)
    doubled = got["sequence 2"]["alone"]["logits"][0] * 2
    failures = differences(doubled, got["by a head of scale 2"], None, "sequence 2, first logits by a head of scale 2")
    lengths = [params["max_new_tokens"] for _, params in TOGETHER]
    wanted = [sum(length > step for length in lengths) for step in range(max(lengths))]
    failures += differences(wanted, got["passes"], None, "sequences in each forward pass")
    whole = got["sequence 2"]["together"]["ids"]
    failures += differences(whole[7:], got["resumed after 7 tokens"], None, "sequence 2, resumed after 7 tokens: ids")
    for index, (_, params) in enumerate(TOGETHER):
        name = f"sequence {index}"
        prompt = together_prompt(case, seed, index)
        parts = got[name]
        ids, logits = parts["together"]["ids"], parts["together"]["logits"]
        failures += differences(parts["alone"], parts["together"], None, f"{name} {params}, as alone")
        if len(ids) != params["max_new_tokens"] or len(logits) != len(ids):
            failures.append(Failure(name, "number of ids", str(params["max_new_tokens"]), str(len(ids))))
            continue
        want = peer.logits(case, "float32", "sdpa", [*prompt, *ids])[len(prompt) - 1 : -1]
        failures += differences(want, logits, 1e-4, f"{name}, logits of its own ids")
        chosen = [
            choose(row, Past(tuple(prompt), tuple(ids[:step])), params) for step, row in enumerate(logits.tolist())
        ]
        failures += differences(chosen, ids, None, f"{name} {params}, ids by its logits")
        own = [distribution.log_softmax(row)[token] for row, token in zip(logits.tolist(), ids, strict=True)]
        failures += differences(own, got["log-probabilities"][index], 1e-5, f"{name}, log-probabilities of its ids")
    return failures


def choose(row: distribution.Row, past: Past, params: dict[str, Any]) -> int:
    """Choose a token by the specs of all stages."""
    row = histories.processed(row, past, params, ())
    if not params.get("temperature"):
        return histories.greedy(torch.tensor(row, dtype=torch.float32).tolist())
    position = len(past.prompt) + len(past.output) - 1
    return distribution.seeded(histories.filtered(row, params), params["seed"], position)


REGISTRY.add(
    "L4.K.together",
    "Sequences that run side by side and end at different times have the ids and bits that each has alone (under "
    "batch_invariant), and every id is the one that its logits, past and parameters ask for.",
    together_probe,
    together_verdict,
)


# Samples ------------------------------------------------------------------------------------------------------------

SAMPLES: dict[str, dict[str, Any]] = {
    "n=3": {"temperature": 1.2, "seed": 40, "n": 3, "max_new_tokens": 8},
    "n=2, best_of=6": {"temperature": 1.5, "seed": -3, "n": 2, "best_of": 6, "max_new_tokens": 6},
    "n=2, the largest seed": {"temperature": 1.0, "seed": 2**63 - 1, "n": 2, "max_new_tokens": 5},
}


def samples_probe(seed: int) -> Values:
    """Generate several samples at once, and each seed on its own."""
    case = random_case(l3.SMALL, seed)
    driver = build_driver(case, batch_invariant=True)
    prompt = random_ids(case.vocab_size, 6, seed)
    values: Values = {}
    for name, params in SAMPLES.items():
        count = params.get("best_of", params["n"])
        single = {**params, "n": 1, "best_of": None}
        alone = []
        for index in range(count):
            own = params["seed"] + index
            request = make_params({**single, "seed": own - 2**64 if own >= 2**63 else own})
            done = answer_of(driver.complete(prompt, request)[0])
            alone.append({"ids": done["ids"], "logits": done["logits"]})
        several = driver.complete(prompt, make_params(params))
        values[name] = {
            "samples": [[int(done.steps[0].index), [int(token) for token in done.token_ids]] for done in several],
            "alone": alone,
        }
    return values


def samples_verdict(seed: int, got: Values) -> list[Failure]:
    """Rank the lone runs by their summed log-probabilities; the samples must be the best of them, in order."""
    failures = []
    for name, params in SAMPLES.items():
        runs = got[name]["alone"]
        sums = [
            sum(
                distribution.log_softmax(row)[token]
                for row, token in zip(run["logits"].tolist(), run["ids"], strict=True)
            )
            for run in runs
        ]
        best = sorted(sorted(range(len(runs)), key=lambda index: -sums[index])[: params["n"]])
        if "best_of" not in params:
            best = list(range(params["n"]))
        failures += differences(
            [[i, runs[i]["ids"]] for i in best], got[name]["samples"], None, f"{name}, [index, ids]"
        )
        if len({tuple(run["ids"]) for run in runs}) < 2:
            failures.append(Failure(name, "", "answers that differ from seed to seed", "one answer for every seed"))
    return failures


REGISTRY.add(
    "L4.K.samples",
    "Sample i is what the seed plus i gives alone; of best_of samples the n likeliest come back, in the order of their "
    "index.",
    samples_probe,
    samples_verdict,
)


# Errors and reports -------------------------------------------------------------------------------------------------

STUCK: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 6},
    {"max_new_tokens": 6, "allowed_token_ids": [5], "bad_words": [[5]], "prompt_logprobs": 0},
    {"max_new_tokens": 6, "temperature": 1.0, "seed": 2},
    {"max_new_tokens": 6, "allowed_token_ids": [5], "bad_words": [[5, 5]]},
)


def stuck_probe(seed: int) -> Values:
    """Run sequences of which one can never choose a token and one only the first."""
    from mini_engine.sampler.batch import SamplingRequest

    case = random_case(l3.SMALL, seed)
    driver = build_driver(case, batch_invariant=True)
    prompt = random_ids(case.vocab_size, 7, seed)
    values: Values = {f"sequence {index}": [] for index in range(len(STUCK))}
    requests = [SamplingRequest(list(prompt), make_params(params)) for params in STUCK]
    for steps in driver.run(requests):
        for step in steps:
            if step.prompt_logprobs is not None:
                values[f"report of sequence {step.index}'s prompt"] = len(step.prompt_logprobs)
            named = "no token" in str(step.error) if step.error is not None else None
            values[f"sequence {step.index}"].append([int(step.token_id), step.finish_reason, named])
    values["output of the stuck ones"] = [list(map(int, requests[index].output_ids)) for index in (1, 3)]
    for index in (0, 2):
        values[f"sequence {index} alone"] = answer_of(driver.complete(prompt, make_params(STUCK[index]))[0])["ids"]
    return values


def stuck_verdict(seed: int, got: Values) -> list[Failure]:
    """Two sequences end with an error, at once and after a token; the others run to their end."""
    error = [-1, "error", True]
    expected: Values = {"sequence 1": [error], "sequence 3": [[5, None, None], error]}
    for index in (0, 2):
        ids = got[f"sequence {index} alone"]
        expected[f"sequence {index}"] = [[token, None if i < 5 else "length", None] for i, token in enumerate(ids)]
    failures = differences(expected, {name: got[name] for name in expected}, None, "[id, finish reason, error named]")
    failures += differences(
        [[], [5]], got["output of the stuck ones"], None, "output ids of the sequences with an error"
    )
    report = "report of sequence 1's prompt"
    return failures + differences(7, got.get(report, "none"), None, f"entries of the {report}")


REGISTRY.add(
    "L4.K.errors",
    'A sequence that no token can be chosen for ends with "error", -1 and the reason; its neighbours run on as alone.',
    stuck_probe,
    stuck_verdict,
)

# Tokens of the prompt, prompt_logprobs.
ASKING: tuple[tuple[int, int | None], ...] = ((7, 0), (5, None), (1, 0), (12, 3))


def report_probe(seed: int) -> Values:
    """Run sequences of which some ask about their prompt."""
    from mini_engine.sampler.batch import SamplingRequest

    case = random_case(l3.SMALL, seed)
    requests = [
        SamplingRequest(
            random_ids(case.vocab_size, length, seed), make_params({"max_new_tokens": 3, "prompt_logprobs": k})
        )
        for length, k in ASKING
    ]
    values: Values = {f"sequence {index}": [] for index in range(len(ASKING))}
    for steps in build_driver(case).run(requests):
        for step in steps:
            report = step.prompt_logprobs
            values[f"sequence {step.index}"].append(
                None if report is None else [None if entry is None else plain(entry) for entry in report]
            )
    return values


def plain(entries: Sequence[Any]) -> list[Any]:
    """Return the token, its log-probability and how many entries there are."""
    return [int(entries[0].token_id), float(entries[0].logprob), len(entries)]


def report_spec(seed: int) -> Values:
    """Work out the log-probabilities from transformers' logits."""
    case = random_case(l3.SMALL, seed)
    values: Values = {}
    for index, (length, count) in enumerate(ASKING):
        ids = random_ids(case.vocab_size, length, seed)
        rows = [distribution.log_softmax(row) for row in peer.logits(case, "float32", "sdpa", ids).tolist()]
        report = None
        if count is not None:
            report = [None, *([token, row[token], 1 + count] for token, row in zip(ids[1:], rows, strict=False))]
        values[f"sequence {index}"] = [report, None, None]
    return values


REPORTS = remember(report_spec)


def report_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare to 1e-4: transformers computes each prompt alone."""
    return differences(REPORTS(seed), got, 1e-4, "about the prompt: [id, log-probability, entries]")


REGISTRY.add(
    "L4.K.prompt_logprobs",
    "A sequence that asks gets the log-probability of every token of its prompt but the first, with its first step.",
    report_probe,
    report_verdict,
)
