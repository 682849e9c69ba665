"""L7: the bytes of every token, which is all that a grammar needs to know of a tokenizer.

A grammar is about text, a mask is about token ids. Between them stand bytes: a byte-level token may begin or end inside
a character, so it has bytes and no text.
"""

import json
from dataclasses import dataclass

from tokenizers import Tokenizer

from mini_engine.texts import TOOL_CALL, TOOL_CALL_END


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
        """Read the bytes of a byte-level tokenizer's tokens, for a head of ``vocab_size`` columns.

        Raises ``TokenizerNotSupportedError`` for another kind of tokenizer, or one with more tokens than columns.
        """
        if not is_byte_level(tokenizer):
            raise TokenizerNotSupportedError(
                "grammars need a byte-level tokenizer, whose decoder is ByteLevel; take a checkpoint that has one, as "
                "Qwen3 does"
            )
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
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
                spellings[number] = bytes(byte_of[character] for character in token)
        return cls(tuple(spellings), stop_ids)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokens are spelled in GPT-2's byte characters."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    return any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [decoder]) if part)


def byte_characters() -> str:
    """Return the character that stands for each byte in a byte-level tokenizer's vocabulary (GPT-2's table).

    Visible characters stand for themselves; the other 68 bytes take the characters from U+0100 on, in their order.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256))
