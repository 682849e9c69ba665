"""The processes of a group of ranks: how they start, find one another, exchange tensors, and end together.

Rank 0 is the process that was asked for more ranks. It starts the others, unless ``torchrun`` has started all of them.
A rank that ends, or keeps the others waiting for ``LIMIT_S`` seconds, ends the group, and rank 0 says which one it was.

The group is gloo's, with a store of its own. It is not torch's default group, so a program may have another beside it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from mini_engine.config import EngineConfig
from mini_engine.overlay import installed
from mini_engine.sampler.driver import WorkerLostError

c10d: Any = _distributed_c10d  # whose operations have no annotations
Gloo = c10d.ProcessGroupGloo
LIMIT_S = 6.0  # within a step no rank waits longer for another
REPORT_S = 2.0  # so long do the others have to say that they are still there
START_S = 600.0  # for imports, and for reading the checkpoint
CONNECT_S = 10.0  # once all are there
START = timedelta(seconds=START_S)
IDLE_S = 365 * 86_400.0  # for the next order
FRAME = 4096  # bytes of an order that are sent with its length
LOOPBACK = "127.0.0.1"
FOLLOWER = """
import json, sys
from mini_engine.ranks.processes import become_follower
become_follower(int(sys.argv[3]))
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver
load_driver(sys.argv[1], EngineConfig(**json.loads(sys.argv[2])))
"""


Processes = Mapping[int, "subprocess.Popen[bytes]"]  # by rank


class Ranks:
    """The group as one of its ranks sees it; a ``split.Group``."""

    def __init__(self, store: Any, rank: int, size: int, processes: Processes = MappingProxyType({})) -> None:
        """Wait for the other ranks. ``processes``: those that this one has started.

        Raises ``ValueError`` if a rank ends before it has come, or cannot be reached.
        """
        self.rank = rank
        self.size = size
        self.processes = processes
        self.is_local = store.host == LOOPBACK  # all of them are on this machine
        self.is_in_step = False
        self.faults: list[str] = []
        self.lock = Lock()
        self.store = c10d.PrefixStore(f"mini_engine/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self.agree("here")
        options = Gloo._Options()
        options._timeout = timedelta(seconds=CONNECT_S)
        options._devices = [Gloo.create_device(hostname=LOOPBACK) if self.is_local else Gloo.create_default_device()]
        try:
            self.groups = [Gloo(self.store, rank, size, options)]  # until the end
        except RuntimeError as error:
            raise ValueError(f"rank {rank} of {size} cannot reach the others: {self.find_lost() or error}") from error
        self.agree("connected")  # before that, a rank that ended would break the connections of the others
        self.close = weakref.finalize(self, finish, self.groups, processes, self.faults)
        for process in processes.values():
            Thread(target=watch, args=(weakref.ref(self), process), daemon=True).start()

    @property
    def group(self) -> Any:
        """What exchanges tensors. Raises ``RuntimeError`` at the end."""
        if not self.groups:
            raise RuntimeError("the group has ended")
        return self.groups[0]

    @property
    def fault(self) -> str | None:
        """Why the group has ended; ``None`` as long as it lives."""
        return self.faults[0] if self.faults else None

    # ---- exchanges ----

    def stack(self, x: Tensor) -> Tensor:
        """Return the ``x`` of all ranks, which have one shape and dtype -> [n, ...]."""
        out = x.new_empty((self.size, *x.shape))
        self.exchange(lambda: self.group._allgather_base(out.view(-1), x.contiguous().view(-1)))
        return out

    def stack_at_first(self, x: Tensor) -> Tensor:
        """Return what ``stack`` returns at rank 0, and elsewhere ``x[None]``."""
        out = x.new_empty((self.size if self.rank == 0 else 0, *x.shape))
        options = c10d.GatherOptions()
        options.rootRank = 0
        targets = [list(out.unbind())] if self.rank == 0 else []
        self.exchange(lambda: self.group.gather(targets, [x.contiguous()], options))
        return out if self.rank == 0 else x[None]

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of the ``x`` of all ranks, with the same bits at each."""
        total = x.clone()
        self.exchange(lambda: self.group.allreduce([total]))
        return total

    def send(self, order: bytes) -> None:
        """Give an order to every other rank, from rank 0. One without bytes ends them.

        Each gets it from rank 0 itself: one that passed it on and hung would leave others without it.
        """
        content = len(order).to_bytes(8) + order
        for part in filter(None, (content[:FRAME].ljust(FRAME, b"\0"), content[FRAME:])):
            for rank in range(1, self.size):
                tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self.wait(lambda: self.group.send([tensor], rank, 0))  # noqa: B023 - it is called at once

    def receive(self) -> bytes:
        """Wait for the next order of rank 0."""
        content = self.receive_bytes(FRAME)
        length = int.from_bytes(content[:8])
        if length + 8 > FRAME:
            content += self.receive_bytes(length + 8 - FRAME)
        return content[8 : length + 8]

    def receive_bytes(self, count: int) -> bytes:
        """Wait for ``count`` bytes from rank 0."""
        tensor = torch.empty(count, dtype=torch.uint8)
        self.wait(lambda: self.group.recv([tensor], 0, 0), IDLE_S)
        return tensor.numpy().tobytes()

    def exchange(self, begin: Callable[[], Any]) -> None:
        """Exchange tensors. Raises ``RuntimeError`` if rank 0 has not told the others to."""
        if self.rank == 0 and not self.is_in_step:
            raise RuntimeError("the model of several ranks computes nothing outside of its worker's steps")
        self.wait(begin)

    def wait(self, begin: Callable[[], Any], limit_s: float | None = None) -> None:
        """Begin an exchange and wait for its end. Raises ``WorkerLostError`` if a rank is lost."""
        try:
            if self.fault is None:
                begin().wait(timedelta(seconds=limit_s or LIMIT_S))
        except RuntimeError as error:
            self.lose(str(error))
        if self.fault is not None:
            raise WorkerLostError(self.fault)

    # ---- who is there ----

    def agree(self, name: str, text: str = "", limit_s: float = START_S) -> list[str]:
        """Wait until every rank has called this with ``name``, in the store; return the texts of all ranks at rank 0.

        Raises ``ValueError`` if a rank has ended instead.
        """
        self.store.set(f"{name}/{self.rank}", text)
        if self.rank:
            self.store.wait([f"{name}/all"], START)
            return []
        until = time.monotonic() + limit_s
        while missing := [rank for rank in range(self.size) if not self.store.check([f"{name}/{rank}"])]:
            for rank in missing:
                if (reason := self.end_of(rank)) or time.monotonic() > until:
                    raise ValueError(f"rank {rank} of {self.size} {reason or f'gave no sign for {limit_s:.0f} s'}")
            time.sleep(0.01)
        self.store.set(f"{name}/all", "")
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(self.size)]

    def end_of(self, rank: int) -> str | None:
        """Return, in words, how a rank has ended; ``None`` if it has not, or only because another one was lost."""
        if self.store.check([f"failed/{rank}"]):
            return f"has failed: {self.store.get(f'failed/{rank}').decode()}"
        status = self.processes[rank].poll() if rank in self.processes else None
        if status is None or self.store.check([f"lost/{rank}"]):
            return None
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"

    def lose(self, error: str) -> None:
        """Find out which rank is lost, and end the others. Mutates."""
        with self.lock:
            if self.faults:
                return
            if self.rank == 0:
                self.faults.append(self.find_lost() or f"the ranks have lost one another: {error}")
                end_processes(self.processes)
            else:
                self.faults.append(error)
                with suppress(RuntimeError):
                    self.store.set(f"lost/{self.rank}", "")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Exchange with the other ranks inside. If rank 0 leaves before the end, all end: the others wait for it."""
        self.is_in_step = True
        try:
            yield
        except BaseException as error:
            left = f"rank {self.rank} of {self.size} has left a step before its end: {error!r}"
            self.faults.append(str(error) if isinstance(error, WorkerLostError) else left)
            end_processes(self.processes)
            raise
        finally:
            self.is_in_step = False

    def find_lost(self) -> str | None:
        """Return, in words, which rank is lost and why."""
        until = time.monotonic() + REPORT_S
        others = range(1, self.size)
        while True:
            for rank in others:
                if reason := self.end_of(rank):
                    return f"rank {rank} of {self.size} {reason}"
            silent = [rank for rank in others if not self.store.check([f"lost/{rank}"])]
            if not silent:
                return None
            if time.monotonic() > until:
                return f"rank {', '.join(map(str, silent))} of {self.size} gave no sign for {LIMIT_S:g} s"
            time.sleep(0.01)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Have the group end if this rank fails inside. Ranks but 0 then end their process, and rank 0 knows why."""
        try:
            yield
        except BaseException as error:
            if self.rank == 0:
                self.close()
                raise
            if not isinstance(error, WorkerLostError):
                with suppress(RuntimeError):
                    self.store.set(f"failed/{self.rank}", str(error) if isinstance(error, ValueError) else repr(error))
            os._exit(1)


def finish(groups: list[Any], processes: Processes, faults: list[str]) -> None:
    """End the other ranks of the group in ``groups``, unless it has ended, and leave it. Mutates both lists.

    The group's threads end with it. One of them that let a tensor go while Python ends would abort the process.
    """
    if not faults and groups[0].rank() == 0:
        faults.append("the ranks were ended")
        with suppress(RuntimeError):
            for rank in range(1, groups[0].size()):
                groups[0].send([torch.zeros(FRAME, dtype=torch.uint8)], rank, 0).wait(timedelta(seconds=1))
    end_processes(processes)
    groups.clear()


def end_processes(processes: Processes) -> None:
    """End ``processes`` at once: they have nothing to lose."""
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.wait()


def watch(ranks: "weakref.ref[Ranks]", process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a process. If its group has not ended, it has lost a rank."""
    process.wait()
    group = ranks()
    if group is not None:
        group.lose("a process has ended")


def join(folder: Path, engine: EngineConfig) -> Ranks:
    """Return the group of a model's ranks, which this process starts, unless ``torchrun`` has started this process.

    ``folder``: of the checkpoint. Raises ``ValueError`` if a rank does not come.
    """
    size = engine.tensor_parallel
    if (overlay := installed()) is not None:
        raise ValueError(
            f"tensor_parallel is {size}, but the modules of {overlay.folder} run in one process; leave it out"
        )
    if "WORLD_SIZE" not in os.environ:
        return start(folder, engine)
    given, rank, address, port = map(os.environ.get, ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"))
    if given != str(size) or rank is None or address is None or port is None:
        raise ValueError(
            f"tensor_parallel is {size}, and torchrun says WORLD_SIZE {given}, RANK {rank}, MASTER_ADDR {address} and "
            f"MASTER_PORT {port}; let it start {size} processes, or unset WORLD_SIZE"
        )
    is_host = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = c10d.TCPStore(address, int(port), is_master=is_host, wait_for_workers=False, timeout=START)
    return Ranks(store, int(rank), size)


def start(folder: Path, engine: EngineConfig) -> Ranks:
    """Start the other ranks, and return the group. Raises ``ValueError`` if one does not come."""
    size = engine.tensor_parallel
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))  # torch would listen at all addresses of this machine
        listening.listen()
        where = {"port": listening.getsockname()[1], "master_listen_fd": listening.detach()}
    store = c10d.TCPStore(LOOPBACK, is_master=True, wait_for_workers=False, timeout=START, **where)
    command = [sys.executable, "-c", FOLLOWER, str(folder), json.dumps(asdict(engine)), str(torch.get_num_threads())]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
    shared["PYTHONPATH"] = os.pathsep.join(sys.path)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(1, size):
            own = {**os.environ, **shared, "RANK": str(rank)}
            processes[rank] = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        return Ranks(store, 0, size, processes)
    except BaseException:
        end_processes(processes)
        raise


def become_follower(threads: int) -> None:
    """Prepare this process, which ``start`` has begun: it computes with ``threads``, and ends when rank 0 does.

    Rank 0 holds the other end of its standard input. Ctrl-C is for rank 0, and so are warnings.
    """

    def wait_for_end() -> None:
        os.read(0, 1)  # nothing is written there; the lock of sys.stdin would keep Python from ending
        os._exit(1)

    Thread(target=wait_for_end, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
