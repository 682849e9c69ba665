"""Text as it comes: against a decode of the whole, and stop strings against a search of the whole text."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from mini_engine.checkpoint import TINY_MODEL
from mini_engine.detokenizer import Detokenizer

TOKENIZER = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
SIZE = TOKENIZER.get_vocab_size()
TEXTS = [
    "Once upon a time",
    "naïve café – 5 €",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family 🇩🇪",
    "a\n\n\tb  c",
    "�",
    "e\u0301",
]
repeat = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
worlds = st.builds(random.Random, st.integers(0, 2**32))


@cache
def byte_tokens() -> list[int]:
    """The token id of every byte: byte-level BPE writes each byte as one printable character."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [TOKENIZER.token_to_id(letters[byte]) for byte in range(256)]


def spell(text: str | bytes) -> list[int]:
    """Ids of ``text``, one per byte: not how the tokenizer would write it."""
    return [byte_tokens()[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def respell(text: str, dice: random.Random) -> list[int]:
    """Ids that decode to ``text``, cut at random: pieces as the tokenizer writes them, bytes between."""
    ids, rest = [], text
    while rest:
        count = dice.randint(1, 6)
        piece, rest = rest[:count], rest[count:]
        ids += spell(piece) if dice.random() < 0.5 else TOKENIZER.encode(piece, add_special_tokens=False).ids
    return ids


def feed(ids: Sequence[int], stops: Sequence[str] = (), min_new_tokens: int = 0) -> tuple[list[str], Detokenizer]:
    """Give ids until a stop string is found or they end -> the pieces shown, with the last from the flush."""
    text = Detokenizer(TOKENIZER, stops, min_new_tokens)
    pieces = []
    for token in ids:
        pieces.append(text.add(token))
        if text.matched is not None:
            break
    return [*pieces, text.flush()], text


def random_ids(dice: random.Random) -> list[int]:
    """Words, single bytes of any value, whole characters byte by byte, special tokens: anything a model may say."""
    ids: list[int] = []
    for _ in range(dice.randint(0, 30)):
        kind = dice.choice(["any", "any", "byte", "text", "special", "half"])
        if kind == "any":
            ids.append(dice.randrange(SIZE))
        elif kind == "byte":
            ids.append(byte_tokens()[dice.randrange(256)])
        elif kind == "text":
            ids += respell(dice.choice(TEXTS), dice)
        elif kind == "special":
            ids.append(SIZE - 1 - dice.randrange(5))
        else:
            ids += spell("👍".encode()[: dice.randint(1, 3)])
    return ids


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Brute force: grow the text by characters; the first end of a stop string wins, the longest of equal ends."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_the_special_tokens_are_where_these_tests_think() -> None:
    """The last five: the markers of thought are shown, the others are not."""
    assert TOKENIZER.decode(list(range(SIZE - 5, SIZE)), skip_special_tokens=True) == "<think></think>"
    assert TOKENIZER.decode(spell("naïve 👍")) == "naïve 👍"


@repeat
@given(worlds)
def test_the_pieces_join_to_a_decode_of_the_whole(dice: random.Random) -> None:
    ids = random_ids(dice)
    pieces, text = feed(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=True) == text.text


# ---- stop strings ----


def random_stops(dice: random.Random, text: str) -> list[str]:
    """Pieces of the text, pieces with another end, starts of each other, strings that do not occur."""
    stops = []
    for _ in range(dice.randint(1, 4)):
        start = dice.randrange(len(text))
        piece = text[start : start + dice.randint(1, 8)]
        stops.append(dice.choice([piece, piece, piece + dice.choice("xa "), piece[:1], "zebra"]))
    return list(dict.fromkeys(stops))


@repeat
@given(worlds)
def test_stop_strings_cut_the_text_where_a_search_of_the_whole_does_however_it_is_spelled(dice: random.Random) -> None:
    words = "".join(
        dice.choice(["ab", "aab", "abab", "b", " time", "é", "👍", "\n"]) for _ in range(dice.randint(1, 12))
    )
    stops = random_stops(dice, words)
    expected = first_stop(words, stops)
    for _ in range(3):
        pieces, text = feed(respell(words, dice), stops)
        assert ("".join(pieces), text.matched) == expected


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    """A model's table of embeddings is often longer than its tokenizer's vocabulary."""
    assert "".join(feed([*spell("a"), SIZE + 5, *spell("b")])[0]) == "ab"


@cache
def byte_fallback() -> Tokenizer:
    """A tokenizer that spells unknown characters as bytes, as those of Llama and Mistral do."""
    vocab = {"<unk>": 0, "x": 1, "y": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


BYTE = 3


def test_bytes_that_turn_earlier_characters_into_others_are_no_error() -> None:
    """The letter A, as a byte, then the first byte of another character: both become replacement characters."""
    ids = [BYTE + 0x41, BYTE + 0xE2, 1]
    stream = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):  # what the library does; so the test is about something
        [stream.step(byte_fallback(), token) for token in ids]
    text = Detokenizer(byte_fallback())
    assert [text.add(token) for token in ids] == ["A", "", "\ufffdx"]
    assert text.add(2) == "y"
    assert text.flush() == ""


@repeat
@given(st.lists(st.integers(0, 2 + 256), max_size=12))
def test_any_tokens_of_a_byte_fallback_tokenizer_have_a_text(ids: list[int]) -> None:
    text = Detokenizer(byte_fallback())
    shown = "".join([*(text.add(token) for token in ids), text.flush()])
    assert shown == text.text
    whole = byte_fallback().decode(ids, skip_special_tokens=True)
    assert len(shown) >= len(whole)
    if "\ufffd" not in whole:
        assert shown == whole
