"""The checks of forks and joins (L9.D), against programs that are carried out one call after the other. No model."""

import random
from typing import Any

from smoke.checks.l9.machine import Machine, answered, kept, new_state, words
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
Plain = dict[str, Any]
Operations = list[Any]
TEXTS = ("ab", " the", "re", "o", ". ", "né")

# Whole programs -----------------------------------------------------------------------------------------------------


def draw_operations(rng: random.Random, level: int, place: str) -> Operations:
    """Draw texts, gens and forks. Names belong to a level, and below the first one also to a round of forks.

    So a join never meets a name of a gen, and two joins share a name only if they are of the same state.
    """
    found: Operations = []
    for index in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.3:
            found.append(rng.choice(TEXTS))
        elif kind < 0.7 or level == 2:
            name = rng.choice(("x", "y", None)) if level else f"own{index}"
            gen = {"max_new_tokens": rng.randint(1, 6)} | ({"stop": ["e"]} if rng.random() < 0.4 else {})
            found.append([name and f"{name}{level}{place if level == 2 else ''}", gen])
        else:
            forks = [draw_operations(rng, level + 1, place or f"_{index}") for _ in range(rng.randint(1, 3))]
            found.append({"forks": forks, "appends": rng.random() < 0.4, "late": rng.random() < 0.3})
    return found


def programs(seed: int) -> list[Operations]:
    """Return programs that begin with a text."""
    fixed: list[Operations] = [
        ["ab", {"forks": [["o", ["x1", {"max_new_tokens": 3}]], ["re"]], "appends": True, "late": False}],
        ["ab", *[{"forks": [[["x1", {"max_new_tokens": 2}]]] * 2, "appends": False, "late": True}] * 2, "o"],
    ]
    rng = random.Random(f"programs {seed}")
    return fixed + [["ab the", *draw_operations(rng, 0, "")] for _ in range(30)]


def carry_out(state: Any, operations: Operations) -> Any:
    """Write a program on a state. A late one writes on its forks after it has gone on itself."""
    from mini_engine import lang

    for operation in operations:
        if isinstance(operation, str):
            state += operation
        elif isinstance(operation, list):
            name, gen = operation
            state += lang.gen(name, **gen)
        else:
            forks = state.fork(len(operation["forks"]))
            if operation["late"]:
                state += " "
            for fork, own in zip(forks, operation["forks"], strict=True):
                carry_out(fork, own)
            state.join(forks, appends=operation["appends"])
    return state


def program_probe(seed: int) -> Values:
    """Run every program, all that it can at the same time."""
    values = Values()
    for place, operations in enumerate(programs(seed)):
        state = carry_out(new_state(Machine(seed + place)), operations)
        state.settle_all()
        values[f"case {place}, {operations}"] = {
            "text": state.text,
            "ids": list(state.ids),
            "variables": {name: answer.value for name, answer in state.variables.items()},
            "order": list(state.own),
        }
    return values


def spec_run(seed: int, start: Plain, operations: Operations) -> Plain:
    """Carry a program out one operation after the other -> its text, its ids, what it set, in order."""
    ids = list(start["ids"])
    text = start["text"]
    own = Plain()
    for operation in operations:
        if isinstance(operation, str):
            ids = ids + words().encode(operation)
            text += operation
        elif isinstance(operation, list):
            name, gen = operation
            answer = answered(seed, ids, gen)
            ids = ids + kept(answer)
            text += answer["text"]
            if name is not None:
                own[name] = answer["text"]
        else:
            ends = [spec_run(seed, {"ids": ids, "text": text}, each) for each in operation["forks"]]
            begun = (len(ids), len(text))
            if operation["late"]:
                ids = ids + words().encode(" ")
                text += " "
            for end in ends if operation["appends"] else ():
                ids, text = ids + end["ids"][begun[0] :], text + end["text"][begun[1] :]
            names = [name for end in ends for name in end["own"]]
            for name in dict.fromkeys(names):
                own[name] = own.get(name, []) + [end["own"].get(name) for end in ends]
    return {"ids": ids, "text": text, "own": own}


def program_spec(seed: int) -> Values:
    """Return what each program ends with."""
    values = Values()
    for place, operations in enumerate(programs(seed)):
        end = spec_run(seed + place, {"ids": [], "text": ""}, operations)
        values[f"case {place}, {operations}"] = {
            "text": end["text"],
            "ids": end["ids"],
            "variables": end["own"],
            "order": list(end["own"]),
        }
    return values


# Forks --------------------------------------------------------------------------------------------------------------


DRAWN = {1: "greedy", 2: "drawn with a seed", 4: "drawn without a seed"}  # forks -> how the text ahead was drawn


def fork_probe(seed: int) -> Values:
    """Fork, and change everything that a fork and its parent could share."""
    from mini_engine.lang.context import Ahead, Answer
    from mini_engine.sampler.params import SamplingParams

    values = Values()
    for count in (1, 2, 4):
        state = new_state(Machine(seed))
        state += "ab the"
        state.variables["before"] = Answer("b")
        drawn = SamplingParams(temperature=0.5, seed=None if count == 4 else 7)
        state.ahead = Ahead([5, 6], SamplingParams() if count == 1 else drawn, False)
        forks = state.fork() if count == 1 else state.fork(count)
        begun = [fork.is_started for fork in forks]
        ahead = [fork.ahead == state.ahead for fork in forks]
        forks[0] += " re"
        forks[0].variables["own"] = Answer("o")
        state += "c"
        state.variables["after"] = Answer("a")
        values[f"{count} forks, {DRAWN[count]}"] = {
            "begun": begun,
            "begins with what was written ahead": ahead,
            "texts": [each.text for each in (state, *forks)],
            "ids": [list(each.ids) for each in (state, *forks)],
            "variables": [sorted(each.variables) for each in (state, *forks)],
            "set here": [list(each.own) for each in forks],
            "forked at": [list(each.forked_at) for each in forks],
            "parents": [each.parent is state for each in forks],
            "different": len({id(each) for each in (state, *forks)}),
            "settings": all(each.settings is state.settings and each.hub is state.hub for each in forks),
        }
    return values


def fork_spec(seed: int) -> Values:
    """Return what each of them has of its own."""
    values = Values()
    for count in (1, 2, 4):
        texts = ["ab thec", "ab the re", *["ab the"] * (count - 1)]
        ids = [words().encode("ab the") + more for more in (words().encode("c"), words().encode(" re"))]
        ids += [words().encode("ab the")] * (count - 1)
        values[f"{count} forks, {DRAWN[count]}"] = {
            "begun": [True] * count,
            "begins with what was written ahead": [count != 4] * count,  # a draw without a seed belongs to one of them
            "texts": texts,
            "ids": ids,
            "variables": [["after", "before"], ["before", "own"], *[["before"]] * (count - 1)],
            "set here": [[] for _ in range(count)],
            "forked at": [[len(words().encode("ab the")), len("ab the")]] * count,
            "parents": [True] * count,
            "different": count + 1,
            "settings": True,
        }
    return values


def later_probe(seed: int) -> Values:
    """Fork behind an answer that is not there yet, change the list, write on a fork at once, and read a fork first."""
    from mini_engine import lang

    machine = Machine(seed)
    state = new_state(machine)
    state += "ab" + lang.gen("name", max_new_tokens=3)
    made = state.fork(2)
    forks = list(made)
    made.clear()
    begun = [fork.is_started for fork in forks]
    forks[1] += "re" + lang.gen("more", max_new_tokens=2)
    early = len(machine.log)
    return {
        "begun": begun,
        "calls before": early,
        "name in a fork": forks[0]["name"],
        "more": forks[1]["more"],
        "texts": [each.text for each in (state, *forks)],
        "calls": [call["ids"] for call in machine.log],
    }


def later_spec(seed: int) -> Values:
    """Let the fork wait for its parent, and ask nothing twice."""
    ids = words().encode("ab")
    first = answered(seed, ids, {"max_new_tokens": 3})
    other = [*ids, *kept(first), *words().encode("re")]
    second = answered(seed, other, {"max_new_tokens": 2})
    text = "ab" + first["text"]
    return {
        "begun": [False, False],
        "calls before": 1,
        "name in a fork": first["text"],
        "more": second["text"],
        "texts": [text, text, text + "re" + second["text"]],
        "calls": [ids, other],
    }


def turns_probe(seed: int) -> Values:
    """Fork inside a chat: a fork goes on with the turns of its parent."""
    from mini_engine import lang
    from mini_engine.lang.roles import Marks

    marks = Marks({"user": "<U>", "system": "<S>"}, {"user": "<u>", "assistant": "<a>"}, dict.fromkeys("", ""))
    ends = {"user": "</u>", "assistant": "</a>", "system": "</s>"}
    state = new_state(Machine(seed))
    state.hub.marks = lambda think: Marks(marks.first, marks.later, ends)
    state += lang.system("a") + lang.user("b")
    forks = state.fork(2)
    forks[0] += lang.assistant("c") + lang.user("d")
    forks[1] += lang.user("e")
    state += lang.assistant("f")
    values = {"texts": [each.text for each in (state, *forks)]}
    for appends in (False, True):
        other = new_state(Machine(seed))
        other.hub.marks = state.hub.marks
        first, second = other.fork(2)
        first += lang.system("a")
        second += "c"
        other.join([first, second], appends=appends)
        other += lang.user("b")
        values[f"a turn after the join of a fork with a turn and one without, appends {appends}"] = other.text
    return values


def turns_spec(seed: int) -> Values:
    """Only the first turn of a chat has the first turn's mark."""
    begin = "<S>a</s><u>b</u>"
    joined = "a turn after the join of a fork with a turn and one without, appends"
    return {
        "texts": [begin + "<a>f</a>", begin + "<a>c</a><u>d</u>", begin + "<u>e</u>"],
        f"{joined} False": "<U>b</u>",
        f"{joined} True": "<S>a</s>c<u>b</u>",
    }


def errors_probe(seed: int) -> Values:
    """Let a fork's call fail: joined, not joined, and in a fork of a fork."""
    from mini_engine import lang

    values = Values()
    for kind in ERRORS:
        state = new_state(Machine(seed, limit=50))
        state += "ab"
        much = lang.gen("much", max_new_tokens=60)
        if kind == "of a parent that failed":
            state += much
        forks = state.fork(3)
        own = forks[1].fork(1)[0] if kind == "a fork of a fork" else forks[1]
        if kind != "of a parent that failed":
            own += much
        forks[2] += lang.gen("fine", max_new_tokens=2)
        if kind == "joined":
            state.join(forks)
            state += lang.gen("after", max_new_tokens=2)
        if kind == "another round":
            state.fork(2)
        seen = Plain()
        reads = {"at the end": state.settle_all, "the fork": lambda forks=forks: forks[1]["much"]}
        if kind == "joined":
            reads["the list"] = lambda state=state: state["much"]
        for what, read in reads.items():
            seen[what] = raised(read)
        values[kind] = seen
    return values


def raised(read: Any) -> str:
    """Return the kind of error that reading raises, "KeyError" for a name that nothing sets."""
    try:
        read()
    except (ValueError, KeyError) as error:
        return type(error).__name__
    return "nothing"


ERRORS = {
    "joined": {"at the end": "ValueError", "the fork": "ValueError", "the list": "ValueError"},
    "not joined": {"at the end": "ValueError", "the fork": "ValueError"},
    "another round": {"at the end": "ValueError", "the fork": "ValueError"},
    "a fork of a fork": {"at the end": "ValueError", "the fork": "KeyError"},
    "of a parent that failed": {"at the end": "ValueError", "the fork": "ValueError"},
}

# Joins --------------------------------------------------------------------------------------------------------------


def gather_cases() -> dict[str, Plain]:
    """Return what the parent has, what each fork has set, and what is gathered; forks write from id 2 on."""
    return {
        "two forks, two names": {
            "before": {},
            "forks": [{"a": 1, "b": 2}, {"b": 3, "a": 4}],
            "after": {"a": [1, 4], "b": [2, 3]},
        },
        "names that some forks lack": {
            "before": {},
            "forks": [{"b": 1}, {}, {"a": 2, "b": None}, {"c": 3}],
            "after": {"b": [1, None, None, None], "a": [None, None, 2, None], "c": [None, None, None, 3]},
        },
        "a list that a fork gathered": {
            "before": {},
            "forks": [{"a": [1, 2]}, {"a": []}],
            "after": {"a": [[1, 2], []]},
        },
        "a second round": {
            "before": {"a": [1, 2]},
            "forks": [{"a": 3, "c": 0}, {"a": 4}],
            "after": {"a": [1, 2, 3, 4], "c": [0, None]},
        },
        "a round that is empty": {"before": {"a": [1]}, "forks": [{}, {}], "after": {"a": [1]}},
        "no forks": {"before": {"a": [1]}, "forks": [], "after": {"a": [1]}},
        "names that a fork began with": {
            "before": {},
            "inherited": {"a": [1, 2], "b": "b"},
            "forks": [{"a": 3}, {"b": 4}],
            "after": {"a": [3, None], "b": [None, 4]},
        },
        "a name of the parent that forks only know": {"before": {"p": "p"}, "forks": [{"a": 1}], "after": {"a": [1]}},
    }


def gather_probe(seed: int) -> Values:
    """Gather states that were put together by hand, with and without their text."""
    from mini_engine.lang.context import Answer
    from mini_engine.lang.state import gather

    values = Values()
    for name, case in gather_cases().items():
        for appends in (False, True):
            state = new_state(Machine(seed))
            state.known_text = "ab"
            state.known_ids = words().encode("a") + words().encode("b")
            for variable, value in case["before"].items():
                state.set(variable, Answer(value, is_joined=isinstance(value, list)))
            for variable, value in case.get("inherited", {}).items():
                state.variables[variable] = Answer(value, is_joined=isinstance(value, list))
            forks = state.fork(len(case["forks"]))
            lists = [value for value in case["before"].values() if isinstance(value, list)]
            for place, (fork, own) in enumerate(zip(forks, case["forks"], strict=True)):
                fork.extend(f" t{place}", words().encode(f" t{place}"))
                for variable, value in own.items():
                    fork.set(variable, Answer(value))
            gather(state, forks, appends)
            values[f"{name}, appends {appends}"] = {
                "values": {own: state.variables[own].value for own in case["after"]},
                "others": {n: a.value for n, a in state.variables.items() if n not in case["after"]},
                "joined": all(state.variables[own].is_joined for own in case["after"]),
                "order": list(state.own),
                "text": state.known_text,
                "ids": list(state.known_ids),
                "old lists": lists,
            }
    return values


def gather_spec(seed: int) -> Values:
    """Return the lists, in the order of the forks."""
    values = Values()
    for name, case in gather_cases().items():
        for appends in (False, True):
            texts = [f" t{place}" for place in range(len(case["forks"]))] if appends else []
            ids = [token for text in ("a", "b", *texts) for token in words().encode(text)]
            set_here = {variable for fork in case["forks"] for variable in fork}
            values[f"{name}, appends {appends}"] = {
                "values": case["after"],
                "others": {n: value for n, value in case["before"].items() if n not in case["after"]},
                "joined": True,
                "order": list(dict.fromkeys([*case["before"], *(v for v in case["after"] if v in set_here)])),
                "text": "ab" + "".join(texts),
                "ids": ids,
                "old lists": [value for value in case["before"].values() if isinstance(value, list)],
            }
    return values


def clash_probe(seed: int) -> Values:
    """Set a name here and in forks; let a fork have an error."""
    from mini_engine.lang.context import Answer
    from mini_engine.lang.state import gather

    values = Values()
    for kind in ("a name that is set here", "an error in the last fork"):
        state = new_state(Machine(seed))
        if kind == "a name that is set here":
            state.set("a", Answer("mine"))
        forks = state.fork(2)
        for fork in forks:
            fork.set("a", Answer("theirs"))
        if kind == "an error in the last fork":
            forks[1].error = ZeroDivisionError("own")
        try:
            gather(state, forks, False)
            values[kind] = ["nothing", ""]
        except (ValueError, ZeroDivisionError) as error:
            mine = state.variables["a"].value if "a" in state.variables else ""
            values[kind] = [type(error).__name__, mine]
    return values


REGISTRY.add(
    "L9.D.fork",
    "Each fork goes on from what its parent had, and from then on nothing is shared.",
    fork_probe,
    bitwise(fork_spec),
    needs=("L9.E",),
)
REGISTRY.add(
    "L9.D.later",
    "A fork behind an answer begins when the answer is there, and then does what was appended to it. A change of the "
    "list of forks changes nothing.",
    later_probe,
    bitwise(later_spec),
)
REGISTRY.add(
    "L9.D.turns",
    "A fork goes on in the middle of its parent's chat, and a join with appends in the middle of a fork's.",
    turns_probe,
    bitwise(turns_spec),
)
REGISTRY.add(
    "L9.D.gather",
    "A join makes lists in the order of the forks, with None where a fork lacks the name; a second round appends.",
    gather_probe,
    bitwise(gather_spec),
)
REGISTRY.add(
    "L9.D.clash",
    "A join raises what a fork's call raised, and replaces no value that was set here.",
    clash_probe,
    bitwise(
        lambda seed: {
            "a name that is set here": ["ValueError", "mine"],
            "an error in the last fork": ["ZeroDivisionError", ""],
        }
    ),
)
REGISTRY.add(
    "L9.D.errors",
    "An error in a fork is raised at the end and where it is read, whether the fork was joined or not.",
    errors_probe,
    bitwise(lambda seed: ERRORS),
)
REGISTRY.add(
    "L9.D.programs",
    "Programs of texts, answers, forks and joins end as if everything was done one after the other.",
    program_probe,
    bitwise(program_spec),
)
