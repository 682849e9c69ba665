"""The checks of L5.H: text as it comes, and stop strings.

Owns: probes that feed ids to ``mini_engine.detokenizer`` and what they must give: the text of ``spec_text.py``, which
decodes and searches everything anew after every token. Needs no other task and no model.
"""

import random
from collections.abc import Sequence
from typing import Any

from smoke.checks.l5 import spec_text as spec
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences, remember
from smoke.framework.prepared import prepared

REGISTRY = Registry()
Writing = tuple[list[int], list[str], int]  # ids, stop strings, min_new_tokens
SYLLABLES = ("ab", "aab", "abab", "b", "c", " time", "é", "👍", "日本", "\n\n", "🇩🇪", " a", "e\u0301", "\u200d")


def words(rng: random.Random, most: int = 12) -> str:
    """Draw a text with many repeats and characters of one to four bytes."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, most)))


def stop_strings(rng: random.Random, text: str) -> list[str]:
    """Draw pieces of a text, pieces with another end, beginnings of each other, and strings that do not occur."""
    stops = []
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text))
        piece = text[start : start + rng.randint(1, 8)]
        stops.append(rng.choice([piece, piece, piece + rng.choice("xa "), piece[:1], "zebra"]))
    return list(dict.fromkeys(stops))


def feed(writing: Writing) -> dict[str, Any]:
    """Give ids to the candidate's detokenizer until a stop string is found or they end, then flush it."""
    from mini_engine.detokenizer import Detokenizer

    ids, stops, least = writing
    text = Detokenizer(spec.tokenizer(), stops, least)
    pieces = []
    for token in ids:
        pieces.append(text.add(token))
        if text.matched is not None:
            break
    return {"pieces": pieces, "rest": text.flush(), "text": text.text, "matched": text.matched}


def expected(writing: Writing) -> dict[str, Any]:
    """Tell the same by the spec."""
    streamed = spec.streamed(*writing)
    return {"pieces": streamed.pieces, "rest": streamed.rest, "text": streamed.text, "matched": streamed.matched}


@prepared
def named(writings: Sequence[Writing]) -> dict[str, Writing]:
    """Name every writing by what it holds."""
    return {
        f"{index}: {spec.decoded(ids)!r} in {len(ids)} tokens, stop {stops}, min_new_tokens {least}": (
            ids,
            stops,
            least,
        )
        for index, (ids, stops, least) in enumerate(writings)
    }


def add_feed(check_id: str, proves: str, draw: Any, *parts: str) -> None:
    """Register a check that compares ``parts`` of what the writings of ``draw`` become."""

    def probe(seed: int) -> Values:
        return {name: only(feed(writing), parts) for name, writing in named(draw(seed)).items()}

    def wanted(seed: int) -> Values:
        return {name: only(expected(writing), parts) for name, writing in named(draw(seed)).items()}

    REGISTRY.add(check_id, proves, probe, bitwise(wanted))


def only(values: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Keep some parts; "joined" is all that was shown, "taken" how many tokens were read."""
    values = {**values, "joined": "".join(values["pieces"]) + values["rest"], "taken": len(values["pieces"])}
    return {part: values[part] for part in parts}


# The search ---------------------------------------------------------------------------------------------------------

# text, stop strings, start
SEARCHES: tuple[tuple[str, list[str], int], ...] = (
    ("abc", ["abc", "ab"], 0),  # "ab" is complete first
    ("xabc", ["bc", "abc"], 0),  # both are complete together: the longer
    ("abcd", ["bcd", "abc"], 0),
    ("abcd", ["abcd", "bc"], 0),
    ("abcd", ["bc", "abcd"], 0),
    ("a.b.", ["."], 0),
    ("a.b.", ["."], 2),
    ("abab", ["ab"], 1),  # the first one begins too early
    ("ab", ["abc"], 0),
    ("xxaab", ["aabc", "abd"], 0),
    ("aaa", ["aaaa"], 0),
    ("aaa", ["aaaa"], 2),
    ("abc", [], 0),
    ("", ["a"], 0),
    ("x\n", ["\n\n"], 0),
)


def searches(seed: int) -> dict[str, tuple[str, list[str], int]]:
    """Add drawn searches in texts of two letters, where beginnings and ends meet all the time."""
    rng = random.Random(f"searches {seed}")
    drawn = list(SEARCHES)
    for _ in range(120):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 9)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        drawn.append((text, list(dict.fromkeys(stops)), rng.randint(0, len(text))))
    return {f"{text!r} from {start}, stop {stops}": (text, stops, start) for text, stops, start in drawn}


@prepared
def without_stops(seed: int) -> list[str]:
    """Return the names of searches in which no stop string is found."""
    return [name for name, asked in searches(seed).items() if spec.first_stop(*asked) is None]


def search_probe(seed: int) -> Values:
    """Ask where a stop string begins, and if there is none how much might be one."""
    from mini_engine.detokenizer import StopStrings

    values: Values = {}
    open_ends = without_stops(seed)
    for name, (text, stops, start) in searches(seed).items():
        finder = StopStrings(stops)
        found = finder.find(text, start)
        held = finder.held_back(text, start) if name in open_ends else None
        values[name] = {"found": None if found is None else list(found), "held back": held}
    return values


def search_spec(seed: int) -> Values:
    """Grow the text by one character at a time."""
    values: Values = {}
    for name, (text, stops, start) in searches(seed).items():
        found = spec.first_stop(text, stops, start)
        held = spec.open_end(text, stops, start) if found is None else None
        values[name] = {"found": None if found is None else list(found), "held back": held}
    return values


REGISTRY.add(
    "L5.H.search",
    "The stop string that is complete first wins, of several the longest, whatever their order; held back is the "
    "longest end that begins one; nothing before the start counts.",
    search_probe,
    bitwise(search_spec),
)


# Characters ---------------------------------------------------------------------------------------------------------


@prepared
def plain_writings(seed: int) -> list[Writing]:
    """Draw texts in three spellings, and some with special tokens in them."""
    rng = random.Random(f"plain {seed}")
    writings: list[Writing] = [(ids, [], 0) for _ in range(8) for ids in spec.spellings(words(rng), rng)]
    end = spec.token("<|im_end|>")
    return [*writings, ([*spec.in_bytes("a👍"), end, *spec.in_bytes("é")], [], 0), ([end], [], 0), ([], [], 0)]


add_feed(
    "L5.H.characters",
    "With every token come the characters that are complete by now: never a part of one, none later than possible, and "
    "no special token.",
    plain_writings,
    "pieces",
    "rest",
)


@prepared
def stray_writings(seed: int) -> list[Writing]:
    """Draw ids that spell half characters, stray bytes and anything else that a model may say."""
    rng = random.Random(f"stray {seed}")
    tokens = spec.byte_tokens()
    writings: list[Writing] = [(spec.in_bytes("a" + "👍")[:-cut], [], 0) for cut in (1, 2, 3)]
    writings.append(([*spec.in_bytes(b"\xff"), *spec.in_bytes("abc")], [], 0))
    for _ in range(30):
        ids: list[int] = []
        for _ in range(rng.randint(1, 25)):
            ids += rng.choice(
                (
                    [rng.randrange(spec.tokenizer().get_vocab_size())],
                    [tokens[rng.randrange(256)]],
                    spec.in_bytes("👍".encode()[: rng.randint(1, 3)]),
                    spec.respelled(words(rng, 2), rng),
                )
            )
        writings.append((ids, [], 0))
    return writings


add_feed(
    "L5.H.joined",
    "Whatever the ids are, all pieces and the rest join to a decode of the whole; an unfinished character comes out at "
    "the end.",
    stray_writings,
    "joined",
    "text",
    "taken",
)


# Stop strings -------------------------------------------------------------------------------------------------------

# text, stop strings: across tokens, in one token, at both ends, nearly and then truly, beginnings of each other
BY_HAND: tuple[tuple[str, list[str]], ...] = (
    ("Hello world", ["lo w"]),
    (" upon a time", ["po"]),
    (" there", [" t"]),
    (" upon a time", [" upon", "po"]),
    ("ab", ["b"]),
    ("ab", ["ab"]),
    ("xab", ["abc"]),
    ("aabaac", ["aac"]),
    ("abc", ["abc", "ab"]),
    ("xabc", ["bc", "abc"]),
    ("abcd", ["abcd", "bc"]),
    ("a.b.", ["."]),
    ("a\n\nb", ["\n\n"]),
    ("👍👎", ["👎"]),
    ("xabd", ["abc"]),
)


@prepared
def stop_writings(seed: int) -> list[Writing]:
    """Spell every text in three ways, with its stop strings in two orders."""
    rng = random.Random(f"stop {seed}")
    drawn = [(text, stop_strings(rng, text)) for text in (words(rng) for _ in range(20))]
    return [
        (ids, order, 0)
        for text, stops in (*BY_HAND, *drawn)
        for ids in spec.spellings(text, rng)
        for order in ([stops] if len(stops) == 1 else [stops, stops[::-1]])
    ]


add_feed(
    "L5.H.stops",
    "A stop string ends the text with the token that completes it and cuts before it, wherever the borders of the "
    "tokens are and whether or not the tokenizer would spell it so.",
    stop_writings,
    "joined",
    "text",
    "matched",
    "taken",
)
add_feed(
    "L5.H.stream",
    "No character of a stop string is ever shown, and every character that cannot begin one is shown at once; what was "
    "held back for nothing comes out.",
    stop_writings,
    "pieces",
    "rest",
)


@prepared
def least_writings(seed: int) -> list[Writing]:
    """Let stop strings count from different tokens on."""
    rng = random.Random(f"least {seed}")
    writings: list[Writing] = [(spec.in_bytes("a.b.c."), ["."], least) for least in range(7)]
    writings += [(spec.in_bytes("xabab"), ["ab"], least) for least in range(4)]
    writings += [(spec.in_bytes("ab"), ["abc"], 2), (spec.in_bytes("x👍👍"), ["👍"], 3)]
    for _ in range(12):
        text = words(rng)
        stops = stop_strings(rng, text)
        writings += [(ids, stops, rng.randint(1, len(ids))) for ids in spec.spellings(text, rng)]
    return writings


add_feed(
    "L5.H.least",
    "A stop string that begins in a character of the first min_new_tokens tokens does not count, and nothing of it "
    "is held back.",
    least_writings,
    "pieces",
    "rest",
    "text",
    "matched",
)


# The end ------------------------------------------------------------------------------------------------------------

ENDS: dict[str, Writing] = {
    "held back for a stop string": (spec.in_bytes("xab"), ["abc"], 0),
    "an unfinished character": (spec.in_bytes("a👍")[:-1], [], 0),
    "an unfinished character after held text": (spec.in_bytes("xab👍")[:-2], ["ab👍"], 0),
    "a stop string that only the end completes": (spec.in_bytes("ab👍")[:-1], ["b\ufffd"], 0),
    "an end that would complete one, in the first 4 tokens": (spec.in_bytes("ab👍")[:-1], ["\ufffd"], 4),
    "after a stop string": (spec.in_bytes("xabc"), ["bc"], 0),
    "nothing left": (spec.in_bytes("xyz"), ["abc"], 0),
}


WHOLE = ", decoded as a whole"


def end_probe(seed: int) -> Values:
    """Flush twice; once more with the whole decoded for every token, as after bytes that are no UTF-8."""
    from mini_engine.detokenizer import Detokenizer

    values: Values = {}
    for name, (ids, stops, least) in ENDS.items():
        for how in ("", WHOLE):
            text = Detokenizer(spec.tokenizer(), stops, least)
            if how:
                text.decoder = None
            shown = "".join(text.add(token) for token in ids)
            values[name + how] = {
                "shown": shown,
                "flush": [text.flush(), text.flush()],
                "text": text.text,
                "matched": text.matched,
            }
    return values


def end_spec(seed: int) -> Values:
    """Nothing comes a second time."""
    values: Values = {}
    for name, writing in ENDS.items():
        streamed = spec.streamed(*writing)
        shown = "".join(streamed.pieces)
        values[name] = values[name + WHOLE] = {
            "shown": shown,
            "flush": [streamed.rest, ""],
            "text": streamed.text,
            "matched": streamed.matched,
        }
    return values


END_SPEC = remember(end_spec)


def end_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare what was shown, what the end brought, and that it brought it once."""
    return differences(END_SPEC(seed), got, None)


REGISTRY.add(
    "L5.H.flush",
    "The end brings out what was held back and a replacement for an unfinished character, once; it may complete a stop "
    "string, and after one it brings nothing.",
    end_probe,
    end_verdict,
)
