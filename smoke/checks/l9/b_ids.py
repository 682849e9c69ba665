"""The checks of what a state keeps (L9.B): ids as they came, and only those of text that is kept. No model."""

import random
from typing import Any

from smoke.checks.l9.machine import END, MARK, Machine, answered, kept, new_state, number, text_of, words, written
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
Plain = dict[str, Any]
TEXTS = ("ab", "c", " t", "he", "re", "o", "u.", " ", "é", "abc the")


def pieces(seed: int) -> list[list[str]]:
    """Return texts that are appended one after the other; many merge where they meet, and one is empty."""
    rng = random.Random(f"pieces {seed}")
    return [["ab", "c"], [" t", "", "he"], *([rng.choice(TEXTS) for _ in range(rng.randint(1, 6))] for _ in range(30))]


class Left:
    """Stands for what was written ahead, and notes what it is asked."""

    def __init__(self) -> None:
        """Begin without questions."""
        self.asked: list[list[int]] = []

    def after(self, ids: Any) -> "Left | None":
        """Stay for two questions."""
        self.asked.append(list(ids))
        return self if len(self.asked) < 3 else None


def extend_probe(seed: int) -> Values:
    """Append texts with their ids, and change the caller's list afterwards."""
    values = Values()
    for place, texts in enumerate(pieces(seed)):
        state = new_state(Machine(seed))
        left = Left()
        state.ahead = left if place % 2 else None
        unchanged = True
        for text in texts:
            ids = words().encode(text)
            given = list(ids)
            state.extend(text, given)
            unchanged = unchanged and given == ids
            given.append(-1)
        values[f"case {place}, {texts}"] = {
            "text": state.known_text,
            "ids": list(state.known_ids),
            "the caller's list": unchanged,
            "asked": left.asked,
            "ahead is left": state.ahead is left,
        }
    return values


def extend_spec(seed: int) -> Values:
    """Put texts and ids one after the other; what was written ahead is asked until nothing is left of it."""
    values = Values()
    for place, texts in enumerate(pieces(seed)):
        ids = [words().encode(text) for text in texts]
        values[f"case {place}, {texts}"] = {
            "text": "".join(texts),
            "ids": [token for own in ids for token in own],
            "the caller's list": True,
            "asked": ids[:3] if place % 2 else [],
            "ahead is left": bool(place % 2) and len(texts) < 3,
        }
    return values


def opening(place: int) -> list[int]:
    """Return the special tokens before the text of a case, such as a tokenizer's mark of a beginning."""
    return words().encode(MARK) if place % 2 else []


def prompt_probe(seed: int) -> Values:
    """Ask for the prompt twice, and change what came first. Prompts of every other case open with a special token."""
    values = Values()
    for place, texts in enumerate(pieces(seed)):
        for canonical in (False, True):
            state = new_state(Machine(seed), canonical=canonical)
            state.hub.opening = opening(place)
            state.known_text = "".join(texts)
            state.known_ids = [*opening(place), *(token for text in texts for token in words().encode(text))]
            first = state.prompt()
            got = list(first)
            first.append(-1)
            known = [list(state.known_ids), state.known_text]
            values[f"case {place}, {texts}, canonical {canonical}"] = [got, list(state.prompt()), known]
    return values


def prompt_spec(seed: int) -> Values:
    """Return the ids of each text, or those of all text at once, with what the prompt opens with."""
    values = Values()
    for place, texts in enumerate(pieces(seed)):
        own = [*opening(place), *(token for text in texts for token in words().encode(text))]
        for canonical in (False, True):
            ids = [*opening(place), *words().encode("".join(texts))] if canonical else own
            values[f"case {place}, {texts}, canonical {canonical}"] = [ids, ids, [own, "".join(texts)]]
    return values


def cut_answers(seed: int) -> dict[str, Plain]:
    """Return ids and a beginning of their text: cut anywhere, between tokens, inside one, inside a character."""
    cases: dict[str, Plain] = {}
    (end,) = words().encode(END)
    for case in range(25):
        ids = written(seed + case, words().encode("ab"), 12, {})
        ids = [token for token in ids if token != end]
        text = text_of(ids)
        for length in {0, len(text), number(seed, case) % (len(text) + 1), number(case, seed) % (len(text) + 1)}:
            cases[f"case {case}, {text[:length]!r} of {[words().decode([i]) for i in ids]}"] = {
                "ids": ids,
                "text": text[:length],
            }
    a, b, mark, *character = [token for text in ("a", "b", MARK, "é") for token in words().encode(text)]
    for count in range(5):  # behind a character of two tokens, others than the tokenizer's
        ids = [*[b] * count, *character, *[a, b] * 2]
        cases[f"a character after {count} tokens"] = {"ids": ids, "text": text_of(ids)}
    cases["a token that ends a character and goes on"] = {"ids": words().encode("aéb"), "text": "aé"}
    cases["special tokens"] = {"ids": [mark, a, mark, b, mark], "text": "a"}
    cases["special tokens at the end"] = {"ids": [a, b, mark, mark], "text": "ab"}
    cut = words().encode("abcé")[:-1]  # in the middle of a character
    cases["half a character at the end"] = {"ids": cut, "text": words().decode(cut)}
    cases["nothing"] = {"ids": [], "text": ""}
    return cases


def kept_probe(seed: int) -> Values:
    """Ask what is kept."""
    from mini_engine.lang.speculate import kept_ids

    values = Values()
    for name, case in cut_answers(seed).items():
        given = list(case["ids"])
        values[name] = [list(kept_ids(words(), given, case["text"])), given == case["ids"]]
    return values


def kept_spec(seed: int) -> Values:
    """Try every number of ids."""
    return {name: [kept(case), True] for name, case in cut_answers(seed).items()}


def gens(seed: int) -> list[list[Any]]:
    """Return constants and gens, many of which a stop string cuts."""
    rng = random.Random(f"gens {seed}")
    programs: list[list[Any]] = []
    for _ in range(30):
        pieces: list[Any] = ["ab the"]
        for _ in range(rng.randint(2, 5)):
            gen: Plain = {"max_new_tokens": rng.randint(1, 14)}
            if rng.random() < 0.7:
                gen["stop"] = [rng.choice(("he", "b", "ou", "c", "e t"))]
            pieces += [gen] if rng.random() < 0.6 else [gen, rng.choice(TEXTS)]
        programs.append(pieces)
    return programs


def reuse_probe(seed: int) -> Values:
    """Run programs, and note the prompt of every call."""
    from mini_engine import lang

    values = Values()
    for place, program in enumerate(gens(seed)):
        machine = Machine(seed + place)
        state = new_state(machine)
        for piece in program:
            state += piece if isinstance(piece, str) else lang.gen(None, **piece)
        text = state.text
        ids = list(state.ids)
        values[f"case {place}, {program}"] = {"calls": [call["ids"] for call in machine.log], "text": text, "ids": ids}
    return values


def reuse_spec(seed: int) -> Values:
    """Append what each piece gives, id by id."""
    values = Values()
    for place, program in enumerate(gens(seed)):
        ids = list[int]()
        text = ""
        calls = []
        for piece in program:
            if isinstance(piece, str):
                ids = [*ids, *words().encode(piece)]
                text += piece
            else:
                calls.append(ids)
                answer = answered(seed + place, ids, piece)
                ids = [*ids, *kept(answer)]
                text += answer["text"]
        values[f"case {place}, {program}"] = {"calls": calls, "text": text, "ids": ids}
    return values


REGISTRY.add(
    "L9.B.extend",
    "Text and ids grow together, the caller's list stays the caller's, and what was written ahead is asked what is "
    "left after these ids.",
    extend_probe,
    bitwise(extend_spec),
)
REGISTRY.add(
    "L9.B.prompt",
    "A prompt is a new list of the ids as they came; with canonical it is the whole text, encoded again, behind the "
    "same special tokens.",
    prompt_probe,
    bitwise(prompt_spec),
)
REGISTRY.add(
    "L9.B.kept",
    "Of an answer that was cut, all ids that fit are kept, and only the rest of the text is encoded.",
    kept_probe,
    bitwise(kept_spec),
)
REGISTRY.add(
    "L9.B.reuse",
    "Every call of a program continues exactly the ids that the constants and answers before it have left.",
    reuse_probe,
    bitwise(reuse_spec),
)
