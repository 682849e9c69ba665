"""Ranks in processes of their own, over gloo: what torch.distributed has for CPUs.

The processes are forked, so they have whatever their parent has: its modules, its functions, its model. They find each
other by a file, and talk over the loopback interface. Linux and macOS.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store  # torch.distributed does not say that it has them

from mini_engine.processes.group import Group, RankLost

SECONDS = 10.0  # so long a rank waits for another
GRACE = 2.0  # seconds for the others to end when one has ended early
FAULT = "fault"
SILENT = "ended without a word, or was silent too long"


class GlooGroup:
    """The ranks of this process's group. See ``Group``."""

    def __init__(self, store: Store) -> None:
        """Speak in the group that this process has joined. A fault is told by ``store``."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.store = store

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """Return the ``part`` of every rank, in the order of ranks."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self.exchange(dist.all_gather, parts, part)
        return parts

    def broadcast(self, tensor: Tensor) -> None:
        """Write rank 0's ``tensor`` into those of the others. Mutates."""
        self.exchange(dist.broadcast, tensor, 0)

    def leave(self, fault: RankLost) -> None:
        """Tell ``fault``, unless another was told before, and close the connections, so that nobody waits."""
        told = f"{fault.rank} {fault.reason}"
        self.store.compare_set(FAULT, "", told)
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def exchange(self, call: Callable[..., Any], *args: Any) -> None:
        """Make a call of torch's, and raise what was told if it fails: torch says which address is gone, not why."""
        try:
            call(*args)
        except RuntimeError as error:
            others = [rank for rank in range(self.size) if rank != self.rank]
            words = "it" if len(others) == 1 else f"one of the ranks {others}"
            raise self.told() or RankLost(others[0], f"{words} {SILENT}") from error

    def told(self) -> RankLost | None:
        """Return the fault that some rank has told, if one has."""
        if not self.store.check([FAULT]):
            return None
        rank, _, reason = self.store.get(FAULT).decode().partition(" ")
        return RankLost(int(rank), reason)


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(group, *args)`` in ``size`` processes; return what it returned on each rank, in their order.

    Raises ``RankLost`` if one of them does not come to its end. None is left behind.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=run_rank, args=(folder, rank, size, function, args)) for rank in range(size)]
        for process in ranks:
            process.start()
        try:
            await_ends(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        found = [result_of(folder, rank, process) for rank, process in enumerate(ranks)]
    faults = [result for result in found if isinstance(result, RankLost)]
    if faults:
        raise min(faults, key=lambda fault: SILENT in fault.reason)  # what is known before what is guessed
    return found


def await_ends(ranks: Sequence[ForkProcess]) -> None:
    """Wait until all processes have ended, or one has ended early and the others had their time to hear of it."""
    waiting, limit = list(ranks), None
    while waiting and connection.wait([process.sentinel for process in waiting], limit):
        waiting = [process for process in waiting if process.is_alive()]
        if any(process.exitcode for process in ranks):
            limit = GRACE


def run_rank(folder: Path, rank: int, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Join the group, run the function, and write its result to ``folder``."""
    torch.set_num_threads(1)  # threads of the parent are not here
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
    store.set(f"joined {rank}", "")
    all_joined = [f"joined {each}" for each in range(size)]
    store.wait(all_joined, timedelta(seconds=SECONDS))  # those that still connect need this one
    group: Group = GlooGroup(store)
    try:
        result: Any = function(group, *args)
    except RankLost as fault:
        result = fault
    torch.save(result, folder / f"{rank}.new")
    (folder / f"{rank}.new").rename(folder / f"{rank}.pt")
    if isinstance(result, RankLost):
        sys.exit(1)


def result_of(folder: Path, rank: int, process: ForkProcess) -> Any:
    """Return what a rank has written, a ``RankLost`` if it is nothing."""
    file = folder / f"{rank}.pt"
    if not file.exists():
        return RankLost(rank, f"its process ended with status {process.exitcode}")
    return torch.load(file, weights_only=False)


def loopback() -> str:
    """Return the name of the interface that leads back to this machine: "lo" or "lo0"."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
