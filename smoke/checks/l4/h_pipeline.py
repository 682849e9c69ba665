"""The checks of L4.H: the whole sampler on mixed batches.

Owns: what leaves a row alone, the order of the stages, and that rows do not depend on each other. What a single
filter, draw or processor does is checked by its own task; errors, generator and reports are in ``h_choice.py``.
"""

import math
import random
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l4 import spec_distribution as distribution
from smoke.checks.l4 import spec_histories as histories
from smoke.checks.l4.e_processors import rows_failures
from smoke.checks.l4.g_rows import EOS, VOCAB, Line, make_batch
from smoke.checks.l4.spec_distribution import Row
from smoke.checks.l4.spec_histories import Past
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 12,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "min_new_tokens": 20,
    "stop_token_ids": [6],
    "logit_bias": {4: 1.5, 9: -2.0},
    "allowed_token_ids": list(range(1, VOCAB)),
    "bad_words": [[7], [1, 2]],
    "seed": 11,
    "logits_processors": {"disallowed_tokens": {"token_ids": [8]}},
}
PAST = Past((1, 2, 8, 2), (4, 9, 4, 1))
# Every option at its off value; alias forms are turned into these by the parameters themselves.
OFF: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": (),
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "logits_processors": None,
    "seed": None,
}


def make_sampler(seed: int = 0, **options: Any) -> Any:
    """Build the candidate's sampler with a seeded generator."""
    from mini_engine.sampler.sampler import Sampler

    return Sampler(generator=torch.Generator().manual_seed(seed), **options)


def wide_logits(rows: int, seed: int, dtype: str = "float32") -> Tensor:
    """Draw logits [rows, V] with a tie for the first place in every third row."""
    logits = 1.5 * random_tensor(rows, VOCAB, seed=seed)
    for row in range(0, rows, 3):
        places = random.Random(f"tie {seed} {row}").sample(range(VOCAB), 3)
        logits[row, places] = float(logits[row].max()) + 1.0
    return logits.to(getattr(torch, dtype))


def ids_of(output: Any) -> list[int]:
    """Return the chosen ids as plain numbers."""
    return [int(token) for token in output.token_ids]


# Off ----------------------------------------------------------------------------------------------------------------


def plain_probe(seed: int) -> Values:
    """Process and sample rows that ask for nothing."""
    values: Values = {}
    for dtype in ("float32", "bfloat16"):
        logits = wide_logits(9, seed, dtype)
        batch = make_batch([Line(PAST, {})] * 9)
        values[dtype] = {"processed": batch.process(logits), "ids": ids_of(make_sampler()(logits, batch))}
    return values


def plain_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the caller's own logits and the lowest of the likeliest ids."""
    failures = []
    for dtype, part in got.items():
        logits = wide_logits(9, seed, dtype)
        ids = [histories.greedy(row) for row in logits.tolist()]
        failures += differences({"processed": logits, "ids": ids}, part, None, dtype)
    return failures


REGISTRY.add(
    "L4.H.off",
    "With everything off the logits come through untouched, in their dtype, and the id is the lowest of the likeliest.",
    plain_probe,
    plain_verdict,
)


def neighbours(params: dict[str, Any]) -> list[Line]:
    """Put a row between two that turn everything on."""
    return [Line(PAST, EVERYTHING), Line(PAST, params), Line(PAST, EVERYTHING)]


def alone_probe(seed: int) -> Values:
    """Process and filter a row with one option off, between busy rows: greedy, and drawn at temperature 1."""
    logits = wide_logits(3, seed)
    values: Values = {}
    for name, off in OFF.items():
        batch = make_batch(neighbours({name: off}))
        drawn = make_batch(neighbours({name: off, "temperature": 1.0}))
        values[f"{name}={off}"] = {
            "processed": batch.process(logits)[1],
            "filtered": make_sampler().filter_rows(drawn.process(logits), drawn, [0, 1, 2])[1],
            "id": ids_of(make_sampler()(logits, batch))[1],
        }
    return values


def alone_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the row's own bits."""
    row = wide_logits(3, seed)[1]
    expected = {"processed": row, "filtered": row, "id": histories.greedy(row.tolist())}
    failures = []
    for name, off in OFF.items():
        case = f"{name}={off}"
        failures += differences(expected, got[case], None, f"{case} between rows with everything on")
    return failures


REGISTRY.add(
    "L4.H.off_in_company",
    "A row with an option at its off value keeps its bits through all stages between rows that turn everything on.",
    alone_probe,
    alone_verdict,
)


# Mixed batches ------------------------------------------------------------------------------------------------------


def mixed_lines(seed: int) -> list[Line]:
    """Draw 36 rows with every option on in some of them, each alone and all together, greedy and drawn in turn."""
    rng = random.Random(f"mixed {seed}")
    lines = []
    for index in range(36):
        names = [name for name in EVERYTHING if name not in ("temperature", "seed") and rng.random() < 0.4]
        params = {name: EVERYTHING[name] for name in names}
        if index % 3:
            params |= {"temperature": (0.5, 1.0, 1.7)[index % 4 % 3], "seed": seed + index * 10**9}
        if "top_k" in params:
            params["top_k"] = (1, 3, 9, VOCAB - 1, VOCAB + 5)[index % 5]
        past = Past(
            tuple(rng.randrange(VOCAB) for _ in range(1 + index)), tuple(rng.randrange(10) for _ in range(index))
        )
        lines.append(Line(past, params))
    return lines


def mixed_probe(seed: int) -> Values:
    """Sample the batch at once and row by row, in two dtypes; keep the caller's tensor as it is afterwards."""
    values: Values = {}
    lines = mixed_lines(seed)
    for dtype in ("float32", "bfloat16"):
        logits = wide_logits(len(lines), seed, dtype)
        batch = make_batch(lines)
        together = ids_of(make_sampler()(logits, batch))
        alone = [ids_of(make_sampler()(logits[i : i + 1], make_batch([line])))[0] for i, line in enumerate(lines)]
        values[dtype] = {
            "processed": batch.process(logits),
            "filtered": make_sampler().filter_rows(
                batch.process(logits)[batch.random_rows].float(), batch, list(batch.random_rows)
            ),
            "together": together,
            "row by row": alone,
            "the caller's logits": logits,
        }
    return values


def mixed_rows(seed: int, dtype: str) -> tuple[Tensor, list[Row], list[Row]]:
    """Return the logits, the processed rows and the filtered ones of the rows that are drawn."""
    lines = mixed_lines(seed)
    logits = wide_logits(len(lines), seed, dtype)
    pairs = zip(logits.tolist(), lines, strict=True)
    rows = [histories.processed(row, line.past, line.params, EOS) for row, line in pairs]
    drawn = [histories.filtered(row, line.params) for row, line in zip(rows, lines, strict=True) if is_drawn(line)]
    return logits, rows, drawn


def is_drawn(line: Line) -> bool:
    """Whether a row is not greedy."""
    return bool(line.params.get("temperature"))


def mixed_processed_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare processed logits, supports and the caller's tensor."""
    failures = []
    names = [str(line.params) for line in mixed_lines(seed)]
    drawn_names = [str(line.params) for line in mixed_lines(seed) if is_drawn(line)]
    for dtype, part in got.items():
        logits, rows, drawn = mixed_rows(seed, dtype)
        failures += differences(logits, part["the caller's logits"], None, f"{dtype}, the caller's logits")
        failures += rows_failures(f"{dtype}, processed", names, logits.float(), rows, part["processed"])
        untouched = torch.full((len(drawn), VOCAB), math.nan)  # nothing here has to keep its bits
        failures += rows_failures(f"{dtype}, filtered", drawn_names, untouched, drawn, part["filtered"])
    return failures


def mixed_ids_verdict(seed: int, got: Values) -> list[Failure]:
    """Work out every id: the lowest of the likeliest, or the one whose noise wins."""
    failures = []
    lines = mixed_lines(seed)
    for dtype, part in got.items():
        _, rows, drawn = mixed_rows(seed, dtype)
        filtered = iter(drawn)
        expected = []
        for row, line in zip(rows, lines, strict=True):
            position = len(line.past.prompt) + len(line.past.output) - 1
            if is_drawn(line):
                expected.append(distribution.seeded(next(filtered), line.params["seed"], position))
            else:
                expected.append(histories.greedy([torch.tensor(value).item() for value in row]))
        failures += differences(expected, part["together"], None, f"{dtype}, ids")
        failures += differences(expected, part["row by row"], None, f"{dtype}, ids of every row alone")
    return failures


REGISTRY.add(
    "L4.H.processed",
    "In a batch of 36 different rows every row's stages come out as the spec has them, in float32 also for bfloat16 "
    "logits, and the caller's logits are not written to.",
    mixed_probe,
    mixed_processed_verdict,
)
REGISTRY.add(
    "L4.H.ids",
    "Greedy rows are the lowest of the likeliest processed ids, seeded rows the winners of their own noise, the same "
    "alone and together.",
    mixed_probe,
    mixed_ids_verdict,
)


# The order of the stages --------------------------------------------------------------------------------------------


def log_row(*masses: float) -> tuple[float, ...]:
    """Return logits whose softmax is ``masses``."""
    return tuple(math.log(mass) for mass in masses)


# Rows whose values or supports tell one order from another. What is not here cannot be told apart: a multiplicative
# penalty commutes with the temperature, a ban with a bias and with another ban.
ORDERS: dict[str, tuple[tuple[float, ...], tuple[int, ...], dict[str, Any]]] = {
    "frequency before temperature": ((2.0, 1.0, 0.5), (0, 0), {"temperature": 0.5, "frequency_penalty": 0.5}),
    "presence before temperature": ((2.0, 1.0, 0.5), (0, 0), {"temperature": 2.0, "presence_penalty": 0.5}),
    "bias before temperature": ((2.0, 1.0, 0.5), (), {"temperature": 0.5, "logit_bias": {1: 1.25}}),
    "repetition before bias": (
        (1.0, 1.0, -0.5),
        (0, 2),
        {"temperature": 1.0, "repetition_penalty": 1.9, "logit_bias": {0: 3.0, 2: 2.0}},
    ),
    "bias before top-k": ((2.0, 1.0, 0.5), (), {"temperature": 1.0, "logit_bias": {2: 3.0}, "top_k": 1}),
    "allowed before top-k": ((2.0, 1.0, 0.5), (), {"temperature": 1.0, "allowed_token_ids": [1, 2], "top_k": 1}),
    "temperature before top-p": (log_row(0.5, 0.3, 0.2), (), {"temperature": 2.0, "top_p": 0.45}),
    "temperature before min-p": (log_row(0.5, 0.2, 0.3), (), {"temperature": 3.0, "min_p": 0.5}),
    "top-k before top-p": (log_row(0.5, 0.2, 0.15, 0.15), (), {"temperature": 1.0, "top_k": 2, "top_p": 0.6}),
    "top-p before min-p": (log_row(0.5, 0.2, 0.1, 0.1, 0.1), (), {"temperature": 1.0, "top_p": 0.65, "min_p": 0.3}),
}


def order_cases(dtype: torch.dtype) -> tuple[Tensor, list[Line]]:
    """Return logits [N, V], banned beyond a row's own, and the rows."""
    logits = torch.full((len(ORDERS), VOCAB), -torch.inf, dtype=dtype)
    for row, (values, _, _) in enumerate(ORDERS.values()):
        logits[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return logits, [Line(Past((23,), output), params) for _, output, params in ORDERS.values()]


def order_probe(seed: int) -> Values:
    """Sample the rows and report the whole final distribution, by the log-probabilities that a row can ask for."""
    logits, lines = order_cases(torch.float32)
    asked = [Line(line.past, {**line.params, "logprobs": -1, "logprobs_mode": "processed"}) for line in lines]
    values: Values = {}
    for order in ("sequential", "joint"):
        output = make_sampler(seed, filter_order=order)(logits, make_batch(asked))
        for name, reported in zip(ORDERS, output.logprobs, strict=True):
            row = torch.zeros(VOCAB)
            for entry in reported[1:]:
                row[entry.token_id] = math.exp(entry.logprob)
            values[f"{name}, {order}"] = row
    return values


def order_spec(seed: int) -> Values:
    """Work out every row's final probabilities."""
    logits, lines = order_cases(torch.float32)
    values: Values = {}
    for name, row, line in zip(ORDERS, logits.tolist(), lines, strict=True):
        stages = histories.processed(row, line.past, line.params, EOS)
        final = histories.filtered(stages, line.params)
        values[f"{name}, sequential"] = torch.tensor(distribution.probabilities(final), dtype=torch.float64)
        scaled = [value / line.params["temperature"] for value in stages]
        whole = set(distribution.top_p_ids(scaled, line.params.get("top_p", 1.0)))
        kept = distribution.only(scaled, whole & set(distribution.top_k_ids(scaled, line.params.get("top_k", 0))))
        kept = distribution.only(kept, distribution.min_p_ids(kept, line.params.get("min_p", 0.0)))
        values[f"{name}, joint"] = torch.tensor(distribution.probabilities(kept), dtype=torch.float64)
    return values


def order_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare supports exactly and probabilities to 1e-5."""
    failures = []
    for name, want in order_spec(seed).items():
        failures += differences((want > 0), got[name] > 0, None, f"{name}, tokens that can come")
        failures += differences(want, got[name], 1e-5, f"{name}, probabilities")
    return failures


REGISTRY.add(
    "L4.H.order",
    "Penalties, bias and bans come before the temperature, then top-k, top-p of what is left, min-p of what is left; "
    "jointly, top-k and top-p judge the same distribution.",
    order_probe,
    order_verdict,
    needs=("L4.I",),
)


# The parameters of rows that are sampled together, the order, and the filters that some row needs.
NEEDED: dict[str, tuple[list[dict[str, Any]], str, list[str]]] = {
    "temperature alone": ([{}], "sequential", ["temperature"]),
    "top-k 1": ([{"top_k": 1}], "sequential", ["temperature", "top-k"]),
    "top-p": ([{"top_p": 0.99}], "sequential", ["temperature", "top-p"]),
    "min-p": ([{"min_p": 0.01}], "sequential", ["temperature", "min-p"]),
    "all in one row": (
        [{"min_p": 0.1, "top_p": 0.5, "top_k": 3}],
        "sequential",
        ["temperature", "top-k", "top-p", "min-p"],
    ),
    "each in another row": (
        [{"min_p": 0.1}, {"top_p": 0.5}, {"top_k": 3}],
        "sequential",
        ["temperature", "top-k", "top-p", "min-p"],
    ),
    "top-k, jointly": ([{"top_k": 2}], "joint", ["temperature", "top-k"]),
    "top-p, jointly": ([{"top_p": 0.9}], "joint", ["temperature", "top-p"]),
    "both, jointly": (
        [{"top_k": 2}, {"top_p": 0.9, "min_p": 0.1}],
        "joint",
        ["temperature", "top-k and top-p", "min-p"],
    ),
}


def names_probe(seed: int) -> Values:
    """Ask for the filters of drawn rows, and for the names that a trace shows of each row."""
    from mini_engine.sampler.trace import SamplingTrace

    values: Values = {}
    for name, (rows, order, _) in NEEDED.items():
        batch = make_batch([Line(PAST, {"temperature": 0.7, "seed": 1, **params}) for params in rows])
        trace = SamplingTrace()
        sampler = make_sampler(filter_order=order, trace=trace)
        sampler(wide_logits(len(rows), seed), batch)
        values[name] = {"filters": [str(stage) for stage, _ in sampler.filters(batch, list(range(len(rows))))]}
        for row in range(len(rows)):
            values[name][f"trace of row {row}"] = [str(stage.name) for stage in trace.stages(row)]
    return values


def names_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the needed ones in order; one that no row needs changes nothing and may stand between."""
    known = ("logits", "temperature", "top-k and top-p", "top-k", "top-p", "min-p")
    failures = []
    for name, (_, _, needed) in NEEDED.items():
        for where, names in got[name].items():
            if [each for each in names if each in needed] != needed or not set(names) <= set(known):
                failures.append(Failure(f"{name}: {where}", "names", str(needed), str(names)))
    return failures


REGISTRY.add(
    "L4.H.names",
    "The filters that some row needs come in order and under their names, also in what a trace shows of each row.",
    names_probe,
    names_verdict,
)


def mask_probe(seed: int) -> Values:
    """Let a registered processor allow only id 5 of one row, and a grammar ban id 5 of both rows."""
    from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
    from mini_engine.sampler.processors.registry import register_processor

    @register_processor("smoke_force")
    class Force(LogitsProcessor[int]):
        """Leaves one id, whatever was banned before."""

        @classmethod
        def start(cls, history: History, arguments: Any, vocabulary: Vocabulary) -> int | None:
            return int(arguments["token_id"])

        def apply(self, logits: Tensor) -> None:
            for row, token in self.states.items():
                logits[row] = -torch.inf
                logits[row, token] = 0.0

    def ban(logits: Tensor, ops: Any) -> None:
        logits[:, 5] = -torch.inf

    forced = {"logits_processors": {"smoke_force": {"token_id": 5}}}
    logits = wide_logits(3, seed)
    logits[:, 5] = 30.0
    batch = make_batch([Line(PAST, forced), Line(PAST, {}), Line(PAST, {**forced, "bad_words": [[5]]})])
    free = ids_of(make_sampler()(logits, batch))
    batch.final_mask = ban
    output = make_sampler()(logits, batch)
    plain = make_batch([Line(PAST, {})])
    plain.final_mask = ban
    return {
        "the mask is given the operations": ops_given(logits[:1]),
        "without a grammar": free,
        "with a grammar": ids_of(output),
        "errors": {str(row): str(words) for row, words in output.errors.items()},
        "a grammar and nothing else": ids_of(make_sampler()(logits[1:2], plain)),
        "dtype of bfloat16 logits under a grammar alone": str(plain.process(logits[1:2].bfloat16()).dtype),
        "the caller's logits": logits,
    }


def ops_given(logits: Tensor) -> list[bool]:
    """Sample a row with operations of its own -> whether the mask is given them, each time that it is called."""
    from mini_engine.sampler.batch import TorchOps

    own = TorchOps()
    given = []
    batch = make_batch([Line(PAST, {})])
    batch.final_mask = lambda logits, ops: given.append(ops is own)
    make_sampler(ops=own)(logits, batch)
    return given


def mask_verdict(seed: int, got: Values) -> list[Failure]:
    """Give the grammar the last word: forced rows end empty, the other takes its next likeliest."""
    logits = wide_logits(3, seed)
    logits[:, 5] = 30.0
    second = histories.greedy([value if token != 5 else -math.inf for token, value in enumerate(logits[1].tolist())])
    failures = differences([5, 5, 5], got["without a grammar"], None, "ids without a grammar")
    failures += differences([-1, second, -1], got["with a grammar"], None, "ids with a grammar that bans id 5")
    failures += differences([second], got["a grammar and nothing else"], None, "a batch with nothing but a grammar")
    failures += differences(logits, got["the caller's logits"], None, "the caller's logits")
    name = "dtype of bfloat16 logits under a grammar alone"
    failures += differences("torch.float32", got[name], None, name)
    failures += differences([True], got["the mask is given the operations"], None, "the sampler's ops are passed on")
    for row in ("0", "2"):
        words = got["errors"].get(row, "no error")
        if "grammar" not in words:
            failures.append(Failure(f"error of row {row}", "", "words that name the stage grammar", words))
    return failures


REGISTRY.add(
    "L4.H.final_mask",
    "Registered processors run after the bans, the grammar's mask after everything: nothing can allow what it bans.",
    mask_probe,
    mask_verdict,
)
