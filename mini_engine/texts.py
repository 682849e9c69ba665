"""The text of an answer's tokens: what they add to a text before them, and tokens that have none."""

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class AfterText:
    """Decodes as behind other text. Many tokenizers leave out a space at the very beginning, where no answer begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Decode with ``tokenizer``."""
        self.tokenizer = tokenizer
        self.before, self.length = opening(tokenizer)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return what ``token_ids`` add to a text."""
        whole: str = self.tokenizer.decode([*self.before, *token_ids], skip_special_tokens=skip_special_tokens)
        return whole[self.length :]

    def stream(self) -> DecodeStream:
        """Return a decoder of token after token; special tokens have no text."""
        decoder = DecodeStream(skip_special_tokens=True)
        for token_id in self.before:
            decoder.step(self.tokenizer, token_id)
        return decoder


@lru_cache(maxsize=8)
def opening(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Return the first token that is a word, as a list, and the length of its text; nothing if there is none.

    The name of a byte's token ends otherwise than its text. Such a token would be one character with bytes behind it.
    """
    for token_id in range(tokenizer.get_vocab_size()):
        text: str = tokenizer.decode([token_id])
        if text.isalpha() and str(tokenizer.id_to_token(token_id)).endswith(text):
            return [token_id], len(text)
    return [], 0


THINK, THINK_END = "<think>", "</think>"  # the marks around a thought
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"  # around a call of a function, in many families of models


def begun(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``: not all of it."""
    return max(length for length in range(len(mark)) if text.endswith(mark[:length]))


def thought_ids(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the ids of the marks around a thought, ``None`` if one of them is no token: then no thought is known."""
    begin, end = (tokenizer.token_to_id(mark) for mark in (THINK, THINK_END))
    return None if begin is None or end is None else (begin, end)


def is_thought_open(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool | None:
    """Return whether a prompt ends within a thought that its template has opened; ``None`` if none can come.

    That is so after the end of one, and with a tokenizer that has no marks. White space after a mark is its own.
    """
    ids, texts = thought_ids(tokenizer), AfterText(tokenizer)  # alone, a token that is a space may have no text
    last = next((token for token in reversed(prompt_ids) if not texts.decode([token]).isspace()), None)
    return None if ids is None or last == ids[1] else last == ids[0]


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens that are left out of texts: name -> id."""
    return {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def special_stops(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, str]:
    """Return the ``stops`` that are names of special tokens: id -> name. They end a text although they have none.

    Raises ``ValueError`` for a stop string with such a name and more: a text never holds it.
    """
    special = special_tokens(tokenizer) if stops else {}
    for stop in stops:
        held = [name for name in special if name in stop]
        if held and stop not in special:
            raise ValueError(
                f"stop holds {stop!r}, but {held[0]!r} is a special token, which no text shows; give {held[0]!r} "
                f"alone, or stop_token_ids=[{special[held[0]]}]"
            )
    return {special[stop]: stop for stop in stops if stop in special}
