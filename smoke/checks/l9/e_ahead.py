"""The checks of text that was written ahead: what is left of it and what is cut from it (L9.E). No model."""

import random
from collections.abc import Sequence
from typing import Any

from smoke.checks.l9.machine import END, ended, words, written
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
Plain = dict[str, Any]


def after_cases(seed: int) -> dict[str, tuple[list[int], list[int]]]:
    """Return what was written ahead and a constant's ids: the same, shorter, longer, with another token anywhere."""
    rng = random.Random(f"after {seed}")
    cases = {
        "nothing appended": ([5, 6, 7], []),
        "all but the last": ([5, 6, 7], [5, 6]),
        "all of it": ([5, 6, 7], [5, 6, 7]),
        "more than all": ([5, 6, 7], [5, 6, 7, 8]),
        "another last token": ([5, 6, 7], [5, 9]),
        "the same tokens further on": ([5, 6, 7], [6, 7]),
        "nothing was written": ([], []),
        "equal tokens": ([5, 5, 5], [5]),
    }
    for place in range(60):
        ids = [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
        count = rng.randint(0, len(ids))
        constant = [*ids[:count], *([rng.randint(1, 3)] if rng.random() < 0.4 else [])]
        cases[f"case {place}, {constant} after {ids}"] = (ids, constant)
    return cases


def after_probe(seed: int) -> Values:
    """Ask what is left, with a list and with a tuple."""
    from mini_engine.lang.context import Ahead
    from mini_engine.sampler.params import SamplingParams

    values = Values()
    for name, (ids, constant) in after_cases(seed).items():
        for is_end in (False, True):
            sampling = SamplingParams(temperature=0.5, max_new_tokens=1)
            ahead = Ahead(list(ids), sampling, is_end)
            kinds: list[Sequence[int]] = [list(constant), tuple(constant)]
            for given in kinds:
                left = ahead.after(given)
                kept = left is None or (left.sampling == sampling and left.is_end is is_end)
                values[f"{name}, {type(given).__name__}, ended {is_end}"] = [
                    None if left is None else list(left.ids),
                    kept and ahead.ids == ids,
                ]
    return values


def after_spec(seed: int) -> Values:
    """Take token after token off; nothing left is None, and so is another token."""
    values = Values()
    for name, (ids, constant) in after_cases(seed).items():
        left: list[int] | None = list(ids)
        for token in constant:
            left = left[1:] if left and left[0] == token else None
        for kind in ("list", "tuple"):
            for is_end in (False, True):
                values[f"{name}, {kind}, ended {is_end}"] = [left or None, True]
    return values


STOPS: tuple[list[str], ...] = ([], ["he"], ["b"], ["e t", "ou"], ["c", "n"], ["zzz"], [". the"], ["é"], ["a.", "u"])


def cut_cases(seed: int) -> dict[str, Plain]:
    """Return ids that were written, with limits and stop strings of all kinds."""
    (end,) = words().encode(END)
    cases: dict[str, Plain] = {}
    for case in range(30):
        whole = written(seed + case, words().encode("ab the"), 16, {})
        is_end = whole[-1] == end
        ids = whole[:-1] if is_end else whole
        for limit in {1, 3, max(len(ids) - 1, 1), max(len(ids), 1), len(ids) + 1, 40}:
            stops = STOPS[(case + limit) % len(STOPS)]
            name = f"case {case}, {[words().decode([i]) for i in ids]}, at most {limit}, stop {stops}"
            cases[f"{name}, ended {is_end}"] = {"ids": ids, "limit": limit, "stops": stops, "is_end": is_end}
    rest: Plain = {"limit": 5, "stops": [], "is_end": False}
    half = words().encode("abé")[:-1]
    cases["a limit inside a character"] = {**rest, "ids": words().encode("abéc"), "limit": len(half)}
    cases["a stop string that only the end shows"] = {**rest, "ids": half, "limit": len(half), "stops": ["\ufffd"]}
    cases["the model ends inside a character"] = {**rest, "ids": half, "is_end": True}
    cases["half a character is a stop string"] = {**rest, "ids": half, "limit": len(half), "stops": ["\ufffd"]}
    cases["what could become a stop string"] = {**rest, "ids": words().encode("ab"), "stops": ["bc"], "is_end": True}
    cases["a stop string that the limit cuts"] = {**rest, "ids": words().encode("nnouuu"), "limit": 2, "stops": ["no"]}
    cases["nothing, and the model goes on"] = {**rest, "ids": []}
    cases["nothing, and the model ends"] = {**rest, "ids": [], "is_end": True}
    return cases


def cut_probe(seed: int) -> Values:
    """Cut, with a list and with a tuple."""
    from mini_engine.lang.speculate import cut
    from mini_engine.sampler.params import SamplingParams

    values = Values()
    for name, case in cut_cases(seed).items():
        params = SamplingParams(max_new_tokens=case["limit"], stop=case["stops"])
        given = tuple(case["ids"]) if len(values) % 2 else list(case["ids"])
        output = cut(words(), given, params, case["is_end"])
        values[name] = None
        if output is not None:
            values[name] = {
                "ids": list(output.token_ids),
                "a new list": isinstance(output.token_ids, list) and output.token_ids is not given,
                "text": output.text,
                "reason": output.finish_reason,
                "matched": output.matched,
            }
    return values


def cut_spec(seed: int) -> Values:
    """Let the machine write these ids, and see whether a call of its own would have ended there."""
    (end,) = words().encode(END)
    values = Values()
    for name, case in cut_cases(seed).items():
        answer = ended([*case["ids"], *([end] if case["is_end"] else [])], case["limit"], case["stops"])
        is_short = answer["reason"] == "length" and len(answer["ids"]) < case["limit"]
        values[name] = None if is_short else {**answer, "a new list": True}
    return values


REGISTRY.add(
    "L9.E.after",
    "What was written ahead is left only after the same ids; where nothing is left, or the ids differ, it is gone.",
    after_probe,
    bitwise(after_spec),
)
REGISTRY.add(
    "L9.E.cut",
    "An answer that is cut has the ids, the text and the reason of a call of its own, limits counted in tokens; "
    "where the model would go on, it is None.",
    cut_probe,
    bitwise(cut_spec),
)
