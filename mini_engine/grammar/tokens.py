"""L7: the bytes of every token, which is all that a grammar needs to know of a tokenizer.

A grammar is about text, a mask is about token ids. Between them stand bytes: a token may begin or end inside a
character, so it has bytes and no text. Byte-level tokenizers have such tokens. SentencePiece's have text with ``▁`` for
a space, and some of them also a token for each byte.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer

from mini_engine.texts import TOOL_CALL, TOOL_CALL_END, AfterText

BYTE = re.compile("<0x([0-9A-F]{2})>")  # the name of a byte's token
BEFORE = "\x02"  # no text has it, so nothing merges with it
PLAIN_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}  # of decoders that put texts of tokens together


class TokenizerNotSupportedError(ValueError):
    """The tokenizer's tokens have no bytes that could be read off."""


@dataclass(frozen=True)
class TokenTable:
    """``token_bytes[t]`` of every id below the size of the head; ``stop_ids`` end a text.

    Empty for ids that spell no text: added tokens (``<|im_start|>``, ``<think>``), stop ids, the padding of the head.
    No grammar allows those, whatever it says about characters, but for the stop ids where the text is complete. The
    marks of a call are text, also where each is one added token: a grammar has them, and no answer hides them.
    """

    token_bytes: tuple[bytes, ...]
    stop_ids: frozenset[int]

    def __post_init__(self) -> None:
        """Check the stop ids. Raises ``ValueError``."""
        wrong = sorted(token for token in self.stop_ids if not 0 <= token < self.vocab_size)
        if wrong:
            raise ValueError(f"stop id {wrong[0]} lies outside the vocabulary, ids 0 to {self.vocab_size - 1}")
        spelled = sorted(token for token in self.stop_ids if self.token_bytes[token])
        if spelled:
            raise ValueError(
                f"stop id {spelled[0]} is spelled {self.token_bytes[spelled[0]]!r}; a stop token has no bytes, or a "
                "text could not contain it"
            )

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return len(self.token_bytes)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> "TokenTable":
        """Read the bytes of a tokenizer's tokens, as they stand within a text, for a head of ``vocab_size`` columns.

        Raises ``TokenizerNotSupportedError`` for a tokenizer whose tokens depend on their neighbours, or one with more
        tokens than columns.
        """
        spell = speller(tokenizer)
        if spell is None:
            raise TokenizerNotSupportedError(
                "grammars need a tokenizer whose texts are those of its tokens in a row: its decoder is ByteLevel, or "
                f"has no other steps than {', '.join(sorted(PLAIN_STEPS))}; take a checkpoint that has one, as Qwen3 "
                "and Llama do"
            )
        marks = (TOOL_CALL, TOOL_CALL_END)
        added = {
            number: token.content.encode() if token.content in marks and not token.special else b""
            for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        spellings = [b""] * vocab_size
        for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
            if number >= vocab_size:
                raise TokenizerNotSupportedError(f"the tokenizer has id {number}, the head {vocab_size} columns")
            if number in added:
                spellings[number] = added[number]
            elif number not in stop_ids:
                spellings[number] = spell(number, token)
        return cls(tuple(spellings), stop_ids)


def speller(tokenizer: Tokenizer) -> Callable[[int, str], bytes] | None:
    """Return what gives the bytes of a token, of its id and name, behind other text.

    ``None`` where they depend on the tokens around it, or the decoder is of a kind that is not known.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": "none"}
    steps = decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}

        def of_characters(_: int, name: str) -> bytes:
            try:
                return bytes(map(byte_of.__getitem__, name))
            except KeyError:  # it stands for itself
                return name.encode()

        return of_characters
    whole = steps[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []  # steps that see the text, not its tokens
    if not set(kinds) <= PLAIN_STEPS or any(step["type"] != "Strip" or step["stop"] for step in whole):
        return None
    texts, has_bytes = AfterText(tokenizer), "ByteFallback" in kinds

    def of_text(token_id: int, name: str) -> bytes:
        byte = BYTE.fullmatch(name) if has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else texts.decode([token_id]).encode()

    return of_text


@dataclass(frozen=True)
class Spelled:
    """The ids of a text, as an ``Encoding`` has them."""

    ids: list[int]


class InnerText:
    """Encodes a text as it stands behind other text. SentencePiece puts a space before the first word of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode with ``tokenizer``."""
        self.tokenizer = tokenizer
        self.before: list[int] = tokenizer.encode(BEFORE, add_special_tokens=False).ids

    def encode(self, text: str, add_special_tokens: bool = False) -> Spelled:
        """Return the ids of ``text``, none where its beginning merges with what stands before it."""
        ids = self.tokenizer.encode(BEFORE + text, add_special_tokens=add_special_tokens).ids
        count = len(self.before)
        return Spelled(ids[count:] if ids[:count] == self.before else [])


def inner(tokenizer: Tokenizer, table: TokenTable) -> Tokenizer:
    """Return what encodes texts as behind other text: ``tokenizer`` itself if it puts nothing before a word."""
    ids = tokenizer.encode("a", add_special_tokens=False).ids
    is_plain = b"".join(table.token_bytes[token] for token in ids) == b"a"
    return tokenizer if is_plain else cast(Tokenizer, InnerText(tokenizer))


def byte_characters() -> str:
    """Return the character that stands for each byte in a byte-level tokenizer's vocabulary (GPT-2's table).

    Visible characters stand for themselves; the other 68 bytes take the characters from U+0100 on, in their order.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256))
