"""Text as it comes out of a tokenizer that spells unknown characters as bytes, as those of Llama and Mistral do.

Lesson 5 checks the embedded model's tokenizer and stop strings.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from mini_engine.checkpoint import TINY_MODEL
from mini_engine.detokenizer import Detokenizer

BYTE = 3


@cache
def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0, "x": 1, "y": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2 + 256), max_size=12))
def test_any_tokens_of_a_byte_fallback_tokenizer_have_a_text(ids: list[int]) -> None:
    text = Detokenizer(byte_fallback())
    shown = "".join([*(text.add(token) for token in ids), text.flush()])
    assert shown == text.text
    whole = byte_fallback().decode(ids, skip_special_tokens=True)
    assert len(shown) >= len(whole)
    if "\ufffd" not in whole:
        assert shown == whole


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    """A model's table of embeddings is often longer than its tokenizer's vocabulary."""
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    text, (one, other) = Detokenizer(tokenizer), tokenizer.encode("a b", add_special_tokens=False).ids
    assert [text.add(token) for token in (one, tokenizer.get_vocab_size() + 5, other)] == ["a", "", " b"]
