"""L7: the masks of a step: every row's grammar over its row of logits, as the last thing before a token is chosen.

Owns: which rows are masked, and what happens when nothing is left of one. Must not know: requests, how masks are made.
"""

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.grammar.base import GrammarObject
from mini_engine.sampler.batch import TORCH, TorchOps


@dataclass(frozen=True)
class GrammarMask:
    """The last stage of a step: ``mask_rows`` with the ``grammars`` of ``rows``."""

    rows: list[int]
    grammars: Sequence[GrammarObject]
    stop_ids: list[int]

    def __call__(self, logits: Tensor, ops: TorchOps = TORCH) -> None:
        """Mask ``logits`` [N, V] with the sampler's ``ops``. Mutates ``logits``."""
        mask_rows(self.rows, self.grammars, self.stop_ids, logits, ops)


def make_mask(grammars: Sequence[GrammarObject | None], stop_ids: Set[int]) -> GrammarMask | None:
    """Return the mask of logits [N, V] with one grammar per row, ``None`` if no row has one.

    A grammar that has terminated, or whose request is ``finished``, counts as none.
    """
    rows = [row for row, grammar in enumerate(grammars) if grammar is not None and not is_over(grammar)]
    active = [grammar for row in rows if (grammar := grammars[row]) is not None]
    return GrammarMask(rows, active, sorted(stop_ids)) if rows else None


def is_over(grammar: GrammarObject) -> bool:
    """Whether a grammar has nothing to say any more."""
    return grammar.finished or grammar.is_terminated()


def mask_rows(
    rows: list[int], grammars: Sequence[GrammarObject], stop_ids: list[int], logits: Tensor, ops: TorchOps
) -> None:
    """Ban in ``rows`` of ``logits`` [N, V] what their grammars do not allow. Other rows are not touched. Mutates.

    Least lengths and bans come first and may have banned all that the grammar allows. A complete text may then end: its
    stop tokens become 0.0, because their logits are lost. vLLM does so for least lengths. Another row stays empty,
    and the sampler says why. Each row and the time of its fill are counted in its grammar's ``stats``.
    """
    first = grammars[0]  # all are of one backend, and so of one form
    mask = first.allocate_vocab_mask(logits.shape[1], len(rows))
    for index, grammar in enumerate(grammars):
        began = time.perf_counter()
        grammar.fill_vocab_mask(mask, index)
        grammar.stats.mask_s += time.perf_counter() - began
        grammar.stats.num_masks += 1
    mask = first.move_vocab_mask(mask, str(logits.device))
    masked = logits if rows == list(range(len(logits))) else logits[rows]
    ops.apply_vocab_mask(first, masked, mask)
    for index in (masked.amax(-1) == -torch.inf).nonzero().flatten().tolist():
        if grammars[index].is_complete():
            masked[index, stop_ids] = 0.0  # any finite number: nothing else is left
    if masked is not logits:
        logits[rows] = masked
