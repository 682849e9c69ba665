"""What ranks do together: put parts side by side, know the same ids, and end when one of them cannot go on."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mini_engine.processes.group import Group, RankLost

Result = TypeVar("Result")


def gather(group: Group, part: Tensor) -> Tensor:
    """Return the columns of all ranks, side by side in the order of ranks: ``part`` [T, W] -> [T, size * W]."""
    return torch.cat(group.all_gather(part.contiguous()), dim=-1)


def ids_of_first(group: Group, ids: Sequence[int] | None) -> list[int]:
    """Return rank 0's ``ids`` as a new list on every rank. There may be none; the others do not know their number."""
    count = torch.tensor([len(ids or ())])
    group.broadcast(count)
    own = torch.tensor(ids or (), dtype=torch.int64) if group.rank == 0 else torch.zeros(int(count), dtype=torch.int64)
    group.broadcast(own)
    return [int(each) for each in own]


def check_same(group: Group, ids: Sequence[int]) -> None:
    """Raise ``ValueError`` on every rank if some rank has other ``ids`` than rank 0, in number, value or order.

    The message names these ranks, as in "[1, 3]".
    """
    digest = torch.tensor(list(hashlib.sha256(repr(list(ids)).encode()).digest()), dtype=torch.uint8)
    digests = group.all_gather(digest)
    others = [rank for rank, found in enumerate(digests) if not torch.equal(found, digests[0])]
    if others:
        raise ValueError(f"ranks {others} have other ids than rank 0; only rank 0 may sample, and all take its ids")


def in_step(group: Group, work: Callable[[], Result]) -> Result:
    """Return what ``work`` returns. Whatever ends it leaves the group, so that no rank waits for this one.

    Raises ``RankLost`` on every rank: this one's number and "KeyError: 'q'" or the like, or what another one said.
    """
    try:
        return work()
    except RankLost as told:
        group.leave(told)
        raise
    except BaseException as error:
        fault = RankLost(group.rank, f"{type(error).__name__}: {error}")
        group.leave(fault)
        raise fault from error
