"""The checks of L4's processors one by one: penalties (L4.E), constraints (L4.F), processors with a memory (L4.J).

Owns: probes that start a processor from histories, feed it tokens and look at what it does to logits. Batches of rows
that come and go are in ``g_rows.py``. Nothing here builds ``SamplingParams`` or a batch: the tasks stay apart.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l4 import spec_histories as histories
from smoke.checks.l4.spec_distribution import Row
from smoke.checks.l4.spec_histories import Past
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Probe, Registry, Values, Verdict
from smoke.framework.compare import bitwise, close, differences

REGISTRY = Registry()
VOCAB = 97
EOS = (3, 41)
PROCESSORS = "mini_engine.sampler.processors"
# Whose rows must be those of a processor that was fed token by token.
SAME_ROWS = ("applied again", "started from the whole past", "started from it, the last row first")


@dataclass(frozen=True)
class Case:
    """One row: its past, the arguments of its processor, and the tokens that come next."""

    name: str
    past: Past
    arguments: Mapping[str, Any]
    future: tuple[int, ...] = ()


Cases = Callable[[int], list[Case]]
Spec = Callable[[Row, Past, histories.Options], Row]


def start(module: str, kind: str, rows: Sequence[tuple[Past, Mapping[str, Any]]], step: int = 1) -> Any:
    """Build the candidate's processor for the rows that it has something to do for. ``step`` -1: the last one first."""
    from importlib import import_module

    from mini_engine.sampler.processors.base import History, Vocabulary

    processor = getattr(import_module(module), kind)
    states = {}
    pasts = []
    for row, (past, arguments) in list(enumerate(rows))[::step]:
        history = History(list(past.prompt), list(past.output))
        state = processor.start(history, arguments, Vocabulary(VOCAB, frozenset(EOS)))
        if state is not None:
            states[row] = state
            pasts.append(history)
    return processor.build(states, pasts)


def logits_of(cases: Sequence[Case], seed: int) -> Tensor:
    """Draw logits [N, V], some of them banned already, some zero, and some rows of one sign."""
    logits = 4.0 * random_tensor(len(cases), VOCAB, seed=seed)
    for row, case in enumerate(cases):
        if "all negative" in case.name:
            logits[row] = -logits[row].abs() - 0.1
        if "zeros" in case.name:
            logits[row] = 0.0
        if "likeliest" in case.name:
            logits[row, case.past.output[0]] = 20.0
        if "banned" in case.name:
            logits[row, 4:9] = -torch.inf
    return logits


def follow(module: str, kind: str, cases_of: Cases, steps: Sequence[int]) -> Probe:
    """Return a probe that feeds a processor its rows' futures and applies it after each of ``steps`` tokens.

    It is compared with a processor that was started from the longer past.
    """

    def probe(seed: int) -> Values:
        cases = cases_of(seed)
        logits = logits_of(cases, seed)
        moving = start(module, kind, [(case.past, case.arguments) for case in cases])
        values: Values = {}
        for step in range(max(steps) + 1):
            if step:
                earlier = [(state, repr(state)) for state in moving.states.values()]
                moving.cumulate([case.future[step - 1] for case in cases])
                values[f"states before token {step}"] = all(repr(state) == text for state, text in earlier)
            if step in steps:
                longer = [(case.past.after(case.future[:step]), case.arguments) for case in cases]
                processors = [moving, moving, *(start(module, kind, longer, way) for way in (1, -1))]
                rows = {name: logits.clone() for name in ("followed", *SAME_ROWS)}
                for processor, result in zip(processors, rows.values(), strict=True):
                    processor.apply(result)
                values[f"after {step} more tokens"] = rows
        return values

    return probe


def expect(cases_of: Cases, spec: Spec, steps: Sequence[int]) -> Verdict:
    """Return the verdict of ``follow``: every row as the spec has it, and all ways the same bits."""

    def verdict(seed: int, got: Values) -> list[Failure]:
        cases = cases_of(seed)
        logits = logits_of(cases, seed)
        failures = []
        for step in steps:
            name = f"after {step} more tokens"
            rows = [
                spec(logits[row].tolist(), case.past.after(case.future[:step]), case.arguments)
                for row, case in enumerate(cases)
            ]
            names = [case.name for case in cases]
            failures += rows_failures(name, names, logits, rows, got[name]["followed"])
            for other in SAME_ROWS:
                failures += differences(got[name]["followed"], got[name][other], None, f"{name}, {other}")
        for step in range(1, max(steps) + 1):
            name = f"states before token {step}"
            failures += differences(True, got[name], None, f"{name} are as they were: advance returns a new one")
        return failures

    return verdict


def rows_failures(case: str, names: Sequence[str], before: Tensor, expected: Sequence[Row], got: Any) -> list[Failure]:
    """Compare rows with float64 ones: bits where nothing changes, minus infinity exactly, 1e-5 elsewhere."""
    want = torch.tensor(list(expected), dtype=torch.float64)
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != torch.float32:
        return differences(want.float(), got, None, case)
    changed = (want != before.double()) & want.isfinite()
    near = changed & ((got.double() - want).abs() <= 1e-5 * want.abs().clamp(min=1.0))
    failures = differences(want.float(), torch.where(near, want.float(), got), None, case)
    return [
        Failure(f"{f.case}, {row_name(f.place, names)}", token_name(f.place), f.expected, f.got, f.note)
        for f in failures
    ]


def token_name(place: str) -> str:
    """Return "token id 7" for "row 3, column 7"."""
    return f"token id {place.partition(', column ')[2]}" if ", column " in place else place


def row_name(place: str, names: Sequence[str]) -> str:
    """Return the name of the row that "row 3, column 7" means."""
    digits = place.removeprefix("row ").partition(",")[0]
    return names[int(digits)] if digits.isdecimal() and int(digits) < len(names) else place


def register(
    check_id: str, proves: str, module: str, kind: str, cases: Cases, spec: Spec, steps: Sequence[int] = (0,)
) -> None:
    """Register the check of one processor."""
    REGISTRY.add(check_id, proves, follow(module, kind, cases, steps), expect(cases, spec, steps))


def draw(seed: int, name: str, count: int, among: Sequence[int] = range(VOCAB)) -> tuple[int, ...]:
    """Draw ids, with repeats."""
    rng = random.Random(f"{name} {seed}")
    return tuple(rng.choice(among) for _ in range(count))


# L4.E ---------------------------------------------------------------------------------------------------------------

FORMULA_LOGITS = (3.0, 0.5, 0.0, -0.25, -7.0, -torch.inf, 2.0, -2.0, 6.0, -1.0)
FORMULA_COUNTS = (0.0, 1.0, 2.0, 5.0, 1.0, 3.0, 0.0, 0.0, 11.0, 1.0)
FORMULA_STRENGTHS = (1.3, 0.5, 1.7, 2.0, 0.9, 1.2, 0.75, 1.5, 0.25, 1.1)
FORMULAS = (("repeat", 1), ("frequency", 1), ("presence", 1), ("frequency", -1), ("presence", -1))


def formula_probe(seed: int) -> Values:
    """Call the three penalties on a few entries, the additive ones with negative strengths, too."""
    from mini_engine.sampler import penalties

    logits, counts, strengths = map(torch.tensor, (FORMULA_LOGITS, FORMULA_COUNTS, FORMULA_STRENGTHS))
    values: Values = {}
    for name, sign in FORMULAS:
        given = logits.clone()
        changed = getattr(penalties, f"{name}_penalty")(given, counts, sign * strengths)
        values[f"{name}, {sign}"] = changed.nan_to_num(neginf=-1e30)
        values[f"{name}, {sign}: the caller's logits"] = bool(torch.equal(given, logits))
    return values


def formula_spec(seed: int) -> Values:
    """Compute them number by number."""
    entries = list(zip(FORMULA_LOGITS, FORMULA_COUNTS, FORMULA_STRENGTHS, strict=True))
    values: Values = {}
    for name, sign in FORMULAS:
        columns = {
            "repeat": [x / s if x > 0 else x * s for x, _, s in entries],
            "frequency": [x - sign * s * n for x, n, s in entries],
            "presence": [x - sign * s if n else x for x, n, s in entries],
        }
        values[f"{name}, {sign}"] = torch.tensor(columns[name], dtype=torch.float64).clamp(min=-1e30).float()
        values[f"{name}, {sign}: the caller's logits"] = True
    return values


REGISTRY.add(
    "L4.E.formulas",
    "Repetition divides positive and multiplies negative logits; frequency counts every occurrence, presence once.",
    formula_probe,
    close(formula_spec, 1e-5),
)


def strengths(repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> dict[str, float]:
    """Return the arguments of the penalties."""
    return {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}


def penalty_cases(seed: int) -> list[Case]:
    """Return rows with none, one and three penalties and pasts of all lengths; the ids 0 and V - 1 in some of them."""
    last = VOCAB - 1
    few = range(10, 20)
    prompt = draw(seed, "prompt", 12)
    output = draw(seed, "output", 9, few)
    loud = draw(seed, "loud", 1)[0]
    return [
        Case("repetition, a past of every token", Past(tuple(range(VOCAB))), strengths(1.3)),
        Case("no penalty", Past(prompt, output), strengths()),
        Case("repetition, ids 0 and V - 1 in the prompt", Past((0, 7, last, 7, 0), (0, 5, 5)), strengths(1.3)),
        Case("no penalty and the same past", Past((0, 7, last, 7, 0), (0, 5, 5)), strengths()),
        Case("frequency", Past(prompt, (*output, *output[:4], 0)), strengths(frequency=0.7)),
        Case("negative presence, one banned stretch", Past(prompt, (4, 4, 6, last)), strengths(presence=-0.4)),
        Case("all three, all negative", Past(prompt, output), strengths(0.8, 0.3, 0.6)),
        Case("all three, the likeliest was seen", Past(prompt, (loud, *output, loud)), strengths(1.5, 0.9, 0.25)),
        Case("repetition without output", Past(prompt), strengths(1.9)),
        Case("frequency and presence without output", Past(prompt), strengths(1.0, 1.5, 1.5)),
        Case("all three, zeros", Past(prompt, output), strengths(1.4, 0.2, 0.1)),
        Case("repetition, a past of one token", Past((11,)), strengths(1.7)),
    ]


def long_penalty_cases(seed: int) -> list[Case]:
    """Return rows that go on for 60 tokens: some out of few ids, one through more than 64 different ones."""
    everything = list(range(VOCAB))
    random.Random(seed).shuffle(everything)
    alphabets = (range(5), range(30), range(VOCAB))
    cases = [
        Case(
            f"60 tokens of {len(among)} ids",
            Past(draw(seed, "p", 1 + 8 * index), draw(seed, "o", 4 * index, among)),
            strengths(1.0 + 0.2 * index, 0.4, 0.3 * index),
            draw(seed, f"f{index}", 60, among),
        )
        for index, among in enumerate(alphabets)
    ]
    far = Case("90 different tokens", Past(tuple(everything[:30])), strengths(1.2, 0.5), tuple(everything[30:90]))
    off = Case("no penalty", Past((1, 2)), strengths(), draw(seed, "off", 60))
    often = Case("one token 200 times and 60 more", Past((1,), (9,) * 200), strengths(1.1, 0.01), (9,) * 60)
    return [cases[0], off, *cases[1:], far, often]


PENALTIES = "mini_engine.sampler.penalties"
register(
    "L4.E.rows",
    "Every row gets its own penalties for its own past: repetition for prompt and output, the others for the output, "
    "in this order; other rows and other ids keep their bits.",
    PENALTIES,
    "Penalties",
    penalty_cases,
    histories.penalised,
)
register(
    "L4.E.replay",
    "With up to 60 more tokens the table has counted what a replay of the whole past counts, to the bit.",
    PENALTIES,
    "Penalties",
    long_penalty_cases,
    histories.penalised,
    (0, 1, 2, 30, 60),
)


# L4.F ---------------------------------------------------------------------------------------------------------------


def length_cases(seed: int) -> list[Case]:
    """Return rows with a least length, with end ids of the model, of their own, both and none."""

    def arguments(least: int, own: Sequence[int] = (), ignore_eos: bool = False) -> dict[str, Any]:
        return {"min_new_tokens": least, "stop_token_ids": tuple(own), "ignore_eos": ignore_eos}

    prompt, future = draw(seed, "length", 7), draw(seed, "length future", 5)
    return [
        Case("off", Past(prompt), arguments(0, (9,)), future),
        Case("3 tokens, the model's end ids", Past(prompt), arguments(3), future),
        Case("4 tokens, own stop ids too", Past((8,)), arguments(4, (9, 0)), future),
        Case("2 tokens, end ids ignored", Past(prompt), arguments(2, (9,), True), future),
        Case("2 tokens, end ids ignored, no others", Past(prompt), arguments(2, (), True), future),
        Case("5 tokens, 3 of them there", Past(prompt, (1, 2, 1)), arguments(5, (VOCAB - 1,)), future),
        Case("3 tokens, all there", Past((8,), (1, 2, 1)), arguments(3), future),
        Case("1 token, an own stop id that is an end id", Past(prompt), arguments(1, (EOS[0],)), future),
    ]


def length_spec(row: Row, past: Past, arguments: histories.Options) -> Row:
    """Know the end ids of these checks."""
    return histories.long_enough(row, past, arguments, EOS)


def bias_cases(seed: int) -> list[Case]:
    """Return rows with biases, some on ids that are banned already."""
    return [
        Case("off", Past((1,)), {"logit_bias": None}),
        Case("three ids", Past((1,)), {"logit_bias": {0: 2.5, VOCAB - 1: -1.25, 17: 100.0}}),
        Case("another row's", Past((1, 2)), {"logit_bias": {17: -3.5}}),
        Case("on a banned stretch", Past((1,)), {"logit_bias": {5: 50.0, 6: -50.0, 30: 1.0}}),
        Case("off again", Past((1,)), {"logit_bias": None}),
    ]


def allowed_cases(seed: int) -> list[Case]:
    """Return rows with lists of allowed ids."""
    many = tuple(sorted(set(draw(seed, "allowed", 40))))
    return [
        Case("one id", Past((1,)), {"allowed_token_ids": (0,)}),
        Case("off", Past((1,)), {"allowed_token_ids": None}),
        Case("many ids", Past((1,)), {"allowed_token_ids": many}),
        Case("ids of a banned stretch", Past((1,)), {"allowed_token_ids": (4, 5, 60, VOCAB - 1)}),
    ]


WORDS = ((5,), (1, 2), (1, 2, 3))


def bad_word_cases(seed: int) -> list[Case]:
    """Return rows with words of one, two and three tokens and outputs that nearly spell them."""
    future = draw(seed, "words", 24, (1, 2, 3, 9))
    long = ((7, 7, 7, 8), (7, 8), (7, 7))
    return [
        Case("output 9 1 2", Past((4,), (9, 1, 2)), {"bad_words": WORDS}, future),
        Case("prompt 1 2, no output", Past((9, 1, 2)), {"bad_words": WORDS}, future),
        Case("prompt 1, output 2", Past((9, 1), (2,)), {"bad_words": WORDS}, future),
        Case("off", Past((1, 2), (1, 2)), {"bad_words": ()}, future),
        Case("one-token words", Past((1,), (1,)), {"bad_words": ((0,), (VOCAB - 1,))}, future),
        Case("a word of equal tokens", Past((7,), (7, 7, 7)), {"bad_words": long}, draw(seed, "sevens", 24, (7, 8))),
        Case("a word longer than the output", Past((1,), (1, 2)), {"bad_words": ((1, 2, 1, 2, 3),)}, future),
    ]


# A constraint, its arguments, and the tokens of the output so far.
IDLE: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "a least length of 0": ("MinNewTokens", {"min_new_tokens": 0, "stop_token_ids": (9,), "ignore_eos": False}, ()),
    "a least length that is reached": (
        "MinNewTokens",
        {"min_new_tokens": 2, "stop_token_ids": (9,), "ignore_eos": False},
        (1, 2),
    ),
    "a least length without end ids": (
        "MinNewTokens",
        {"min_new_tokens": 2, "stop_token_ids": (), "ignore_eos": True},
        (),
    ),
    "no bias": ("LogitBias", {"logit_bias": None}, ()),
    "all ids allowed": ("AllowedTokens", {"allowed_token_ids": None}, ()),
    "no bad words": ("BadWords", {"bad_words": ()}, (1,)),
}


def idle_probe(seed: int) -> Values:
    """Start constraints that have nothing to do."""
    from mini_engine.sampler.processors import constraints
    from mini_engine.sampler.processors.base import History, Vocabulary

    values: Values = {}
    for name, (kind, arguments, output) in IDLE.items():
        state = getattr(constraints, kind).start(History([3], output), arguments, Vocabulary(VOCAB, frozenset(EOS)))
        values[name] = "nothing to do" if state is None else "a state"
    arguments = {"min_new_tokens": 1, "stop_token_ids": (96, 41, 0, 64), "ignore_eos": False}
    short = constraints.MinNewTokens.start(History([3], []), arguments, Vocabulary(VOCAB, frozenset(EOS)))
    values["the stop ids of a least length"] = None if short is None else [int(token) for token in short.stop_ids]
    return values


def idle_spec(seed: int) -> Values:
    """Expect no state, so that no step goes through the row, and stop ids in rising order."""
    return {**dict.fromkeys(IDLE, "nothing to do"), "the stop ids of a least length": [0, 3, 41, 64, 96]}


def tails_probe(seed: int) -> Values:
    """Ask how much of an output bad words need."""
    from mini_engine.sampler.processors.constraints import last_tokens

    values: Values = {}
    for length in (0, 1, 2, 5):
        for longest in (1, 2, 3, 6):
            tail = last_tokens(list(range(length)), [tuple(range(longest)), (1,)])
            values[f"{length} tokens, the longest word has {longest}"] = [type(tail).__name__, *tail]
    return values


def tails_spec(seed: int) -> Values:
    """Keep the positions that a word's prefix could reach."""
    return {
        f"{length} tokens, the longest word has {longest}": [
            "tuple",
            *(i for i in range(length) if i > length - longest),
        ]
        for length in (0, 1, 2, 5)
        for longest in (1, 2, 3, 6)
    }


CONSTRAINTS = f"{PROCESSORS}.constraints"
register(
    "L4.F.min_new_tokens",
    "No end id and no own stop id can come before that many tokens were generated, whether they are counted one by one "
    "or found in a past; ignored end ids are free, and the prompt does not count.",
    CONSTRAINTS,
    "MinNewTokens",
    length_cases,
    length_spec,
    range(6),
)
register(
    "L4.F.logit_bias",
    "A bias is added to its ids in its row; what was banned stays banned.",
    CONSTRAINTS,
    "LogitBias",
    bias_cases,
    histories.biased,
)
register(
    "L4.F.allowed",
    "Allowed ids keep their logits to the bit and every other id of the row is banned.",
    CONSTRAINTS,
    "AllowedTokens",
    allowed_cases,
    histories.allowed_only,
)
register(
    "L4.F.bad_words",
    "The token that would complete a bad word in the output is banned, and only it; a word's beginning in the prompt "
    "does not count.",
    CONSTRAINTS,
    "BadWords",
    bad_word_cases,
    histories.without_bad_words,
    range(25),
)
REGISTRY.add(
    "L4.F.idle",
    "A constraint that has nothing to do in a row has no state there: start returns None.",
    idle_probe,
    bitwise(idle_spec),
)
REGISTRY.add(
    "L4.F.tails",
    "Of an output, bad words need one token less than the longest of them has, in a tuple of their own.",
    tails_probe,
    bitwise(tails_spec),
)


# L4.J ---------------------------------------------------------------------------------------------------------------

START, END, BREAK = 50, 51, 52


def budget_cases(seed: int) -> list[Case]:
    """Return rows inside, outside and between blocks of thought."""

    def arguments(budget: int, newline: int | None = BREAK) -> dict[str, Any]:
        given = {"budget": budget, "start": START, "end": END}
        return given if newline is None else {**given, "newline": newline}

    free = (60, 61, 62, 63, 64, 65, 66, 67)
    return [
        Case("never thinks", Past((1, 2)), arguments(2), free),
        Case("opened in the prompt", Past((1, START)), arguments(3), (60, 61, 62, BREAK, END, 63, 64, 65)),
        Case("opened in the prompt, two tokens back", Past((1, START, 7, 8)), arguments(3), free),
        Case("opened in the output", Past((1,), (START,)), arguments(2), (60, 61, BREAK, END, 60, 61, 62, 63)),
        Case("closed in time", Past((1, START)), arguments(5), (60, END, 61, 62, 63, 64, 65, 66)),
        Case(
            "a second block", Past((START, 60, 61, END), (7,)), arguments(2), (START, 60, 61, BREAK, END, START, 1, 2)
        ),
        Case("opened again inside", Past((START, 60, 61)), arguments(3), (START, 60, 61, 62, BREAK, END, 7, 8)),
        Case("budget 0", Past((1, START)), arguments(0), (BREAK, END, 7, START, BREAK, END, 8, 9)),
        Case("ends with a line break", Past((1, START)), arguments(2), (60, BREAK, END, 7, START, BREAK, BREAK, END)),
        Case("a line break ends the prompt", Past((START, BREAK)), arguments(1), (BREAK, END, 7, 8, 9, 10, 11, 12)),
        Case("id 0 is the line break", Past((1, START)), arguments(1, 0), (60, 0, END, 7, START, 60, 0, END)),
        Case("no line break", Past((1, START)), arguments(2, None), (60, 61, END, 62, START, 60, 61, END)),
        Case("closed without having begun", Past((END, 5)), arguments(0), free),
    ]


def gram_cases(seed: int) -> list[Case]:
    """Return rows of few ids, so that n-grams come again, with every size, windows and a whitelist."""

    def arguments(size: int, **rest: Any) -> dict[str, Any]:
        return {"ngram_size": size, **rest}

    prompt = draw(seed, "gram", 9, range(4))
    future = draw(seed, "gram future", 20, range(4))
    cases = [Case(f"size {size}", Past(prompt, prompt[:2]), arguments(size), future) for size in (1, 2, 3, 4)]
    cases += [
        Case(f"size {size}, window {window}", Past(prompt), arguments(size, window_size=window), future)
        for size, window in ((1, 1), (1, 3), (2, 4), (3, 8), (2, 1), (3, 2), (3, 3))
    ]
    spared = Case("a whitelist", Past(prompt), arguments(2, whitelist_token_ids=[1, 3]), future)
    short = Case("shorter than the size", Past((2,)), arguments(5), future)
    example = Case("1 2 3 1 2", Past((1, 2, 3, 1, 2)), arguments(3), future)
    return [*cases, spared, short, example]


register(
    "L4.J.thinking",
    "Once the open block holds its budget the line break and then the end marker are the only choices; a later block "
    "starts anew, and nothing else is touched.",
    f"{PROCESSORS}.thinking",
    "ThinkingBudget",
    budget_cases,
    histories.within_budget,
    range(9),
)
register(
    "L4.J.ngrams",
    "Exactly the tokens that would repeat a sequence of n tokens of the window are banned, except whitelisted ones.",
    f"{PROCESSORS}.ngram",
    "NoRepeatNGram",
    gram_cases,
    histories.without_repeats,
    range(21),
)
