"""L7: jump-forward: text that the grammar forces is appended without asking the model.

After ``{"`` a schema may leave nothing but ``name": "``. The model would be asked three times for what is known. But
the tokens must be those that the tokenizer would have taken for the whole text, or the model reads a spelling it has
never seen:

1. The tokenizer must not merge the forced text with what stands before it: then nothing is appended.
2. A last token that could have been longer is held back: after ``"a`` forced from ``"apple"`` or ``"anise"`` the
   tokenizer might take ``"ap`` for the next token. The model decides then.

3. Also a token before the last could have been another, if later text can merge with the end of the forced text. Such
   tokens are left out by ``JumpForward.settled``, which the engine calls afterwards.

Nothing that was given out is ever taken back. SGLang retokenised everything and rolled back (removed in 2025, PR 4032);
mlc-llm (PR 2551) holds back.
"""

import codecs
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mini_engine.grammar.base import GrammarObject
from mini_engine.grammar.masks import unpack_allowed
from mini_engine.grammar.tokens import TokenTable

LOOK_BACK = 2  # tokens before the forced text that could merge with it


class JumpForward:
    """Spells forced text in the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, table: TokenTable) -> None:
        """Note how long every token is."""
        self.tokenizer = tokenizer
        self.table = table
        self.lengths = np.array([len(spelling) for spelling in table.token_bytes])

    def tokens(self, grammar: GrammarObject, output_ids: Sequence[int], most: int) -> list[int]:
        """Return at most ``most`` tokens that must follow ``output_ids``. The grammar is where it was afterwards.

        Forced is the text of whole characters. Ends where a token is not spelled with its next bytes, and where a token
        could come that reaches beyond it.
        """
        text = whole_characters(grammar.try_jump_forward())
        candidates = self.spell(output_ids, text)[:most] if text and most > 0 else []
        rest = text.encode()
        taken = list[int]()
        for token in candidates:
            spelling = self.table.token_bytes[token]
            # A tokenizer that normalises may spell other bytes than it was given.
            if not spelling or not rest.startswith(spelling) or self.could_be_longer(grammar, len(rest)):
                break
            grammar.accept_token(token)
            taken.append(token)
            rest = rest[len(spelling) :]
        grammar.rollback(len(taken))
        return taken

    def spell(self, output_ids: Sequence[int], text: str) -> list[int]:
        """Return the tokens of ``text`` behind ``output_ids``, none if the tokenizer would merge the two.

        A special token merges with nothing, so only what follows it counts. Tokens that begin inside of a character are
        no context.
        """
        before = list(output_ids[-LOOK_BACK:])
        while not all(self.table.token_bytes[token] for token in before):
            del before[0]  # a special token, the end of a thought, with which nothing merges
        try:
            context = b"".join(self.table.token_bytes[token] for token in before).decode()
        except UnicodeDecodeError:  # it begins inside a character
            before = []
            context = ""
        ids = self.tokenizer.encode(context + text, add_special_tokens=False).ids
        return ids[len(before) :] if ids[: len(before)] == before else []

    def settled(self, grammar: GrammarObject, output_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the first of ``tokens``, forced after ``output_ids``, that the tokenizer takes whatever comes later.

        Forced is ``"resource``, of ``"resource"`` or ``"resources"``: a token ``es`` may come, and the tokenizer writes
        ``c|es``, not ``ce|s``. So the text is spelled anew with the rest of every token that may reach beyond it. The
        grammar is where it was afterwards.
        """
        text = whole_characters(grammar.try_jump_forward())
        beyond = set[bytes]()
        for cut in range(len(text)):
            reach = len(text[cut:].encode())
            before = self.spell(output_ids, text[:cut]) if cut and reach < self.lengths.max() else []
            if b"".join(self.table.token_bytes[token] for token in before) != text[:cut].encode():
                continue  # too far from the end; or it merges with what stands before, and no token begins here
            for token in before:
                grammar.accept_token(token)
            longer = self.allowed(grammar) & (self.lengths > reach)
            beyond |= {self.table.token_bytes[token][reach:] for token in longer.nonzero()[0].tolist()}
            grammar.rollback(len(before))
        kept = len(tokens)
        for rest in beyond:
            spelled = self.spell(output_ids, text + rest.decode(errors="ignore"))
            kept = next((i for i in range(kept) if spelled[i : i + 1] != [tokens[i]]), kept)
        return list(tokens[:kept])

    def allowed(self, grammar: GrammarObject) -> NDArray[np.bool_]:
        """Return which tokens may come next, [V]."""
        mask = grammar.allocate_vocab_mask(self.table.vocab_size, 1)
        grammar.fill_vocab_mask(mask, 0)
        allowed: NDArray[np.bool_] = unpack_allowed(mask, self.table.vocab_size)[0].numpy()
        return allowed

    def could_be_longer(self, grammar: GrammarObject, num_bytes: int) -> bool:
        """Whether a token may come next that has more than ``num_bytes`` bytes: those that are left of a text."""
        allowed = self.allowed(grammar)
        return bool((allowed & (self.lengths > num_bytes)).any())


def whole_characters(forced: bytes) -> str:
    """Return the text of ``forced`` without a character that it ends inside of; empty if it begins inside of one."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(forced)
    except UnicodeDecodeError:
        return ""
