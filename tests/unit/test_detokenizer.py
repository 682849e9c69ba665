"""Text as it comes out of other tokenizers than the embedded model's, which lesson 5 checks with stop strings.

There are tokenizers that spell unknown characters as bytes, that write a space as a part of the next word or do not
write it at all, and that name special tokens.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
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


WORDS = ["▁Hello", "▁world", "▁", "▁▁", "a", "n't", ".", "▁I", "'m", "▁été", "日", "本", "[UNK]"]


@cache
def words(kind: str) -> Tokenizer:
    """A tokenizer of each kind that decides about the space before a word in its own way."""
    pieces, named = WORDS, "▁"
    if kind == "words":
        pieces, named = ["hello", "##s", "world", "##ly", ".", ",", "n't", "'m", "i", "été", "[UNK]"], ""
    vocab = {piece.replace("▁", named): place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = {
        "words": decoders.WordPiece(prefix="##", cleanup=True),
        "spaces": decoders.Metaspace(),
        "stripped": decoders.Sequence(strip),  # as Llama 2 does
        "first": decoders.Metaspace(prepend_scheme="first"),
        "never": decoders.Metaspace(prepend_scheme="never"),
    }[kind]
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


@cache
def embedded() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


KINDS = {kind: words(kind) for kind in ("words", "spaces", "stripped", "first", "never")} | {"bytes": embedded()}


def shown_of(tokenizer: Tokenizer, ids: list[int], stops: list[str], least: int) -> tuple[str, str | None]:
    text, shown = Detokenizer(tokenizer, stops, least), ""
    for token in ids:
        shown += text.add(token)
        if text.matched is not None:
            break
    return shown + text.flush(), text.matched


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_prompt_and_answer_are_the_text_of_both(kind: str, data: st.DataObject) -> None:
    """Whatever the tokens are, wherever the prompt ends; with a stop string the text ends before its first place."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=12))
    cut = data.draw(st.integers(1, len(ids)))
    whole, prompt = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
    if "\ufffd" in whole + prompt or not prompt.strip():
        return  # a character that the prompt cuts; or a prompt without text, behind which no space is left out
    assert shown_of(tokenizer, ids[cut:], [], 0) == (whole[len(prompt) :], None)
    answer = whole[len(prompt) :]
    start = data.draw(st.integers(0, max(len(answer) - 1, 0)))
    stop = answer[start : start + 3]
    if stop:
        assert shown_of(tokenizer, ids[cut:], [stop], 0) == (answer[: answer.find(stop)], stop)
        assert shown_of(tokenizer, ids[cut:], [stop], len(ids)) == (answer, None)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_space_before_its_first_word(kind: str) -> None:
    tokenizer = KINDS[kind]
    one, other = [256 + 44, 256 + 45] if kind == "bytes" else [0, 7]
    assert tokenizer.decode([one]) + shown_of(tokenizer, [other], [], 0)[0] == tokenizer.decode([one, other])


NAMED = KINDS["spaces"].token_to_id("</s>")


def test_the_name_of_a_special_token_is_a_stop_string() -> None:
    tokenizer = KINDS["spaces"]
    assert shown_of(tokenizer, [0, NAMED, 1], ["</s>"], 0) == (" Hello", "</s>")
    assert shown_of(tokenizer, [0, NAMED, 1], ["</s>"], 1) == (" Hello", "</s>")
    assert shown_of(tokenizer, [0, NAMED, 1, NAMED], ["x", "</s>"], 2) == (" Hello world", "</s>")
    assert shown_of(tokenizer, [0, NAMED, 1, NAMED], ["</s>"], 4) == (" Hello world", None)
    assert shown_of(tokenizer, [0, NAMED, 1], ["<s>", "world"], 0) == (" Hello ", "world")
    think = tokenizer.token_to_id("<think>")  # a token of its own, but not a special one: it has text
    assert shown_of(tokenizer, [0, think, 1], ["<think>"], 0) == (" Hello", "<think>")


def test_what_a_stop_string_could_begin_is_shown_when_a_special_token_ends_the_text() -> None:
    assert shown_of(KINDS["spaces"], [0, NAMED], ["</s>", "Hellooo"], 0) == (" Hello", "</s>")
    half = embedded().encode("日", add_special_tokens=False).ids[:2]
    (end,) = embedded().encode("<|im_end|>", add_special_tokens=False).ids
    assert shown_of(embedded(), [*half, end], ["<|im_end|>"], 0) == ("\ufffd", "<|im_end|>")


@pytest.mark.parametrize("stop", ["</s>x", "\n</s>", "<s></s>"])
def test_a_stop_string_with_a_special_token_in_it_is_refused(stop: str) -> None:
    with pytest.raises(ValueError, match=r"stop holds .* is a special token.* alone, or stop_token_ids=\[1[34]\]"):
        Detokenizer(KINDS["spaces"], ["ok", stop])
