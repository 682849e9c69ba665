"""The checks of L4.G: rows that come and go, and everything that has to follow them.

Owns: random scripts of filter, merge and cumulate, and what every row must look like afterwards: as if it had been
built from its history. Stages are applied one by one, so that the pipeline itself (L4.H) is not needed here.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l4 import spec_histories as histories
from smoke.checks.l4.e_processors import rows_failures
from smoke.checks.l4.spec_histories import Past
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Registry, Values, noting
from smoke.framework.compare import bitwise, close, differences
from smoke.framework.pretend_gpu import PretendGpu, device_of

REGISTRY = Registry()
VOCAB = 24
EOS = (3, 20)
IDS = range(10)  # what scripts generate: few ids, so that they repeat and complete bad words
FLAGS = ("all_greedy", "need_top_k", "need_top_p", "need_min_p", "need_logprobs")
COLUMNS = ("temperature", "top_k", "top_p", "min_p", "positions")
DTYPES = {
    "temperature": "float32",
    "top_k": "int64",
    "top_p": "float64",
    "min_p": "float32",
    "seeds": "int64",
    "positions": "int64",
}

SCRIPTS = range(13)

# What rows ask for. Every processor is absent from some of them, and no two rows of a script share one by accident.
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "logprobs": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.2},  # greedy: it needs no filter
    {"temperature": 0.7, "top_k": 5, "frequency_penalty": 0.5, "bad_words": [[4], [1, 2]], "seed": 7},
    {"presence_penalty": 0.6, "repetition_penalty": 0.8, "logit_bias": {4: 2.0, 9: -3.0, 1: 4.0}},
    {"temperature": 1.2, "min_p": 0.1, "allowed_token_ids": [*range(0, 20, 2), 1, 3], "logprobs": 2},
    {"min_new_tokens": 9, "stop_token_ids": [2, 5], "temperature": 0.5, "top_p": 0.8, "seed": -(2**40)},
    {"logits_processors": {"disallowed_tokens": {"token_ids": [1, 5]}}, "frequency_penalty": -0.5},
    {"bad_words": [[1, 2, 3], [6], [2, 2]], "logit_bias": {7: -1.0}},
    {"min_new_tokens": 30, "ignore_eos": True, "stop_token_ids": [8], "temperature": 1.0, "seed": 2**62},
    {"repetition_penalty": 1.8, "frequency_penalty": 0.3, "presence_penalty": -0.7, "logit_bias": {2: 5.0}},
)


@dataclass(frozen=True)
class Line:
    """A row as the spec sees it."""

    past: Past
    params: dict[str, Any]


Operation = tuple[str, Any]


def new_lines(rng: random.Random, count: int, choices: Sequence[int] = range(len(WISHES))) -> list[Line]:
    """Draw rows, some of them with output already: a request that was preempted comes back with its past."""
    lines = []
    for _ in range(count):
        prompt = tuple(rng.choice(IDS) for _ in range(rng.randint(1, 6)))
        output = tuple(rng.choice(IDS) for _ in range(rng.choice((0, 0, 3, 80))))
        lines.append(Line(Past(prompt, output), WISHES[rng.choice(choices)]))
    return lines


def script(seed: int, number: int) -> list[Operation]:
    """Write a script that starts with three rows: tokens for all of them, rows to keep, rows that join.

    In the last one a row with every token joins a hundred rows with one token each.
    """
    if number == SCRIPTS[-1]:
        crowd = [Line(Past((token % VOCAB,), ()), WISHES[1 + token % 3]) for token in range(100)]
        return [("start", crowd), ("merge", [Line(Past(tuple(range(VOCAB)), ()), WISHES[1])])]
    rng = random.Random(f"rows {seed} {number}")
    choices = rng.sample(range(len(WISHES)), 6)  # few kinds of rows, so that a processor often belongs to one side
    lines = new_lines(rng, 3, choices)
    operations: list[Operation] = [("start", lines)]
    size = len(lines)
    for _ in range(24):
        kind = rng.choice(("cumulate", "cumulate", "filter", "merge"))
        if kind == "cumulate" and size:
            operations.append((kind, [rng.choice(IDS) for _ in range(size)]))
        elif kind == "filter":
            size = rng.randint(0 if rng.random() < 0.2 else min(1, size), size)
            now = len(after(operations))
            operations.append((kind, rng.sample(range(now), size)))  # in any order
        elif kind == "merge" and size < 9:
            joining = new_lines(rng, rng.randint(1, 4), choices)
            size += len(joining)
            operations.append((kind, joining))
    return operations


def after(operations: Sequence[Operation]) -> list[Line]:
    """Play operations on plain lists."""
    lines: list[Line] = []
    for kind, value in operations:
        if kind == "filter":
            lines = [lines[row] for row in value]
        elif kind == "cumulate":
            lines = [replace(line, past=line.past.after([token])) for line, token in zip(lines, value, strict=True)]
        else:
            lines = lines + list(value)
    return lines


def make_batch(lines: Sequence[Line], device: str = "cpu") -> Any:
    """Build the candidate's batch of these rows."""
    from mini_engine.sampler.batch import SamplingBatch, SamplingRequest
    from mini_engine.sampler.params import SamplingParams
    from mini_engine.sampler.processors.base import Vocabulary

    requests = [
        SamplingRequest(list(line.past.prompt), SamplingParams(**line.params), list(line.past.output)) for line in lines
    ]
    return SamplingBatch.from_requests(requests, Vocabulary(VOCAB, frozenset(EOS)), device)


def play(batch: Any, operation: Operation) -> Any:
    """Do one operation."""
    kind, value = operation
    if kind == "start":
        return make_batch(value)
    if kind == "merge":
        batch.merge(make_batch(value))
    elif kind == "filter":
        batch.filter(list(value))
    else:
        batch.cumulate(list(value))
    return batch


def staged(batch: Any, logits: Tensor) -> Tensor:
    """Apply the stages of a batch to a copy."""
    work = logits.clone()
    for _, apply in batch.stages():
        apply(work)
    return work


def script_logits(rows: int, seed: int) -> Tensor:
    """Draw logits [rows, V]."""
    return 3.0 * random_tensor(rows, VOCAB, seed=seed)


def script_probe(seed: int) -> Values:
    """Play scripts; after every operation apply the batch's stages to fresh logits, and those of a batch built anew."""
    values: Values = {}
    for number in SCRIPTS:
        operations = script(seed, number)
        batch = None
        log: list[Any] = []
        with noting() as done:
            for index, operation in enumerate(operations):
                done.append(told(operation))
                batch = play(batch, operation)
                lines = after(operations[: index + 1])
                logits = script_logits(len(lines), seed + index)
                if lines:
                    log.append([staged(batch, logits), staged(make_batch(lines), logits)])
                else:
                    log.append([len(batch), len(batch.processors)])
        values[f"script {number}"] = log
    return values


def script_verdict(seed: int, got: Values) -> list[Failure]:
    """Work out every row from its history."""
    failures = []
    for number in SCRIPTS:
        operations = script(seed, number)
        for index, (kind, _) in enumerate(operations):
            lines = after(operations[: index + 1])
            name = f"script {number}, after operation {index} ({kind})"
            pair = got[f"script {number}"][index]
            if not lines:
                failures += differences([0, 0], pair, None, f"{name}, [rows, processors]")
                continue
            logits = script_logits(len(lines), seed + index)
            rows = [
                histories.processed(logits[row].tolist(), line.past, line.params, EOS) for row, line in enumerate(lines)
            ]
            found = rows_failures(name, [str(line.params) for line in lines], logits, rows, pair[0])
            found += differences(pair[1], pair[0], None, f"{name}, as if built from the histories")
            story = ", then ".join(map(told, operations[: index + 1]))
            failures += [replace(failure, note=f"{failure.note}; operations: {story}") for failure in found]
    return failures


def told(operation: Operation) -> str:
    """Return an operation as a reader follows it: rows by number, and how many join."""
    kind, value = operation
    return f"{kind} {value}" if kind in ("filter", "cumulate") else f"{kind} with {len(value)} rows"


REGISTRY.add(
    "L4.G.script",
    "After any sequence of filter, merge and cumulate every row's logits come out as if its batch had just been built "
    "from the histories, to the bit, and as the spec has them.",
    script_probe,
    script_verdict,
)


def columns_probe(seed: int) -> Values:
    """Play scripts and read the tensors and flags after every operation."""
    values: Values = {}
    for number in SCRIPTS:
        batch = None
        log = []
        with noting() as done:
            for operation in script(seed, number):
                done.append(told(operation))
                batch = play(batch, operation)
                seeded = [row for row, params in enumerate(batch.params) if params.seed is not None]
                log.append(
                    {
                        "rows": len(batch),
                        **{name: getattr(batch, name) for name in COLUMNS},
                        "seeds of the rows that have one": batch.seeds[seeded],
                        "random_rows": [int(row) for row in batch.random_rows],
                        "num_tokens": [int(count) for count in batch.num_tokens],
                        "least_temperature": float(batch.least_temperature),
                        **{name: bool(getattr(batch, name)) for name in FLAGS},
                    }
                )
        values[f"script {number}"] = log
    values["dtypes"] = {name: str(getattr(batch, name).dtype).removeprefix("torch.") for name in DTYPES}
    with PretendGpu():
        there = make_batch(after(script(seed, 0)[:1]), "cuda")
        there.merge(make_batch([Line(Past((1,), ()), wish) for wish in WISHES], "cuda"))
        there.filter([*range(1, len(there))])
        values["devices of a batch on a GPU"] = {name: device_of(getattr(there, name)).type for name in DTYPES}
    return values


def columns_of(lines: Sequence[Line]) -> dict[str, Any]:
    """Read the columns off the rows' parameters."""

    def column(name: str, off: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([line.params.get(name, off) for line in lines], dtype=dtype)

    lengths = [len(line.past.prompt) + len(line.past.output) for line in lines]
    drawn = [line.params for line in lines if line.params.get("temperature", 0.0) > 0]
    seeds = [line.params["seed"] for line in lines if "seed" in line.params]
    return {
        "rows": len(lines),
        "temperature": column("temperature", 0.0, torch.float32),
        "top_k": column("top_k", 0, torch.int64),
        "top_p": column("top_p", 1.0, torch.float64),
        "min_p": column("min_p", 0.0, torch.float64),
        "positions": torch.tensor([length - 1 for length in lengths], dtype=torch.int64),
        "seeds of the rows that have one": torch.tensor(seeds, dtype=torch.int64),
        "random_rows": [row for row, line in enumerate(lines) if line.params.get("temperature", 0.0) > 0],
        "num_tokens": lengths,
        "all_greedy": not drawn,
        "least_temperature": min([1.0, *(params["temperature"] for params in drawn)]),
        **{f"need_{name}": any(name in params for params in drawn) for name in ("top_k", "top_p", "min_p")},
        "need_logprobs": any("logprobs" in line.params for line in lines),
    }


def columns_spec(seed: int) -> Values:
    """Work out the columns after every operation."""
    values: Values = {}
    for number in SCRIPTS:
        operations = script(seed, number)
        values[f"script {number}"] = [columns_of(after(operations[: i + 1])) for i in range(len(operations))]
    return {**values, "dtypes": DTYPES, "devices of a batch on a GPU": dict.fromkeys(DTYPES, "cuda")}


REGISTRY.add(
    "L4.G.columns",
    "Parameters, seeds, positions and flags describe the rows that are there now, after every change, and are on the "
    "batch's device.",
    columns_probe,
    close(columns_spec, 1e-6),
)

# Two batches and what becomes of them: parameters by number, and for each operation the processors that must be there.
STAGES = ("penalties", "min_new_tokens", "logit_bias", "allowed_token_ids", "bad_words", "a_rule", "disallowed_tokens")
RULED = len(WISHES)  # a row with a processor that the check registers
MEMBERS: dict[str, list[Operation]] = {
    "the last row with a bias leaves": [("start", [3, 0, 1]), ("filter", [1, 2]), ("filter", [0])],
    "the last row with penalties leaves": [("start", [0, 9, 5]), ("filter", [0, 2]), ("filter", [])],
    "plain rows meet rows with everything": [("start", [0, 0]), ("merge", [2, 4, 6]), ("filter", [0, 1])],
    "rows with everything meet plain rows": [("start", [2, 4, 6]), ("merge", [0, 0]), ("filter", [3, 4])],
    "a bias meets penalties": [("start", [7]), ("merge", [9]), ("filter", [1]), ("merge", [7])],
    "a registered one meets built-in ones": [("start", [6]), ("merge", [8]), ("merge", [4])],
    "registered ones by name": [("start", [6]), ("merge", [RULED])],
    "an empty batch is filled again": [("start", [3]), ("filter", []), ("merge", [5, 3])],
}


def member_operations(operations: Sequence[Operation]) -> list[Operation]:
    """Turn numbers of parameters into rows."""
    wishes = (*WISHES, {"logits_processors": {"a_rule": {}}})
    lines = {number: Line(Past((1, 2, 8)), params) for number, params in enumerate(wishes)}
    return [(kind, value if kind == "filter" else [lines[number] for number in value]) for kind, value in operations]


def label_kind() -> Any:
    """Return a processor that holds a word per row and does nothing."""
    from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary

    class Label(LogitsProcessor[str]):
        """Holds a word per row and does nothing."""

        @classmethod
        def start(cls, history: History, arguments: Any, vocabulary: Vocabulary) -> str | None:
            return "a word"

        def apply(self, logits: Tensor) -> None:
            pass

    return Label


def members_probe(seed: int) -> Values:
    """List the processors after every operation."""
    from mini_engine.sampler.processors.registry import register_processor

    register_processor("a_rule")(label_kind())
    values: Values = {}
    for name, operations in MEMBERS.items():
        batch = None
        log = []
        for operation in member_operations(operations):
            batch = play(batch, operation)
            log.append([str(stage) for stage, _ in batch.stages()])
        values[name] = log
    return values


def members_spec(seed: int) -> Values:
    """List the processors that some row wants, in the order of the pipeline."""

    def wanted(params: dict[str, Any]) -> set[str]:
        found = {name for name in params if name in STAGES} | set(params.get("logits_processors", ()))
        return found | {"penalties" for name in params if name.endswith("_penalty")}

    values: Values = {}
    for name, operations in MEMBERS.items():
        played = member_operations(operations)
        values[name] = []
        for index in range(len(played)):
            present = {stage for line in after(played[: index + 1]) for stage in wanted(line.params)}
            values[name].append([stage for stage in STAGES if stage in present])
    return values


REGISTRY.add(
    "L4.G.processors",
    "A batch has exactly the processors that its rows need, in the order of the pipeline, whichever row brought them.",
    members_probe,
    bitwise(members_spec),
)

ROW_STATES = {0: "a", 2: "c", 3: "d"}
WIDTHS = ((2, 300), (300, 2))
KEEPS: tuple[list[int], ...] = ([0, 1, 2, 3], [3, 0], [2], [1], [], [2, 1, 0, 3])


def states_probe(seed: int) -> Values:
    """Call the three verbs of a processor of its own on a few rows, and merge tables of two widths."""
    kind = label_kind()

    def listed(processor: Any) -> list[list[Any]]:
        return sorted([int(row), str(state)] for row, state in processor.states.items())

    values: Values = {}
    for keep in KEEPS:
        label = kind(dict(ROW_STATES))
        label.filter(keep)
        values[f"filter {keep}"] = listed(label)
    left = kind(dict(ROW_STATES))
    right = kind({0: "w", 1: "x", 4: "z"})
    right.shift(5)
    values["shift 5"] = listed(right)
    left.merge(right)
    values["merge"] = listed(left)
    return values | {f"tables of {left} and {right} tokens": merged(left, right) for left, right in WIDTHS}


def merged(left: int, right: int) -> Tensor:
    """Merge penalties of a request each, which has generated so many tokens -> zeros that they have changed [2, V]."""
    from mini_engine.sampler.penalties import Penalties
    from mini_engine.sampler.processors.base import History, Vocabulary

    rules = {"repetition_penalty": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.0}
    sides: list[Any] = []
    for count in (left, right):
        past = History([0], list(range(count)))
        state: Any = Penalties.start(past, rules, Vocabulary(400))
        sides.append(Penalties.build({0: state}, [past]))
    sides[1].shift(1)
    sides[0].merge(sides[1])
    logits = torch.zeros(2, 400)
    sides[0].apply(logits)
    return logits


def states_spec(seed: int) -> Values:
    """Move the words row by row."""
    values: Values = {
        f"filter {keep}": [[new, ROW_STATES[old]] for new, old in enumerate(keep) if old in ROW_STATES]
        for keep in KEEPS
    }
    shifted: list[list[Any]] = [[5, "w"], [6, "x"], [9, "z"]]
    for widths in WIDTHS:
        penalised = [[-float(token < width) for token in range(400)] for width in widths]
        values["tables of {} and {} tokens".format(*widths)] = torch.tensor(penalised)
    return {**values, "shift 5": shifted, "merge": [[0, "a"], [2, "c"], [3, "d"], *shifted]}


REGISTRY.add(
    "L4.G.states",
    "filter keeps states under their new row numbers, shift renumbers them and merge takes the other side's over, also "
    "tables of another width.",
    states_probe,
    bitwise(states_spec),
)
