"""Specs of L5's text: after every token a decode of everything and a search in everything, from the beginning.

Owns: what can be shown after each token, where an answer ends, and ways to spell a text in tokens. Nothing here
remembers anything from one token to the next. Must not know: the engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tokenizers import Tokenizer

from smoke.framework.cases import MODEL_FOLDER

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are not a character


@cache
def tokenizer() -> Tokenizer:
    """Return the embedded model's tokenizer."""
    return Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))


def token(name: str) -> int:
    """Return the id of a token."""
    token_id = tokenizer().token_to_id(name)
    assert token_id is not None, f"the tokenizer has no token {name!r}"
    return int(token_id)


def decoded(ids: Sequence[int]) -> str:
    """Decode all ids at once, special tokens left out."""
    return str(tokenizer().decode(list(ids), skip_special_tokens=True))


def whole_characters(ids: Sequence[int]) -> str:
    """Return the text as far as its characters are complete; for texts that hold no replacement character."""
    return decoded(ids).rstrip(UNFINISHED)


def begun_characters(ids: Sequence[int]) -> int:
    """Return how many characters the tokens have begun, one that is not complete included."""
    return len(whole_characters(ids)) + decoded(ids).endswith(UNFINISHED)


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Let the text grow by one character at a time; the first complete stop string wins, of several the longest.

    Returns where it begins and which it is; none begins before ``start``.
    """
    for end in range(start + 1, len(text) + 1):
        complete = [stop for stop in stops if text[start:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


def open_end(text: str, stops: Sequence[str], start: int = 0) -> int:
    """Return how many characters at the end of ``text[start:]`` are the longest proper beginning of a stop string."""
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    return max((len(part) for part in beginnings if text[start:].endswith(part)), default=0)


@dataclass(frozen=True)
class Streamed:
    """A text as it was told: the piece shown with each token that was taken, and what came at the end.

    ``at_end``: the stop string was complete only when an unfinished character was given up.
    """

    pieces: list[str]
    rest: str
    text: str
    matched: str | None
    at_end: bool = False


def streamed(ids: Sequence[int], stops: Sequence[str] = (), least: int = 0) -> Streamed:
    """Tell the text of ``ids`` up to the token that completes a stop string; the first ``least`` tokens hold none."""
    start = 0
    shown = 0
    pieces = list[str]()
    for count in range(1, len(ids) + 1):
        text = whole_characters(ids[:count])
        start = begun_characters(ids[:count]) if count <= least else start
        hit = first_stop(text, stops, start)
        if hit is not None:
            text = text[: hit[0]]
            return Streamed([*pieces, text[shown:]], "", text, hit[1])
        until = len(text) - open_end(text, stops, start)
        pieces.append(text[shown:until])
        shown = until
    text = decoded(ids)
    hit = first_stop(text, stops, start)
    text = text if hit is None else text[: hit[0]]
    return Streamed(pieces, text[shown:], text, None if hit is None else hit[1], hit is not None)


@cache
def byte_tokens() -> tuple[int, ...]:
    """Return the token of every byte. A byte-level tokenizer writes each byte as one printable letter."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return tuple(token(letters[byte]) for byte in range(256))


def encoded(text: str) -> list[int]:
    """Spell a text as the tokenizer does."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def in_bytes(text: str | bytes) -> list[int]:
    """Spell a text with a token for every byte."""
    return [byte_tokens()[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def respelled(text: str, rng: random.Random) -> list[int]:
    """Cut a text at random places and spell every piece in either way."""
    ids = list[int]()
    rest = text
    while rest:
        piece = rest[: (count := rng.randint(1, 6))]
        rest = rest[count:]
        ids += rng.choice((encoded, in_bytes))(piece)
    return ids


def spellings(text: str, rng: random.Random) -> list[list[int]]:
    """Spell a text in three ways."""
    return [encoded(text), in_bytes(text), respelled(text, rng)]
