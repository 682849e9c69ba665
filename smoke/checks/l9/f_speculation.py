"""The checks of speculation (L9.F): the answers of calls of their own, in fewer calls. No model."""

import random
from typing import Any

from smoke.checks.l9.machine import FREE, Machine, answer_values, answered, kept, new_state, words
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
Plain = dict[str, Any]
OPENING = "ab the"

# Which gens ---------------------------------------------------------------------------------------------------------

SAME: list[Plain] = [
    {},
    {"max_new_tokens": 5},
    {"max_new_tokens": 500},
    {"stop": ["a"]},
    {"stop": ["a", "b"], "max_new_tokens": 9},
]
OTHERS: list[Plain] = [
    {"temperature": 0.5},
    {"temperature": 0.5, "seed": 3},
    {"temperature": 0.5, "seed": 4},
    {"temperature": 0.5, "top_k": 5},
    {"temperature": 0.5, "top_p": 0.5},
    {"temperature": 0.5, "min_p": 0.5},
    {"repetition_penalty": 1.5},
    {"logit_bias": {5: 1.0}},
    {"allowed_token_ids": [5, 6]},
]
REFUSED: list[Plain] = [
    {"frequency_penalty": 1.0},
    {"presence_penalty": 1.0},
    {"min_new_tokens": 2},
    {"ignore_eos": True},
    {"stop_token_ids": [5]},
    {"bad_words": [[5, 6]]},
    {"logprobs": 2},
    {"regex": "[a-z]{3}"},
    {"json_schema": {"type": "object"}},
    {"ebnf": 'root ::= "a"'},
    {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
    {"regex": "[a-z]{3}", "reasoning": True},
    {"logits_processors": {"own": {}}},
    {"prompt_logprobs": 0},
    {"logprobs_mode": "processed"},
    {"temperature": 0.5, "n": 2},
    {"temperature": 0.5, "best_of": 2},
    {"temperature": 0.5, "presence_penalty": 0.5},
]


def sampling_probe(seed: int) -> Values:
    """Compare every way with every other: equal or not, or refused."""
    from mini_engine.lang.speculate import sampling_of
    from mini_engine.sampler.params import SamplingParams

    ways = [sampling_of(SamplingParams(**given)) for given in (*SAME, *OTHERS, *REFUSED)]
    stops = [list(way.stop) for way in ways if way is not None]
    return {
        "equal": {name(each): [way is not None and way == other for other in ways] for each, way in named(ways)},
        "stops": stops,
    }


def named(ways: list[Any]) -> list[tuple[Plain, Any]]:
    """Pair parameters with what became of them."""
    return list(zip((*SAME, *OTHERS, *REFUSED), ways, strict=True))


def name(given: Plain) -> str:
    """Name parameters."""
    return str(given)


def sampling_spec(seed: int) -> Values:
    """Where an answer ends does not matter; everything else does."""
    kinds = [*(0 for _ in SAME), *range(1, len(OTHERS) + 1), *(None for _ in REFUSED)]
    return {
        "equal": {name(each): [kind is not None and kind == other for other in kinds] for each, kind in named(kinds)},
        "stops": [[] for _ in (*SAME, *OTHERS)],
    }


# Whole programs -----------------------------------------------------------------------------------------------------


def programs(seed: int) -> list[tuple[int, list[Any]]]:
    """Return machines' seeds with texts and gens: texts that a machine writes there, and others; gens of all kinds."""
    rng = random.Random(f"speculation {seed}")
    found: list[list[Any]] = []
    for place in range(40):
        ids = words().encode(OPENING)
        pieces = list[Any]()
        for _ in range(rng.randint(2, 6)):
            gen: Plain = {"max_new_tokens": rng.choice((1, 2, 4, 8, 20))}
            if rng.random() < 0.4:
                gen["stop"] = [rng.choice(("he", "b", "ou", "c", "n", "e t", "."))]
            kind = rng.random()
            if kind < 0.15:
                gen |= {"temperature": 0.5, "seed": rng.randint(1, 2)}
            elif kind < 0.25:
                gen["frequency_penalty"] = 0.5
            pieces.append(gen)
            ids += kept(answered(seed + place, ids, gen))
            if rng.random() < 0.6:
                coming = answered(seed + place, ids, {**gen, "max_new_tokens": rng.randint(1, 4), "stop": []})["text"]
                constant = coming[: rng.randint(1, 6)] if rng.random() < 0.8 else "né"
                pieces += [constant] if constant and "\ufffd" not in constant else []
                ids += words().encode(constant) if pieces[-1] == constant else []
        found.append(pieces)
    short: Plain = {"max_new_tokens": 2}
    penalised: Plain = {**short, "repetition_penalty": 1.5}  # drawn in another way, with the same temperature and seed
    drawn = enumerate([*found, *[[short, penalised, short]] * 3], start=seed)
    return [*drawn, (stopped_seed(seed), [STOPPED, "b", {"max_new_tokens": 6}])]


STOPPED: Plain = {"max_new_tokens": 6, "stop": ["b"]}


def stopped_seed(seed: int) -> int:
    """Return the first seed whose machine writes the stop string as a token of its own, and goes on for long."""
    ids = words().encode(OPENING)
    for own in range(seed * 1000, seed * 1000 + 999):
        whole, answer = (answered(own, ids, gen) for gen in ({"max_new_tokens": 24}, STOPPED))
        begun = [*kept(answer), *words().encode("b")]
        if whole["reason"] == "length" and answer["matched"] and begun == whole["ids"][: len(begun)]:
            return own
    raise AssertionError("no machine writes the stop string as a token of its own")


AHEAD = (1, 6, 30)


def same_probe(seed: int) -> Values:
    """Run every program with several lengths of what is written ahead."""
    values = Values()
    for own, program in programs(seed):
        for ahead in AHEAD:
            machine = Machine(own)
            state = write(new_state(machine, num_api_spec_tokens=ahead), program)
            values[f"machine {own}, {program}, {ahead} ahead"] = {
                "answers": [answer_values(state.answer(f"gen {i}")) for i in range(len(program)) if is_gen(program[i])],
                "text": state.text,
                "ids": list(state.ids),
                "calls and saved ones": machine.stats["calls"] + machine.stats["saved_calls"],
            }
    return values


def is_gen(piece: Any) -> bool:
    """Whether a piece of a program is a gen."""
    return isinstance(piece, dict)


def write(state: Any, program: list[Any]) -> Any:
    """Append the opening and all pieces, and wait."""
    from mini_engine import lang

    state += OPENING
    for place, piece in enumerate(program):
        state += lang.gen(f"gen {place}", **piece) if is_gen(piece) else piece
    state.settle_all()
    return state


def same_spec(seed: int) -> Values:
    """Make a call for each gen."""
    values = Values()
    for own, program in programs(seed):
        ids = words().encode(OPENING)
        text = OPENING
        answers = list[Plain]()
        for piece in program:
            if not is_gen(piece):
                ids = [*ids, *words().encode(piece)]
                text += piece
                continue
            answer = answered(own, ids, piece)
            ids = [*ids, *kept(answer)]
            text += answer["text"]
            part = {name: answer[name] for name in ("ids", "reason", "matched")}
            answers.append({"value": answer["text"], **part})
        for ahead in AHEAD:
            values[f"machine {own}, {program}, {ahead} ahead"] = {
                "answers": answers,
                "text": text,
                "ids": ids,
                "calls and saved ones": sum(is_gen(piece) for piece in program),
            }
    return values


def paid_probe(seed: int) -> Values:
    """Run the same programs, and note every call."""
    values = Values()
    for own, program in programs(seed):
        for ahead in AHEAD:
            machine = Machine(own)
            write(new_state(machine, num_api_spec_tokens=ahead), program)
            calls = [[call["ids"], call["asked"]] for call in machine.log]
            values[f"machine {own}, {program}, {ahead} ahead"] = calls
    return values


def paid_spec(seed: int) -> Values:
    """Keep what was written beyond each gen as long as it fits; ask for more only where it ends too early."""
    values = Values()
    for own, program in programs(seed):
        for ahead in AHEAD:
            values[f"machine {own}, {program}, {ahead} ahead"] = spec_calls(own, program, ahead)
    return values


def spec_calls(seed: int, program: list[Any], ahead: int) -> list[Any]:
    """Return the calls of one program: their prompts, and how many tokens they ask for."""
    ids = words().encode(OPENING)
    calls = list[Any]()
    left: Plain | None = None  # ids, how they were drawn, whether the machine ended after them
    for piece in program:
        if not is_gen(piece):
            ids = [*ids, *words().encode(piece)]
            left = without(left, words().encode(piece))
            continue
        answer = answered(seed, ids, piece)
        how = {key: value for key, value in piece.items() if key not in ("stop", "max_new_tokens")}
        if how.keys() <= FREE:
            if left is None or left["how"] != how:
                left = {"how": how, "ids": [], "is_end": False}
            has_all = len(answer["ids"]) <= len(left["ids"])
            is_end = answer["reason"] == "stop" and answer["matched"] is None
            if not has_all or (is_end and not left["is_end"]):
                asked = max(piece["max_new_tokens"], ahead) - len(left["ids"])
                calls.append([[*ids, *left["ids"]], asked])
                more = answered(seed, [*ids, *left["ids"]], {**how, "max_new_tokens": asked})
                left = {"how": how, "ids": [*left["ids"], *more["ids"]], "is_end": more["reason"] == "stop"}
        else:
            calls.append([ids, piece["max_new_tokens"]])
        ids = [*ids, *kept(answer)]
        left = without(left, kept(answer))
    return calls


def without(left: Plain | None, ids: list[int]) -> Plain | None:
    """Return what is left after ``ids``."""
    if left is None or len(left["ids"]) <= len(ids) or left["ids"][: len(ids)] != ids:
        return None
    return {**left, "ids": left["ids"][len(ids) :]}


# Edges --------------------------------------------------------------------------------------------------------------


def edge_seed(seed: int) -> int:
    """Return the first seed whose machine writes 24 tokens after the opening without an end."""
    ids = words().encode(OPENING)
    gen = {"max_new_tokens": 24}
    return next(s for s in range(seed * 1000, seed * 1000 + 999) if answered(s, ids, gen)["reason"] == "length")


def forks_probe(seed: int) -> Values:
    """Write ahead before a fork, and cut in each fork; write ahead in each fork, and cut or continue there."""
    from mini_engine import lang

    values = Values()
    for kind, (ahead, before, inside) in FORKED.items():
        machine = Machine(edge_seed(seed))
        state = new_state(machine, num_api_spec_tokens=ahead)
        state += OPENING
        for place, count in enumerate(before):
            state += lang.gen(f"before {place}", max_new_tokens=count)
        forks = state.fork(2)
        for fork in forks:
            for place, count in enumerate(inside):
                fork += lang.gen(f"inside {place}", max_new_tokens=count)  # noqa: PLW2901  a state appends in place
        state.join(forks)
        state.settle()
        values[kind] = [{name: state[name] for name in state.own}, machine.stats["calls"]]
    return values


# How many tokens are written ahead, those of the gens before the fork, and of those in each fork.
FORKED = {
    "cut in forks": (20, [2], [3, 3]),
    "written ahead in forks": (20, [], [3, 3]),
    "continued in forks": (6, [2], [10, 3]),
}


def forks_spec(seed: int) -> Values:
    """One call before the fork serves both; a call in each fork serves that fork."""
    values = Values()
    for (kind, (_, before, inside)), calls in zip(FORKED.items(), (1, 2, 5), strict=True):
        found = texts(edge_seed(seed), [{"max_new_tokens": count} for count in (*before, *inside)])
        own: Plain = {f"before {place}": text for place, text in enumerate(found[: len(before)])}
        own |= {f"inside {place}": [text] * 2 for place, text in enumerate(found[len(before) :])}
        values[kind] = [own, calls]
    return values


def texts(seed: int, gens: list[Plain]) -> list[str]:
    """Return what gens in a row write."""
    ids = words().encode(OPENING)
    found = list[str]()
    for gen in gens:
        answer = answered(seed, ids, gen)
        ids = [*ids, *kept(answer)]
        found.append(answer["text"])
    return found


# Over how many tokens more than the opening has a call is refused, how many are written ahead, and those of the gens.
LONG = {"the first is refused": (10, 50, [3, 4]), "the one that continues is refused": (8, 6, [3, 5])}


def long_probe(seed: int) -> Values:
    """Ask for more than the machine takes, where the gens themselves are short."""
    own = edge_seed(seed)
    size = len(words().encode(OPENING))
    values = Values()
    for kind, (limit, ahead, counts) in LONG.items():
        machine = Machine(own, limit=size + limit)
        state = write(new_state(machine, num_api_spec_tokens=ahead), [{"max_new_tokens": count} for count in counts])
        values[kind] = [state["gen 0"], state["gen 1"], machine.stats["calls"], machine.stats["saved_calls"]]
    state = new_state(Machine(own, limit=20), num_api_spec_tokens=5)
    try:
        write(state, [{"max_new_tokens": 3}, {"max_new_tokens": 40}])
        error = "nothing"
    except ValueError as caught:
        error = type(caught).__name__
    return {**values, "a gen that is too long itself": error}


def long_spec(seed: int) -> Values:
    """Each gen is a call of its own then; one that is too long itself stays an error."""
    values = Values()
    for kind, (_, _, counts) in LONG.items():
        values[kind] = [*texts(edge_seed(seed), [{"max_new_tokens": count} for count in counts]), 2, 0]
    return {**values, "a gen that is too long itself": "ValueError"}


def one_call_verdict(seed: int, got: Values) -> list[Failure]:
    """Demand one call of a program that says what the machine says, and one more for a gen that cannot be cut."""
    own = edge_seed(seed)
    whole = answered(own, words().encode(OPENING), {"max_new_tokens": 20})
    expected = {
        "calls": 1,
        "saved": 2,
        "ids": [*words().encode(OPENING), *whole["ids"][:14]],
        "calls and saved ones around a penalty": [2, 1],
    }
    return differences(expected, got, None)


PENALTY = {"max_new_tokens": 1, "frequency_penalty": 0.5}


def between_seed(seed: int) -> int:
    """Return a seed whose machine writes the same third token with a penalty."""
    for own in range(seed * 1000, seed * 1000 + 999):
        whole = answered(own, words().encode(OPENING), {"max_new_tokens": 12})
        penalised = answered(own, [*words().encode(OPENING), *whole["ids"][:2]], PENALTY)
        if whole["reason"] == "length" and penalised["ids"] == whole["ids"][2:3]:
            return own
    raise AssertionError("no seed writes the same token with a penalty")


def one_call_probe(seed: int) -> Values:
    """Let a program ask for 4 tokens, say the next 2, and ask for 5 and 3 more; let another call write what follows."""
    own = edge_seed(seed)
    whole = answered(own, words().encode(OPENING), {"max_new_tokens": 20})
    machine = Machine(own)
    state = new_state(machine, num_api_spec_tokens=20)
    from mini_engine import lang

    state += OPENING + lang.gen("a", max_new_tokens=4)
    state.settle()
    state.extend(words().decode(whole["ids"][4:6]), whole["ids"][4:6])
    state += lang.gen("b", max_new_tokens=5) + lang.gen("c", max_new_tokens=3)
    state.settle()
    values = {"calls": machine.stats["calls"], "saved": machine.stats["saved_calls"], "ids": list(state.ids)}
    machine = Machine(between_seed(seed))
    write(new_state(machine, num_api_spec_tokens=12), [{"max_new_tokens": 2}, PENALTY, {"max_new_tokens": 4}])
    return {**values, "calls and saved ones around a penalty": [machine.stats["calls"], machine.stats["saved_calls"]]}


REGISTRY.add(
    "L9.F.sampling",
    "Two gens are drawn in the same way if they differ in nothing but where they end; those that depend on where the "
    "answer began, or that report or need more than tokens, are refused.",
    sampling_probe,
    bitwise(sampling_spec),
)
REGISTRY.add(
    "L9.F.same",
    "With any number of tokens written ahead, ids, texts, reasons and matched stops are those of a call for each gen, "
    "and the calls and the saved ones are as many as the gens.",
    same_probe,
    bitwise(same_spec),
)
REGISTRY.add(
    "L9.F.paid",
    "A call is made only where what was written ahead ends too early; it continues from there and asks for what is "
    "missing, and for no more.",
    paid_probe,
    bitwise(paid_spec),
)
REGISTRY.add(
    "L9.F.one_call",
    "A program that says what the model says pays one call; what a call of its own writes is compared like a constant.",
    one_call_probe,
    one_call_verdict,
)
REGISTRY.add(
    "L9.F.forks",
    "Forks keep what was written ahead before them, and write ahead themselves.",
    forks_probe,
    bitwise(forks_spec),
    needs=("L9.D",),
)
REGISTRY.add(
    "L9.F.long",
    "Where the longer call is refused, the gen is a call of its own, with its own limit.",
    long_probe,
    bitwise(long_spec),
)
