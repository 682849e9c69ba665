"""The checks of L7.G: how JSON is spelled, as trees. A tree is right if its texts are, whatever its form.

Owns: strings, integers, members and small schemas, and the texts that they must have: those that ``json.dumps`` writes,
found by trying every value. Trees come as plain lists, and ``specs.trees`` reads them.
"""

import json
import random
import re
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

from smoke.checks.l7.spec_trees import TooManyTextsError, Tree, matches, plain, size_of, texts
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences, shorten

REGISTRY = Registry()


def same_texts(case: str, want: set[str], tree: Tree) -> list[Failure]:
    """Ask a tree for exactly these texts, and name one that is lacking or too much."""
    try:
        got = texts(tree, 2 * len(want) + 100)
    except TooManyTextsError as error:
        return [Failure(case, "", f"{len(want)} texts", str(error))]
    order: Callable[[str], Any] = lambda text: (len(text), text)  # noqa: E731
    if want - got:
        first = min(want - got, key=order)
        return [Failure(case, "", f"{first!r} is among the texts", f"{shorten(sorted(got, key=order))}")]
    if got - want:
        return [Failure(case, "", f"{len(want)} texts", f"also {min(got - want, key=order)!r}")]
    return []


def same_answers(case: str, want: dict[str, bool], tree: Tree) -> list[Failure]:
    """Ask a tree which of these texts it matches."""
    for text, answer in want.items():
        if matches(tree, text) is not answer:
            return [Failure(case, repr(text), "matches" if answer else "does not match", "the opposite")]
    return []


# Integers -----------------------------------------------------------------------------------------------------------


def windows(seed: int) -> list[tuple[int, int]]:
    """Return ranges of integers: all small ones around zero, around powers of ten, and drawn ones."""
    rng = random.Random(f"windows {seed}")
    found = [(low, high) for low in range(-12, 13, 3) for high in range(low, 13)]
    found += [(low, high) for low in (0, 1, 9, 10, 17, 95, 99) for high in (9, 10, 11, 99, 100, 101, 345, 999, 1000)]
    found += [(-345, -17), (-1000, -1), (-100, 100), (-10, -10), (100, 100), (990, 1010), (1000, 2999), (0, 0)]
    for _ in range(120):
        low = rng.choice([1, -1]) * rng.randrange(10 ** rng.randint(1, 4))
        found.append((low, low + rng.randrange(10 ** rng.randint(1, 3))))
    return [(low, high) for low, high in dict.fromkeys(found) if low <= high]


def integers_probe(seed: int) -> Values:
    """Build the tree of every window, and of those without negatives also by the inner function."""
    from mini_engine.grammar.schema.values import integers_between, naturals_between

    return {
        f"{low} to {high}": [plain(integers_between(low, high))]
        + ([plain(naturals_between(low, high))] if low >= 0 else [])
        for low, high in windows(seed)
    }


def integers_verdict(seed: int, got: Values) -> list[Failure]:
    """Write down every integer of the window."""
    failures = []
    for low, high in windows(seed):
        want = {str(number) for number in range(low, high + 1)}
        trees = got[f"{low} to {high}"]
        failures += differences(1 + (low >= 0), len(trees), None, "trees")
        for tree in trees:
            failures += same_texts(f"integers from {low} to {high}", want, tree)
    return failures


REGISTRY.add(
    "L7.G.integers",
    "The texts of a range of integers are its integers in digits: each one and no other, no -0, no leading zero.",
    integers_probe,
    integers_verdict,
)


def bounds(seed: int) -> list[tuple[int, int]]:
    """Return ranges with too many integers to list."""
    rng = random.Random(f"bounds {seed}")
    wide = 10**15 - 1
    found = [(-wide, wide), (0, wide), (1, 2**63 - 1), (-(2**63), 2**63 - 1), (-wide, -1), (10**14, 10**15)]
    found += [(123_111, 126_050), (-5_000, -2_001)]
    found += [(999_999_999_999, 1_000_000_000_001), (123_456_789, 987_654_321), (-(10**30), 7 * 10**29)]
    for _ in range(20):
        ends = sorted(rng.choice([1, -1]) * rng.randrange(10 ** rng.randint(6, 20)) for _ in range(2))
        found.append((ends[0], ends[1]))
    return found


def spots(low: int, high: int, seed: int) -> dict[str, bool]:
    """Return texts and whether they are integers of the range: around ends and powers of ten, and what is none."""
    rng = random.Random(f"spots {seed} {low} {high}")
    longest = len(str(max(abs(low), abs(high))))
    powers = [sign * 10**power for power in {1, longest // 2, longest - 1, longest} for sign in (1, -1)]
    places = {low, high, 0, *powers, *(rng.randint(low, high) for _ in range(12))}
    places |= {round((low + high) / 2), low * 10, high * 10, low // 10, high // 10, -low, -high}
    numbers = {place + step for place in places for step in (-1, 0, 1)}
    answers = {str(number): low <= number <= high for number in sorted(numbers)}
    odd = [f"0{high}", f"-0{abs(low)}", f"+{high}", "-0", "00", "", "-", f"{high}.0", f" {high}", f"{high}e0"]
    return answers | dict.fromkeys(odd, False)


def bounds_probe(seed: int) -> Values:
    """Build the trees of wide ranges."""
    from mini_engine.grammar.schema.values import integers_between

    return {f"{low} to {high}": plain(integers_between(low, high)) for low, high in bounds(seed)}


def bounds_verdict(seed: int, got: Values) -> list[Failure]:
    """Try the spots, and ask for a tree that grows with the digits and not with the range."""
    failures = []
    for low, high in bounds(seed):
        tree = got[f"{low} to {high}"]
        case = f"integers from {low} to {high}"
        digits = len(str(abs(low))) + len(str(abs(high)))
        most = 160 * digits  # a few blocks for each digit of the ends, or one for each first digit
        if size_of(tree) > most:
            failures.append(Failure(case, "nodes", f"at most {most}", str(size_of(tree))))
        else:
            failures += same_answers(case, spots(low, high, seed), tree)
    return failures


REGISTRY.add(
    "L7.G.bounds",
    "A wide range of integers is cut where its digits begin to be free: the tree is small, and its ends are exact.",
    bounds_probe,
    bounds_verdict,
)


# Characters ---------------------------------------------------------------------------------------------------------

# Sets of characters by their ranges of code points.
SETS: dict[str, list[tuple[int, int]]] = {
    **{f"the character {code}": [(code, code)] for code in (*range(0x20), 0x22, 0x5C)},
    "letters": [(97, 122)],
    "the slash, which may be escaped and is not": [(0x2F, 0x2F)],
    "delete, which is no control character to JSON": [(0x7F, 0x7F)],
    "quote to hash": [(0x21, 0x23)],
    "backslash and its neighbours": [(0x5B, 0x5D)],
    "control characters and the space": [(0, 0x20)],
    "line break and tab": [(9, 10)],
    "all of ASCII": [(0, 127)],
    "beyond ASCII": [(0xE4, 0xEB), (0x2028, 0x2029), (0x4E00, 0x4E05), (0x1F600, 0x1F603)],
    "a mixture": [(8, 9), (0x1E, 0x22), (0x5C, 0x5E), (0xFF, 0x101)],
    "nothing": [],
}
EVERYTHING = [(0, 0xD7FF), (0xE000, 0x10FFFF)]


def spelled(character: str) -> str:
    """Return a character between quotes, without the quotes."""
    return json.dumps(character, ensure_ascii=False)[1:-1]


def wrong_spellings() -> list[str]:
    """Return texts that spell no single character, or not the way that JSON is written here."""
    other = [
        "\\/",
        "\\a",
        "\\x41",
        "\\u0041",
        "\\U0041",
        "\\u00e4",
        "\\u000a",
        "\\u001F",
        "\\u0020",
        "\\u007f",
        "\\u00",
    ]
    return [*map(chr, range(0x20)), '"', "\\", "", "ab", "\\nn", "\\\\n", '\\"a', "\\u000", "\\u0010a", *other]


def characters_probe(seed: int) -> Values:
    """Spell every set, and all characters at once."""
    from mini_engine.grammar.automata.syntax import Chars
    from mini_engine.grammar.schema.values import spell_chars

    sets = {name: plain(spell_chars(Chars(tuple(ranges)))) for name, ranges in SETS.items()}
    return {"sets": sets, "any": plain(spell_chars(Chars(tuple(EVERYTHING))))}


def characters_verdict(seed: int, got: Values) -> list[Failure]:
    """Spell each character by ``json.dumps``."""
    failures = []
    for name, ranges in SETS.items():
        want = {spelled(chr(code)) for first, last in ranges for code in range(first, last + 1)}
        failures += same_texts(name, want, got["sets"][name])
    rng = random.Random(f"characters {seed}")
    codes = [
        *range(0x300),
        0xD7FF,
        0xE000,
        0xFFFF,
        0x10000,
        0x10FFFF,
        0x2028,
        *(rng.randrange(0xD800) for _ in "x" * 50),
    ]
    right = {spelled(chr(code)): True for code in codes}
    halves = dict.fromkeys(["\ud800", "\udbff", "\udc00", "\udfff"], False)
    wrong = {text: False for text in wrong_spellings() if text not in right}
    return failures + same_answers("any character", {**wrong, **halves, **right}, got["any"])


REGISTRY.add(
    "L7.G.characters",
    "A character stands for itself between quotes, or, if JSON does not let it, as the one escape of json.dumps.",
    characters_probe,
    characters_verdict,
)

A = [(97, 97)]
ODD = [(10, 10), (34, 34), (92, 92)]
BOTH = [(1, 1), (97, 98)]
# Trees over raw characters, and the raw texts that they match.
STRINGS: dict[str, tuple[Any, set[str]]] = {
    "one": (("chars", ODD), {"\n", '"', "\\"}),
    "in a row": (
        ("concat", [("chars", A), ("chars", ODD), ("chars", BOTH)]),
        {f"a{odd}{last}" for odd in '\n"\\' for last in "\x01ab"},
    ),
    "either": (
        ("choice", [("chars", A), ("concat", [("chars", ODD), ("chars", ODD)])]),
        {"a", *(a + b for a in '\n"\\' for b in '\n"\\')},
    ),
    "0 to 2 of them": (("repeat", ("chars", ODD), 0, 2), {"", *'\n"\\', *(a + b for a in '\n"\\' for b in '\n"\\')}),
    "none of them": (("repeat", ("chars", ODD), 0, 0), {""}),
    "exactly 3": (
        ("repeat", ("choice", [("chars", A), ("chars", [(0, 0)])]), 3, 3),
        {"".join(each) for each in product("a\0", repeat=3)},
    ),
    "a repeat of a repeat": (
        ("repeat", ("concat", [("repeat", ("chars", ODD[:1]), 1, 2), ("chars", A)]), 1, 2),
        {one + two for one in ("\na", "\n\na") for two in ("", "\na", "\n\na")},
    ),
    "nothing at all": (("choice", []), set()),
    "the empty text": (("concat", []), {""}),
}


def build_tree(form: Any) -> Any:
    """Build the engine's tree."""
    from mini_engine.grammar.automata.syntax import Chars, Choice, Concat, Repeat

    if form[0] == "chars":
        return Chars(tuple(form[1]))
    if form[0] == "repeat":
        return Repeat(build_tree(form[1]), form[2], form[3])
    return {"concat": Concat, "choice": Choice}[form[0]](tuple(map(build_tree, form[1])))


def strings_probe(seed: int) -> Values:
    """Spell every tree, and strings by their length."""
    from mini_engine.grammar.schema.values import spell_text, string_of_length

    trees = {name: plain(spell_text(build_tree(form))) for name, (form, _) in STRINGS.items()}
    return {"trees": trees, "endless": plain(string_of_length(2)), "2 or 3": plain(string_of_length(2, 3))}


def strings_verdict(seed: int, got: Values) -> list[Failure]:
    """Spell the raw texts one by one; count the characters of a string, not those of its spelling."""
    failures = []
    for name, (_, raw) in STRINGS.items():
        failures += same_texts(name, {spelled(text) for text in raw}, got["trees"][name])
    samples = ["", "a", "ab", '"', '""', "\\", "\n\n", "\x1f\x1f\x1f", '\\"\n', "äß€", "😀😀", "abcd", '"\\\n\t']
    for name, most in (("endless", 10**6), ("2 or 3", 3)):
        answers = {json.dumps(text, ensure_ascii=False): 2 <= len(text) <= most for text in samples}
        odd = {'"ab': False, 'ab"': False, '"a"b"': False, '"\\"': False, '"a\\"': False, '"a\nb"': False, "ab": False}
        failures += same_answers(f"strings of {name} characters", {**odd, **answers}, got[name])
    return failures


REGISTRY.add(
    "L7.G.strings",
    "A tree of raw text becomes the tree of its JSON spelling: rows, choices and repeats of characters stay what they "
    "are, and an escape counts as one character.",
    strings_probe,
    strings_verdict,
)


# Members ------------------------------------------------------------------------------------------------------------


def member_cases() -> list[str]:
    """Return who is required ("r") and who is optional ("o"), of up to five members."""
    return ["".join(each) for count in range(6) for each in product("ro", repeat=count)]


def members_of(case: str) -> Any:
    """Build the tree of members a, b, c, … as the candidate does."""
    from mini_engine.grammar.automata.syntax import literal
    from mini_engine.grammar.schema.converter import Converter
    from mini_engine.grammar.schema.values import PUNCTUATIONS

    members = [(literal(chr(97 + index)), kind == "r") for index, kind in enumerate(case)]
    given = list(members)
    tree = Converter(True, PUNCTUATIONS["compact"]).members(members)
    assert members == given, f"members was given {len(given)} pairs, and changed the list"
    return tree


def members_probe(seed: int) -> Values:
    """Build every case, and one of many members."""
    return {
        "texts": {case or "none": plain(members_of(case)) for case in member_cases()},
        "sizes": {name: nodes_and_levels(members_of(case)) for name, (case, _) in MANY.items()},
    }


# Many members, the most nodes of their tree and its most levels.
MANY: dict[str, tuple[str, tuple[int, int]]] = {
    "14 members, all optional": ("o" * 14, (2000, 400)),
    "14 members, one in the middle is required": ("o" * 7 + "r" + "o" * 6, (2000, 400)),
    "300 members, all optional": ("o" * 300, (20_000, 400)),
}


def nodes_and_levels(tree: Any) -> list[int]:
    """Count the nodes and the levels of the engine's tree, without recursion: a wrong one may be deep."""
    nodes = levels = 0
    level = [tree]
    while level:
        nodes += len(level)
        levels += 1
        level = [part for node in level for name in ("parts", "options") for part in getattr(node, name, ())] + [
            node.node for node in level if hasattr(node, "node")
        ]
    return [nodes, levels]


def members_verdict(seed: int, got: Values) -> list[Failure]:
    """Write down every subset that has all the required ones, in order."""
    failures = []
    for case in member_cases():
        names = range(len(case))
        subsets = [subset for count in range(len(case) + 1) for subset in combinations(names, count)]
        whole = [subset for subset in subsets if all(index in subset for index in names if case[index] == "r")]
        want = {",".join(chr(97 + index) for index in subset) for subset in whole}
        failures += same_texts(f"members {case or 'none'} (r is required)", want, got["texts"][case or "none"])
    for name, (_, bounds) in MANY.items():
        for what, most, count in zip(("nodes", "levels"), bounds, got["sizes"][name], strict=True):
            if count > most:
                failures.append(Failure(name, what, f"at most {most}", str(count)))
    return failures


REGISTRY.add(
    "L7.G.members",
    "The members of an object are the required ones and any of the others, in order, with a comma between each two: "
    "none in front, none after, none doubled.",
    members_probe,
    members_verdict,
)


# Schemas ------------------------------------------------------------------------------------------------------------

ABSENT = object()
ODD_TEXTS = ["".join(each) for count in range(1, 4) for each in product('a"\\\n', repeat=count)]
# A schema, and the values of each of its properties, ``ABSENT`` where it may be; or the values of the whole.
SCHEMAS: dict[str, tuple[dict[str, Any], list[Any] | dict[str, list[Any]]]] = {
    "bounds that are no integers": (
        {"type": "integer", "minimum": -1.5, "exclusiveMaximum": 11.5},
        list(range(-1, 12)),
    ),
    "bounds that do not belong to the range": (
        {"type": "integer", "exclusiveMinimum": -11, "exclusiveMaximum": 3},
        list(range(-10, 3)),
    ),
    "only negative integers": ({"type": "integer", "minimum": -120, "maximum": -9}, list(range(-120, -8))),
    "a pattern with quotes and backslashes": (
        {"type": "string", "pattern": '^a?["\\\\\n]{1,2}$'},
        [text for text in ODD_TEXTS if re.fullmatch(r'a?["\\\n]{1,2}', text)],
    ),
    "a pattern about the value and not about its spelling": (
        {"type": "string", "pattern": "^[\\n\\t]n?$"},
        ["\n", "\t", "\nn", "\tn"],
    ),
    "an object with two optional properties in front": (
        {
            "type": "object",
            "properties": {
                "first": {"type": "integer", "minimum": 9, "maximum": 10},
                "second": {"enum": ["\n", 'a"', None]},
                "third": {"type": "boolean"},
                "fourth": {"type": "integer", "minimum": -1, "maximum": 0},
            },
            "required": ["third"],
        },
        {
            "first": [ABSENT, 9, 10],
            "second": [ABSENT, "\n", 'a"', None],
            "third": [False, True],
            "fourth": [ABSENT, -1, 0],
        },
    ),
    "an object that may be empty": (
        {"type": "object", "properties": {"a": {"const": 1}, "b\\": {"const": "\\"}}},
        {"a": [ABSENT, 1], "b\\": [ABSENT, "\\"]},
    ),
    "objects in each other": (
        {
            "type": "object",
            "properties": {
                "in": {
                    "type": "object",
                    "properties": {"a": {"type": "null"}, "b": {"type": "integer", "minimum": 99, "maximum": 100}},
                },
                "out": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1}, "maxItems": 2},
            },
            "required": ["out"],
        },
        {
            "in": [ABSENT, {}, *({"a": None} | rest for rest in ({}, {"b": 99}, {"b": 100})), {"b": 99}, {"b": 100}],
            "out": [[], [0], [1], [0, 0], [0, 1], [1, 0], [1, 1]],
        },
    ),
}
SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":")}


def values_of(wanted: Any) -> list[Any]:
    """Return every value that a schema is to have."""
    if isinstance(wanted, list):
        return wanted
    rows = product(*wanted.values())
    return [{name: value for name, value in zip(wanted, row, strict=True) if value is not ABSENT} for row in rows]


def schemas_probe(seed: int) -> Values:
    """Convert every schema, with both kinds of white space."""
    from mini_engine.grammar.schema.converter import schema_node

    return {
        form: {name: plain(schema_node(schema, form)) for name, (schema, _) in SCHEMAS.items()}  # type: ignore[arg-type]
        for form in SEPARATORS
    }


def schemas_verdict(seed: int, got: Values) -> list[Failure]:
    """Write every value as ``json.dumps`` does."""
    failures = []
    for form, separators in SEPARATORS.items():
        for name, (_, wanted) in SCHEMAS.items():
            want = {json.dumps(v, ensure_ascii=False, separators=separators) for v in values_of(wanted)}
            failures += same_texts(f"{name}, {form}", want, got[form][name])
    return failures


REGISTRY.add(
    "L7.G.schemas",
    "The texts of a schema that has a few hundred values are exactly those that json.dumps writes for them.",
    schemas_probe,
    schemas_verdict,
)
