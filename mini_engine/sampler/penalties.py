"""L4: repetition, frequency and presence penalties, from a table of the tokens that each request has seen.

A dense count of shape [N, V] is the obvious state; at V = 151,936 it is 19 MB for 32 rows, read in every step. A
request has seen a few hundred different tokens, so the table keeps those alone: a new token changes one entry per row,
and a step gathers, changes and scatters the entries and nothing else. A row without penalties has no entries.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary

EMPTY = -1
GROWTH = 64  # columns that are added at a time


def repeat_penalty(logits: Tensor, counts: Tensor, strength: Tensor) -> Tensor:
    """Push every seen token towards less likely: divide what is positive, multiply what is negative. All [K].

    Source: CTRL (Keskar et al., 2019), in the corrected form of transformers' ``RepetitionPenaltyLogitsProcessor``;
    dividing a negative logit would *raise* it. Tokens of the prompt count too (count 0, but they stand in the table).
    """
    return torch.where(logits > 0, logits / strength, logits * strength)


def frequency_penalty(logits: Tensor, counts: Tensor, strength: Tensor) -> Tensor:
    """Subtract ``strength`` for every occurrence in the output. All [K]."""
    return logits - strength * counts


def presence_penalty(logits: Tensor, counts: Tensor, strength: Tensor) -> Tensor:
    """Subtract ``strength`` once from every token that occurs in the output. All [K]."""
    return logits - strength * (counts > 0)


# In the order of application, as in vLLM. It matters: dividing what was already lowered is not lowering what was
# divided. SGLang iterates over a set of classes, so its order is not fixed.
PENALTIES: tuple[tuple[str, float, Callable[[Tensor, Tensor, Tensor], Tensor]], ...] = (
    ("repetition_penalty", 1.0, repeat_penalty),
    ("frequency_penalty", 0.0, frequency_penalty),
    ("presence_penalty", 0.0, presence_penalty),
)


def apply_penalties(logits: Tensor, rows: Tensor, token_ids: Tensor, counts: Tensor, *strengths: Tensor) -> None:
    """Penalise K logits in the order of ``PENALTIES``: entry i is the token ``token_ids[i]`` of the row ``rows[i]``.

    ``logits`` [N, V] float32; ``rows`` and ``token_ids`` [K] int64, no pair twice; ``counts`` [K] float32: how often
    the token came in the output; ``strengths``: three [K] float32, those of the entry's row. A penalty that is off for
    a row does not touch the row. Mutates ``logits``.
    """
    values = logits[rows, token_ids]  # [K]
    for strength, (_, off, penalty) in zip(strengths, PENALTIES, strict=True):
        values = torch.where(strength != off, penalty(values, counts, strength), values)
    logits[rows, token_ids] = values


class TokenCounts:
    """The distinct tokens of each request's prompt and output, and how often each came in the output.

    ``token_ids`` and ``counts`` are [M, C] for M requests; a request uses its first columns and the rest is ``EMPTY``.
    ``columns`` finds the column of a token. A token keeps its column for life, so filter and merge move whole rows.
    """

    def __init__(self, histories: Sequence[History]) -> None:
        """Build the table by replaying the histories."""
        self.columns: list[dict[int, int]] = [{} for _ in histories]
        self.token_ids = torch.full((len(histories), 0), EMPTY)  # [M, C] int64
        self.counts = torch.zeros(len(histories), 0)  # [M, C] float32
        for row, history in enumerate(histories):
            self.add([row] * len(history.prompt_ids), history.prompt_ids, 0.0)
            self.add([row] * len(history.output_ids), history.output_ids, 1.0)

    def add(self, rows: Sequence[int], token_ids: Sequence[int], amount: float) -> None:
        """Note one token for each of ``rows`` and add ``amount`` to its count. A row may come twice. Mutates."""
        places = [
            self.columns[row].setdefault(token, len(self.columns[row]))
            for row, token in zip(rows, token_ids, strict=True)
        ]
        missing = max(places, default=-1) + 1 - self.counts.shape[1]
        if missing > 0:
            self.widen(missing + GROWTH)
        index = (torch.tensor(rows, dtype=torch.int64), torch.tensor(places, dtype=torch.int64))
        self.token_ids[index] = torch.tensor(token_ids, dtype=torch.int64)
        self.counts.index_put_(index, torch.tensor(amount), accumulate=True)

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the rows ``keep``, in that order. Mutates."""
        index = torch.tensor(keep, dtype=torch.int64)
        self.columns = [self.columns[row] for row in keep]
        self.token_ids = self.token_ids[index]
        self.counts = self.counts[index]

    def merge(self, other: "TokenCounts") -> None:
        """Append the rows of ``other``, which must not be used again. Mutates."""
        self.widen(other.counts.shape[1] - self.counts.shape[1])
        other.widen(self.counts.shape[1] - other.counts.shape[1])
        self.columns += other.columns
        self.token_ids = torch.cat((self.token_ids, other.token_ids))
        self.counts = torch.cat((self.counts, other.counts))

    def widen(self, columns: int) -> None:
        """Add empty columns (none for a negative number). Mutates."""
        self.token_ids = F.pad(self.token_ids, (0, max(columns, 0)), value=EMPTY)
        self.counts = F.pad(self.counts, (0, max(columns, 0)))


class Penalties(LogitsProcessor[Mapping[str, float]]):
    """The three penalties of every row that has one. The state of a row is its strengths; its past is in ``table``.

    Row i of the table belongs to the i-th row of ``states``.
    """

    def __init__(self, states: dict[int, Mapping[str, float]], table: TokenCounts) -> None:
        """Penalise the rows of ``states`` for the tokens in ``table``."""
        super().__init__(states)
        self.table = table

    @classmethod
    def build(cls, states: dict[int, Mapping[str, float]], histories: Sequence[History]) -> Self:
        """Make the penalties of these rows, with a table of their pasts."""
        return cls(states, TokenCounts(histories))

    @classmethod
    def start(
        cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary
    ) -> Mapping[str, float] | None:
        """``arguments``: the three strengths. ``None`` if all are off."""
        strengths = {name: float(arguments[name]) for name, _, _ in PENALTIES}
        return strengths if any(strengths[name] != off for name, off, _ in PENALTIES) else None

    def cumulate(self, token_ids: Sequence[int]) -> None:
        """Count the newest output token of every penalised row: one entry each, whatever V is. Mutates the table."""
        self.table.add(range(len(self.states)), [token_ids[row] for row in self.states], 1.0)

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the rows ``keep``, in that order. Mutates."""
        place = {row: index for index, row in enumerate(self.states)}
        self.table.filter([place[row] for row in keep if row in place])
        super().filter(keep)

    def merge(self, other: Self) -> None:
        """Take over the rows of ``other``, renumbered before. Mutates; ``other`` must not be used again."""
        super().merge(other)
        self.table.merge(other.table)

    def apply(self, logits: Tensor) -> None:
        """Penalise the tokens of the table. Mutates ``logits``."""
        apply_penalties(logits, *(each.to(logits.device) for each in self.entries()))

    def entries(self) -> list[Tensor]:
        """Return what ``apply_penalties`` takes after the logits: [K] each, for the K entries of the table in use.

        Rows of the batch, token ids, counts, and the three strengths.
        """
        places, columns = (self.table.token_ids != EMPTY).nonzero(as_tuple=True)
        rows = torch.tensor(list(self.states))[places]
        strengths = [torch.tensor([state[name] for state in self.states.values()])[places] for name, _, _ in PENALTIES]
        return [rows, self.table.token_ids[places, columns], self.table.counts[places, columns], *strengths]
