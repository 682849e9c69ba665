"""The checks of ``choose`` (L9.C): which calls it makes, in which order, and what comes of them. No model."""

import random
from typing import Any

from smoke.checks.l9.machine import Machine, logprob, new_state, number, shaken, words
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, close, differences

REGISTRY = Registry()
PROMPTS = ("ab the", "a", " there. ", "né ou")
CHOICES = (
    ["abc", " the", "re"],
    ["a", "n"],
    ["ab", "abab", "ababab", "c"],
    [" the ou", "o", ". u", " the"],
    ["u"],
    ["né", "n", "é"],
    ["b", "bc", " the", "u"],  # after "a" the first two would merge with the prompt
    ["b", "bc"],
)
METHODS = ("mean", "greedy", "unconditional")
CASES = [(prompt, choices, method) for prompt in PROMPTS for choices in CHOICES for method in METHODS]


def run(seed: int, prompt: str, choices: list[str], method: Any, canonical: bool = False) -> tuple[Any, Machine]:
    """Append a text and a choice, and wait. No two calls with a prompt give the same token quite the same value.

    In a ``canonical`` run the text comes in two parts, whose ids are those of the whole only if encoded again.
    """
    from mini_engine import lang

    machine = Machine(seed, is_shaken=True)
    state = new_state(machine, canonical=canonical)
    if canonical:
        state += prompt[:1]
        state.settle()
        prompt = prompt[1:]
    state += prompt + lang.select("which", choices, method)
    state.settle()
    return state, machine


def calls_probe(seed: int) -> Values:
    """Note what was asked, and how many answers there were before each call."""
    values = Values()
    for prompt in PROMPTS:
        for choices in CHOICES:
            _, machine = run(seed, prompt, list(choices), "mean")
            values[f"{prompt!r}, {choices}"] = [[c["ids"], c["start"], c["advanced"]] for c in machine.log]
    _, machine = run(seed, PROMPTS[0], list(CHOICES[0]), "mean", canonical=True)
    values["canonical"] = machine.log[0]["ids"]
    return values


def calls_verdict(seed: int, got: Values) -> list[Failure]:
    """One choice comes first and alone; the others, and those of several tokens without the prompt, come together."""
    failures = list[Failure]()
    for prompt in PROMPTS:
        before = words().encode(prompt)
        for choices in CHOICES:
            own = [words().encode(choice) for choice in choices]
            first = [[*before, *own[0]], len(before), 0]
            rest = [[[*before, *ids], len(before), 1] for ids in own[1:]]
            rest += [[ids, 1, 1] for ids in own if len(ids) > 1]
            calls = got[f"{prompt!r}, {choices}"]
            failures += differences(first, calls[0], None, f"{prompt!r}, {choices}, the first call")
            failures += differences(sorted(rest), sorted(calls[1:]), None, f"{prompt!r}, {choices}, the others")
    encoded = [*words().encode(PROMPTS[0]), *words().encode(CHOICES[0][0])]
    failures += differences(encoded, got["canonical"], None, "a canonical run, where the prompt is encoded again")
    return failures[:6]


def choice_probe(seed: int) -> Values:
    """Choose, and note everything that the state knows afterwards."""
    values = Values()
    for prompt, choices, method in CASES:
        for own in (seed, seed + 1):
            state, _ = run(own, prompt, choices, method)
            answer = state.answer("which")
            values[f"{prompt!r}, {choices}, {method}, seed {own}"] = {
                "value": answer.value,
                "scores": {name: [float(score) for score in answer.scores[name]] for name in METHODS},
                "logprobs": [[float(value) for value in row] for row in answer.logprobs],
                "text": state.known_text,
                "ids": list(state.known_ids),
                "set here": list(state.own),
            }
    return values


def choice_spec(seed: int) -> Values:
    """Score every token after all tokens before it, with the prompt and without."""
    values = Values()
    for prompt, choices, method in CASES:
        for own in (seed, seed + 1):
            values[f"{prompt!r}, {choices}, {method}, seed {own}"] = chosen(own, prompt, choices, method)
    return values


def chosen(seed: int, prompt: str, choices: list[str], method: str) -> Values:
    """Return what one select gives."""
    before = words().encode(prompt)
    ids = [words().encode(choice) for choice in choices]
    rows = [[value_of(seed, before, own[: i + 1], ids) for i in range(len(own))] for own in ids]
    alone = [[0.0, *(logprob(seed, own[:i], own[i]) for i in range(1, len(own)))] for own in ids]
    means = [sum(row) / len(row) for row in rows]
    longest = max(len(row) for row in rows)
    padded = [[*row, *[mean] * (longest - len(row))] for row, mean in zip(rows, means, strict=True)]
    greedy = [0.0 for _ in rows]
    for place in range(longest):
        inside = [i for i, score in enumerate(greedy) if score == place]
        highest = max(padded[i][place] for i in inside)
        for i in inside:
            greedy[i] += float(padded[i][place] == highest)
    added = [sum(row) / len(row) - sum(lone) / len(lone) for row, lone in zip(rows, alone, strict=True)]
    scores = {"mean": means, "greedy": greedy, "unconditional": added}
    place = min(i for i, score in enumerate(scores[method]) if score == max(scores[method]))
    return {
        "value": choices[place],
        "scores": scores,
        "logprobs": rows,
        "text": prompt + choices[place],
        "ids": [*before, *ids[place]],
        "set here": ["which"],
    }


def value_of(seed: int, before: list[int], own: list[int], ids: list[list[int]]) -> float:
    """Return the value of the last token of ``own``, from the call of the first choice that begins with ``own``."""
    first = next(each for each in ids if each[: len(own)] == own)
    shift = shaken(seed, [*before, *first]) if len(before) > 1 else 0.0
    return logprob(seed, [*before, *own[:-1]], own[-1]) + shift


def first_probe(seed: int) -> Values:
    """Choose before there is any text, and with ids alone."""
    from mini_engine import lang

    machine = Machine(seed)
    state = new_state(machine)
    state += lang.select("which", ["a", "b"])
    raised = "nothing"
    try:
        state.settle()
    except ValueError:
        raised = "ValueError"
    other = new_state(Machine(seed))
    other.extend("", words().encode("ab"))
    other += lang.select("which", ["n"])
    return {"raised": raised, "calls": len(machine.log), "after ids without text": other["which"]}


def in_a_row(seed: int, case: int) -> list[list[str]]:
    """Return the choices of three selects; those of the first come again in the last."""
    return [CHOICES[case], CHOICES[number(seed, case) % len(CHOICES)], CHOICES[case]]


def tree_probe(seed: int) -> Values:
    """Choose several times in a row; the text before each choice is what was chosen before."""
    from mini_engine import lang

    values = Values()
    for case in range(len(CHOICES)):
        machine = Machine(seed + case)
        state = new_state(machine)
        state += "ab the"
        for choices in in_a_row(seed, case):
            state += lang.select(None, choices) + " "
        values[f"case {case}"] = {"text": state.text, "ids": list(state.ids), "calls": len(machine.log)}
    return values


def together_probe(seed: int) -> Values:
    """Let two states of one hub choose at the same time, and look what is kept for all."""
    from mini_engine import lang
    from mini_engine.lang.state import State

    values = Values()
    for choices in CHOICES:
        machine = Machine(seed, is_shaken=True)
        first = new_state(machine)
        states = [first, State(first.hub, first.settings)]
        for state, prompt in zip(states, PROMPTS, strict=False):
            state += prompt + lang.select("which", choices, "unconditional")  # noqa: PLW2901  a state appends in place
        machine.turn = 0  # the first calls of both, the first state's before; then the second state ends first
        while machine.num_advanced < 2 and machine.waiting:
            first.hub.turn()
        machine.turn = -1
        values[f"{choices}"] = {
            "scores": [list(state.answer("which").scores["unconditional"]) for state in states],
            "kept": sorted([list(ids), list(row)] for ids, row in first.hub.alone.items() if len(ids) > 1),
        }
    return values


def together_spec(seed: int) -> Values:
    """Score the choices as if each state were alone; what is kept begins with 0."""
    values = Values()
    for choices in CHOICES:
        ids = [words().encode(choice) for choice in choices]
        kept: list[Any] = [[own, [0.0, *(logprob(seed, own[:i], own[i]) for i in range(1, len(own)))]] for own in ids]
        ends = [chosen(seed, prompt, choices, "unconditional") for prompt in PROMPTS[:2]]
        values[f"{choices}"] = {
            "scores": [end["scores"]["unconditional"] for end in ends],
            "kept": sorted(each for each in kept if len(each[0]) > 1),
        }
    return values


def tree_spec(seed: int) -> Values:
    """Choose one after the other."""
    values = Values()
    for case in range(len(CHOICES)):
        text = "ab the"
        ids = words().encode("ab the")
        calls = 0
        alone = set[str]()
        for choices in in_a_row(seed, case):
            own = [words().encode(choice) for choice in choices]
            means = [
                sum(logprob(seed + case, [*ids, *row[:i]], row[i]) for i in range(len(row))) / len(row) for row in own
            ]
            place = means.index(max(means))
            text = text + choices[place] + " "
            ids = [*ids, *own[place], *words().encode(" ")]
            calls += len(choices)
            alone |= {choice for choice, row in zip(choices, own, strict=True) if len(row) > 1}
        values[f"case {case}"] = {"text": text, "ids": ids, "calls": calls + len(alone)}
    return values


def same_cases(seed: int) -> dict[str, tuple[list[list[int]], list[list[float]]]]:
    """Return choices that begin alike, with values that differ in the last bits wherever they come up again."""
    rng = random.Random(f"same {seed}")
    cases: dict[str, tuple[list[list[int]], list[list[float]]]] = {}
    for place in range(40):
        ids = [[rng.randint(1, 2) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 5))]
        cases[f"case {place}, {ids}"] = (ids, [[-rng.randint(1, 4) - rng.random() * 1e-6 for _ in own] for own in ids])
    return cases


def same_probe(seed: int) -> Values:
    """Ask for one value of each, and look whether the rows are what they were, and not handed out again."""
    from mini_engine.lang.choices import same_values

    values = Values()
    for name, (ids, rows) in same_cases(seed).items():
        given = [list(row) for row in rows]
        found = same_values(ids, given)
        is_new = all(row is not own for row in found for own in given)
        values[name] = [[list(row) for row in found], given == rows, is_new]
    return values


def same_spec(seed: int) -> Values:
    """Look for the first choice that begins with the same tokens."""
    values = Values()
    for name, (ids, rows) in same_cases(seed).items():
        found = [
            [
                next(rows[i][place] for i in range(len(ids)) if ids[i][: place + 1] == own[: place + 1])
                for place in range(len(own))
            ]
            for own in ids
        ]
        values[name] = [found, True, True]
    return values


REGISTRY.add(
    "L9.C.same_values",
    "The same token after the same tokens has one value in all choices: that of the first choice which has it. The "
    "rows are new.",
    same_probe,
    bitwise(same_spec),
)
REGISTRY.add(
    "L9.C.calls",
    "The first choice is scored alone, from the prompt's end on; then all others together, and those of several tokens "
    "without the prompt, from their second token on.",
    calls_probe,
    calls_verdict,
)
REGISTRY.add(
    "L9.C.choice",
    "All three scores are those of the tokens after what comes before them, and the method decides which choice is "
    "appended, text and ids.",
    choice_probe,
    close(choice_spec, 1e-9),
)
REGISTRY.add(
    "L9.C.first",
    "Without any ids before it a choice is a ValueError, and nothing is asked.",
    first_probe,
    bitwise(lambda seed: {"raised": "ValueError", "calls": 0, "after ids without text": "n"}),
)
REGISTRY.add(
    "L9.C.together",
    "Where two states choose at the same time, each has its own scores; values without a prompt are kept for all.",
    together_probe,
    close(together_spec, 1e-9),
)
REGISTRY.add(
    "L9.C.tree",
    "Choices in a row: each is scored after the ids of those chosen before it, and none twice without the prompt.",
    tree_probe,
    close(tree_spec, 1e-9),
)
