"""L4: temperature and the three filters that cut the tail off a distribution: top-k, top-p, min-p.

Owns: functions from logits [R, V] to logits [R, V] in which a removed token is minus infinity. Must not know: batches,
greedy rows (they never come here), randomness.

Every function takes one parameter per row and leaves a row alone whose parameter is off: an index selects the rows
that are on, so that "off" is never an identity that is computed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PREFIXES = (64, 2048)  # how far top-p sorts before it sorts everything


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide each row by its temperature. ``logits`` [R, V] float32, ``temperature`` [R], all above 0 -> [R, V]."""
    return logits / temperature[:, None]


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest logits of each row and their ids, in falling order, the lowest id first on ties.

    ``logits`` [R, V] -> values and ids, each [R, min(count, V)]. ``torch.topk`` promises nothing about ties. It is
    asked for one value more: only where that one equals the last of ours did it have a choice between equals. The order
    among minus infinities is left open: filters drop them anyway, and a row may hold 100,000.
    """
    if count >= logits.shape[1]:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    values, ids = logits.topk(count + 1)
    had_choice = (values[:, count - 1] == values[:, count]) & (values[:, count] > -torch.inf)
    values, ids = values[:, :count].clone(), ids[:, :count].clone()
    for row in had_choice.nonzero()[:, 0].tolist():
        least = values[row, -1]
        above, equal = (logits[row] > least).nonzero()[:, 0], (logits[row] == least).nonzero()[:, 0]
        ids[row] = torch.cat((above, equal))[:count]  # both in rising order
        values[row] = logits[row, ids[row]]
    ids, order = ids.sort(dim=-1)  # by id first, then by value in a way that keeps the order of equals
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def apply_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep exactly the k largest logits of each row, the lowest ids among equals.

    ``logits`` [R, V], ``k`` [R] int64, 0 is off, and so is any k from V on -> [R, V].
    """
    rows = ((k > 0) & (k < logits.shape[1])).nonzero()[:, 0]
    if not len(rows):
        return logits
    values, ids = largest(logits[rows], int(k[rows].max()))  # [R', k_max]
    rank = torch.arange(values.shape[1], device=logits.device)
    return with_rows(logits, rows, ids, values.masked_fill(rank >= k[rows][:, None], -torch.inf))


def apply_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches p; at least one.

    ``logits`` [R, V], ``p`` [R] float64, 1 is off -> [R, V]. A token stays iff the mass *before* it is below p.

    A nucleus is small as a rule, so each row is sorted only as far as it needs: 64 tokens, then 2,048, then all. The
    masses are those of the whole distribution in all three, so the answer does not depend on where it was found.
    """
    pending = (p < 1).nonzero()[:, 0]
    for width in (*PREFIXES, logits.shape[1]):
        if not len(pending):
            break
        values, ids = largest(logits[pending], width)  # [R', width]
        masses = logits[pending].softmax(-1).gather(-1, ids).double()
        before = F.pad(masses.cumsum(-1)[:, :-1], (1, 0))
        keep = before < p[pending][:, None]
        settled = ~keep[:, -1] if width < logits.shape[1] else torch.ones_like(keep[:, -1])
        values = values.masked_fill(~keep, -torch.inf)
        logits = with_rows(logits, pending[settled], ids[settled], values[settled])
        pending = pending[~settled]
    return logits


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop every token less likely than ``min_p`` times the likeliest. ``min_p`` [R] float64, 0 is off -> [R, V].

    Source: "Turning Up the Heat" (Nguyen et al., 2024). A token exactly at the limit stays.
    """
    rows = (min_p > 0).nonzero()[:, 0]
    if not len(rows):
        return logits
    masses = logits[rows].softmax(-1)
    limit = masses.amax(-1, keepdim=True).double() * min_p[rows][:, None]
    return logits.index_put((rows,), logits[rows].masked_fill(masses < limit, -torch.inf))


def apply_joint(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Keep what top-k keeps *and* top-p keeps, both judged on the same distribution, as SGLang's torch backend does.

    One after the other, top-p sees the k survivors with their masses scaled up to 1, and so keeps fewer of them.
    """
    return torch.minimum(apply_top_k(logits, k), apply_top_p(logits, p))


def with_rows(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return a copy of ``logits`` [R, V] whose ``rows`` [R'] hold ``values`` at ``ids`` [R', C] and nothing else."""
    replaced = torch.full((len(rows), logits.shape[1]), -torch.inf, device=logits.device, dtype=logits.dtype)
    return logits.index_put((rows,), replaced.scatter_(-1, ids, values))
