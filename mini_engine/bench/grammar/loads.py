"""What ``bench grammar`` runs on: a vocabulary in the shape of a large model's, grammars, texts and questions.

No large tokenizer comes with the engine, so one is made: byte-pair merges of words that are drawn, from the embedded
model's corpus, from invented syllables, from other scripts and from punctuation. Its 151,643 tokens have 1.2 MB of
bytes and 500,000 trie nodes, as those of Qwen3 have, and many of them begin or end inside a character.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.grammar.tokens import byte_characters
from mini_engine.sampler.params import GrammarKey
from mini_engine.tiny import words
from mini_engine.tiny.corpus import IM_END, record_task, render_turn

NUM_TOKENS, NUM_COLUMNS = 151_643, 151_936  # tokens of text and columns of the head, as Qwen3 has them
MARKS = "{}[]()<>\",:;=+-*/_.#&|!?\\'"
ENDINGS = ("", "", "", "s", "ed", "ing", "er", "ly", "tion", "able")
KNOWN_WORDS = [
    *re.findall(r"\w+", " ".join((*words.NAMES, *words.ANIMALS, *words.ADJECTIVES, *words.OBJECTS, *words.PLACES))),
    *"name age city job pet color food happy email true false null".split(),
]
EMAIL = r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,8}"


def letters(first: str, last: str, least: int, most: int) -> Callable[[random.Random], str]:
    """Return what draws words of one script; its first characters are the common ones."""

    def draw(source: random.Random) -> str:
        span = ord(last) - ord(first)
        return "".join(chr(ord(first) + int(span * source.random() ** 2)) for _ in range(source.randint(least, most)))

    return draw


def invented(source: random.Random) -> str:
    """Draw a word of one to four syllables."""
    starts, vowels, ends = words.SYLLABLE_STARTS, words.VOWELS, words.SYLLABLE_ENDS
    count = source.choices((1, 2, 3, 4), (2, 6, 5, 2))[0]
    stem = "".join(source.choice(starts) + source.choice(vowels) + source.choice(ends) for _ in range(count))
    return stem + source.choice(ENDINGS)


KINDS: list[tuple[float, Callable[[random.Random], str]]] = [
    (5, lambda source: source.choice(KNOWN_WORDS)),
    (55, invented),
    (8, letters("а", "я", 3, 9)),
    (4, letters("ء", "ي", 3, 7)),
    (14, letters("一", "龥", 1, 4)),
    (3, letters("가", "힣", 1, 3)),
    (6, lambda source: "".join(source.choices(MARKS, k=source.randint(2, 4)))),
    (0.3, lambda source: source.choice(" \n\t") * source.randint(2, 32)),
]


def draw_words(seed: int) -> Iterator[str]:
    """Yield words without end; most of those made of letters have a space before them."""
    source = random.Random(seed)
    shares, makers = [share for share, _ in KINDS], [make for _, make in KINDS]
    while True:
        (make,) = source.choices(makers, shares)
        word = make(source)
        if word[0].isalpha() and source.random() < 0.3:
            word = word.capitalize()
        yield " " + word if word[0].isalpha() and source.random() < 0.6 else word


def make_merges(num_tokens: int, seed: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary and the merges that make it. A new word adds merges until it is one token.

    What a word is made of when its merge is added is what the merges before bring about, so every token can occur.
    """
    source = random.Random(seed + 1)
    characters = byte_characters()
    ids = {character: number for number, character in enumerate(characters)}
    ranks: dict[tuple[str, str], int] = {}
    for word in draw_words(seed):
        parts = [characters[byte] for byte in word.encode()]
        while len(parts) > 1 and len(ids) < num_tokens:
            known = [(ranks[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in ranks]
            place = min(known)[1] if known else source.randrange(len(parts) - 1)
            merged = parts[place] + parts[place + 1]
            ranks.setdefault((parts[place], parts[place + 1]), len(ranks))
            ids.setdefault(merged, len(ids))
            parts[place : place + 2] = [merged]
        if len(ids) == num_tokens:
            break
    return ids, list(ranks)


def large_tokenizer(seed: int, num_tokens: int = NUM_TOKENS) -> Tokenizer:
    """Return a byte-level tokenizer of ``num_tokens`` tokens of text and the embedded model's special ones."""
    small = tiny_tokenizer()
    large = Tokenizer(models.BPE(*make_merges(num_tokens, seed)))
    large.normalizer = small.normalizer
    large.pre_tokenizer = small.pre_tokenizer
    large.decoder = small.decoder
    special = [token.content for token in small.get_added_tokens_decoder().values()]
    large.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return large


def tiny_tokenizer() -> Tokenizer:
    """Return the embedded model's tokenizer."""
    tokenizer: Tokenizer = load_tokenizer(TINY_MODEL).backend_tokenizer
    return tokenizer


def record(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these properties, all of them required, and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def short(most: int) -> dict[str, Any]:
    """Return the schema of a string of up to ``most`` characters."""
    return {"type": "string", "maxLength": most}


NUMBER = {"type": "integer", "minimum": 0, "maximum": 150}
YES_NO = {"type": "boolean"}
PERSON = record(
    name=short(40),
    age=NUMBER,
    email={"type": "string", "pattern": f"^{EMAIL}$"},
    tags={"type": "array", "items": short(20), "maxItems": 5},
    active=YES_NO,
)
# Name -> the grammar, and texts that it allows: the states on their ways are visited.
GRAMMARS: dict[str, tuple[GrammarKey, list[str]]] = {
    "email": (("regex", EMAIL), ["mila.fox@forest-owl.org", "a_1@b.io"]),
    "number": (("regex", r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"), ["-1234.5678e-10", "0", "31415926"]),
    "string": (("regex", r'"[^"\\]{0,200}"'), ['"A shy fox, größer: 日本語"']),
    "person": (
        ("json_schema", json.dumps(PERSON)),
        [
            json.dumps({"name": "Mila", "age": 7, "email": "mila@fox.org", "tags": ["shy", "red hat"], "active": True}),
            '{"name": "Jörg Łęcki", "age": 150, "email": "j@x.de", "tags": [], "active": false}',
        ],
    ),
    "any JSON": (("json_schema", "{}"), ['{"fox": [1, -2.5, null, {"red": true}], "": "a\\nb"}', "[[], {}, 1e9]"]),
}
# What a step is measured with. The lists are long enough for no answer to end early.
STEP_SCHEMAS = [
    {"type": "array", "items": record(name={"type": "string"}, age=NUMBER), "minItems": 12},
    {
        "type": "array",
        "items": record(city={"type": "string"}, happy=YES_NO, pets={"enum": [0, 1, "many"]}),
        "minItems": 12,
    },
    {"type": "array", "items": {"enum": list(words.ANIMALS[:20])}, "minItems": 64},
    {"type": "array", "items": {"type": "string"}, "minItems": 40},
]
# From text that is hardly ever forced to text that nearly always is.
JUMP_SCHEMAS = {
    "free text": record(text=short(40)),
    "person": record(name=short(12), age=NUMBER, city=short(12), happy=YES_NO),
    "list": {
        "type": "array",
        "minItems": 3,
        "maxItems": 3,
        "items": record(pet={"enum": list(words.ANIMALS[:12])}, age=NUMBER),
    },
    "order": record(
        customer=record(name=short(12), is_member=YES_NO),
        currency={"const": "EUR"},
        total_amount=NUMBER,
        status={"enum": ["shipped", "cancelled", "returned"]},
        delivered=YES_NO,
    ),
    "settings": record(
        notifications_enabled=YES_NO,
        colour_scheme={"enum": ["light", "dark"]},
        automatic_updates=YES_NO,
        language_of_interface={"enum": ["en", "de", "ja"]},
    ),
}


def questions(count: int, seed: int) -> list[str]:
    """Return chat prompts that ask for a person as JSON, in the embedded model's words; the thought is closed."""
    source = random.Random(seed)
    turns = [(task := record_task(source, held_out=True), render_turn(task, "no_think")) for _ in range(count)]
    return [turn.removesuffix(f"{task.answer}{IM_END}\n") for task, turn in turns]
