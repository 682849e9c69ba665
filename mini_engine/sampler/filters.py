"""L4: temperature and the three filters that cut the tail off a distribution: top-k, top-p, min-p.

Each is a function from logits [R, V] to logits [R, V]. In those of the filters a removed token is minus infinity, and
every other token keeps its logit. Greedy rows never come here.

Every function takes one parameter per row and leaves a row alone whose parameter is off: an index selects the rows
that are on, so that "off" is never an identity that is computed.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PREFIX = 256  # likeliest tokens that top-p looks at before it sorts everything


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide each row by its temperature. ``logits`` [R, V] float32, ``temperature`` [R], all above 0 -> [R, V]."""
    return logits / temperature[:, None]


def keep_largest(logits: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    """Keep exactly ``counts[i]`` largest logits of row i, the lowest ids among equals; the rest becomes -inf.

    ``logits`` [R, V], ``counts`` [R] from 1 to V, ``values`` [R, C]: the C largest logits of each row in falling order,
    one more than the largest count (all V, if that is all) -> a new tensor [R, V]. The value after the last one kept
    tells whether equals stand on both sides of the line; only such rows are looked at token by token.
    """
    least = values.gather(-1, counts[:, None] - 1)  # [R, 1]: the smallest logit that is kept
    kept = logits.masked_fill(logits < least, -torch.inf)
    after = values.gather(-1, counts[:, None].clamp(max=values.shape[1] - 1))
    tied = (after == least) & (counts[:, None] < logits.shape[1]) & (least > -torch.inf)
    for row in tied[:, 0].nonzero()[:, 0].tolist():
        equal = (logits[row] == least[row]).nonzero()[:, 0]  # in rising order of ids
        larger = int((values[row] > least[row]).sum())
        kept[row, equal[int(counts[row]) - larger :]] = -torch.inf
    return kept


def where_on(logits: Tensor, on: Tensor, cut: Callable[[Tensor, Tensor], Tensor], parameter: Tensor) -> Tensor:
    """Apply ``cut`` to the rows that are ``on`` [R] with their ``parameter`` [R]; the others keep their bits."""
    if not bool(on.any()):
        return logits
    if bool(on.all()):
        return cut(logits, parameter)
    return logits.index_put((on.nonzero()[:, 0],), cut(logits[on], parameter[on]))


def apply_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep exactly the k largest logits of each row, the lowest ids among equals.

    ``logits`` [R, V], ``k`` [R] int64, 0 is off, and so is any k from V on -> [R, V].
    """
    return where_on(logits, (k > 0) & (k < logits.shape[1]), cut_top_k, k)


def cut_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep the k largest logits of each row, k from 1 to V - 1."""
    values = logits.topk(int(k.max()) + 1).values  # [R, k_max + 1]; which of equal ids it took does not matter
    return keep_largest(logits, k, values)


def apply_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches p; at least one.

    ``logits`` [R, V], ``p`` [R] float64, 1 is off -> [R, V]. A token stays iff the mass *before* it is below p.
    Source: "The Curious Case of Neural Text Degeneration" (Holtzman et al., 2019).
    """
    return where_on(logits, p < 1, cut_top_p, p)


def cut_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the nucleus of each row, p below 1.

    A nucleus is small as a rule: the ``PREFIX`` likeliest tokens come first, and only the rows whose nucleus does not
    end among them are sorted. Masses are those of the whole row either way, so both find the same nucleus.
    """
    peak = logits.softmax(-1).amax(-1, keepdim=True)  # [R, 1]: the probability of the likeliest token
    if logits.shape[1] <= PREFIX:
        return cut_sorted(logits, peak, p)
    values = logits.topk(PREFIX).values  # [R, PREFIX]
    counts = count_nucleus(values, peak, p)
    kept = keep_largest(logits, counts.clamp(max=PREFIX - 1), values)
    wide = counts == PREFIX
    if bool(wide.any()):
        kept[wide] = cut_sorted(logits[wide], peak[wide], p[wide])
    return kept


def cut_sorted(logits: Tensor, peak: Tensor, p: Tensor) -> Tensor:
    """Keep the nucleus of each row by sorting all of it; ``peak`` [R, 1] is the probability of its likeliest token."""
    values = sort_falling(logits)
    return keep_largest(logits, count_nucleus(values, peak, p), values)


def count_nucleus(values: Tensor, peak: Tensor, p: Tensor) -> Tensor:
    """Count the tokens of each row whose mass before them is below p. ``values`` [R, C] in falling order -> [R].

    ``peak`` [R, 1] is the probability of the likeliest token in the whole row, ``p`` [R]. A token's mass is ``peak``
    times ``exp(its logit - the largest logit)``, so it is that of the whole row's softmax even if C is less than V.
    """
    masses = (values - values[:, :1]).exp() * peak
    before = F.pad(masses.cumsum(-1, dtype=torch.float64)[:, :-1], (1, 0))  # 0 for the first, so it always stays
    return (before < p[:, None]).sum(-1)


def sort_falling(logits: Tensor) -> Tensor:
    """Return the values of each row in falling order, without their ids. [R, V] -> [R, V].

    Only values are needed, and on a CPU numpy sorts values alone thirty times faster than ``torch.sort``, which always
    carries the ids along.
    """
    if logits.device.type != "cpu":
        return logits.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop every token less likely than ``min_p`` times the likeliest. ``min_p`` [R] float32, 0 is off -> [R, V].

    Source: "Turning Up the Heat" (Nguyen et al., 2024). A token exactly at the limit stays.
    """
    return where_on(logits, min_p > 0, cut_min_p, min_p)


def cut_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop what is less likely than ``min_p`` times the likeliest, in every row."""
    masses = logits.softmax(-1)
    limit = masses.amax(-1, keepdim=True) * min_p[:, None]
    return logits.masked_fill(masses < limit, -torch.inf)


def apply_joint(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Keep what top-k keeps *and* top-p keeps, both judged on the same distribution, as SGLang's torch backend does.

    One after the other, top-p sees the k survivors with their masses scaled up to 1, and so keeps fewer of them.
    """
    return torch.minimum(apply_top_k(logits, k), apply_top_p(logits, p))


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest logits of each row and their ids, in falling order, the lowest id first on ties.

    ``logits`` [R, V] -> values and ids, each [R, min(count, V)]. ``torch.topk`` promises nothing about ties. A
    stable sort of the whole row does it; to sort only what ``keep_largest`` keeps is faster. ``count`` is at least 1.
    If fewer than V are asked for, those that are minus infinity come last in any order.
    """
    size = logits.shape[1]
    if count >= size:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    counts = torch.full((len(logits),), count, device=logits.device)
    kept = keep_largest(logits, counts, logits.topk(count + 1).values)
    ids = kept.topk(count).indices.sort(dim=-1).values  # by id first, then by value in a way that keeps equals in order
    values, order = kept.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
