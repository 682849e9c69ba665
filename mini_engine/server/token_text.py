"""Single tokens as bytes and as text, for log-probabilities and for ``/tokenize``."""

from functools import lru_cache
from http import HTTPStatus

from transformers import PreTrainedTokenizerBase

from mini_engine.grammar.tokens import speller
from mini_engine.server.errors import ApiError


class TokenTexts:
    """What each id of a tokenizer spells."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read tokens of ``tokenizer``."""
        self.tokenizer = tokenizer
        backend = tokenizer.backend_tokenizer
        self.spell = speller(backend)
        self.added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
        self.special = set(tokenizer.all_special_ids)
        self.text_of = lru_cache(maxsize=65_536)(self.decode)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's own bytes: a character may begin in one token and end in the next.

        Empty for an id that the tokenizer does not have.
        """
        if token_id in self.added:
            return str(self.added[token_id]).encode()
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self.spell is None:
            return str(self.tokenizer.decode([token_id])).encode()
        return self.spell(token_id, str(token))

    def decode(self, token_id: int) -> str:
        r"""Return the token's text; one with a part of a character is written ``bytes:\xe2``, as OpenAI does."""
        own = self.bytes_of(token_id)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def shown(self, token_id: int) -> bytes:
        """Return what the token adds to an answer's text: its bytes, none if it is special."""
        return b"" if token_id in self.special else self.bytes_of(token_id)

    def check(self, token_ids: list[int], vocab_size: int, param: str) -> None:
        """Raise ``ApiError`` for an id outside the vocabulary."""
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise ApiError(
                    HTTPStatus.BAD_REQUEST,
                    f"{param} holds token id {token}; the vocabulary has the ids 0 to {vocab_size - 1}",
                    param,
                )
