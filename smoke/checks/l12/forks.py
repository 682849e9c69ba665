"""Ranks in processes of their own, over pipes: a group without a network, which a confined process may not have.

Owns: the processes, the pipes between each two of them, and what becomes of one that ends early. Must not know: what
the ranks compute.

Every message says which call it belongs to, so ranks that make different calls get an error, not each other's numbers.
"""

import os
import pickle
import select
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PATIENCE = 30.0  # seconds for a message; only ranks that wait for each other take so long
LENGTH = 8  # bytes that say how long a message is


def lost(rank: int, reason: str) -> Exception:
    """Return the engine's exception."""
    from mini_engine.processes.group import RankLost

    return RankLost(rank, reason)


class PipeGroup:
    """One rank's ends of all pipes. See ``mini_engine.processes.group.Group``."""

    def __init__(self, rank: int, size: int, readers: dict[int, int], writers: dict[int, int]) -> None:
        """Read from ``readers`` and write to ``writers``: descriptors by rank."""
        self.rank = rank
        self.size = size
        self.readers = readers
        self.writers = writers
        self.said: Any = None  # the fault that this rank left with

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        """Write a message; a rank that is gone does not get it."""
        data = pickle.dumps(message)
        try:
            os.write(self.writers[rank], len(data).to_bytes(LENGTH, "big") + data)
        except BrokenPipeError:
            return

    def receive(self, rank: int, call: str, like: Tensor) -> Tensor:
        """Wait for the message of ``rank``: a tensor for the same call, of the same shape and dtype."""
        head = self.read(rank, LENGTH)
        kind, *rest = pickle.loads(self.read(rank, int.from_bytes(head, "big")))
        if kind == "fault":
            raise lost(*rest)
        if (kind, *rest[:2]) != (call, list(like.shape), str(like.dtype)):
            own, have = f"{call} of {like.dtype} {list(like.shape)}", f"{kind} of {rest[1]} {rest[0]}"
            raise RuntimeError(f"rank {self.rank} is at {own}, rank {rank} at {have}")
        return torch.frombuffer(bytearray(rest[2]), dtype=like.dtype).view(like.shape) if rest[2] else like.clone()

    def read(self, rank: int, count: int) -> bytes:
        """Read so many bytes. A pipe that ends is a rank that is gone."""
        data = b""
        while len(data) < count:
            if not select.select([self.readers[rank]], [], [], PATIENCE)[0]:
                raise lost(rank, f"is silent while rank {self.rank} waits for it")
            more = os.read(self.readers[rank], count - len(data))
            if not more:
                raise lost(rank, "ended without a word")
            data += more
        return data

    def message(self, call: str, tensor: Tensor) -> tuple[Any, ...]:
        """Pack a tensor with what it has to agree in."""
        if not tensor.is_contiguous():
            raise ValueError(f"{call} needs a contiguous tensor, and the strides of this one are {tensor.stride()}")
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return call, list(tensor.shape), str(tensor.dtype), data

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """Return every rank's ``part``, in the order of ranks."""
        message = self.message("all_gather", part)
        for rank in self.writers:
            self.send(rank, message)
        order = range(self.size)
        return [part.clone() if rank == self.rank else self.receive(rank, "all_gather", part) for rank in order]

    def broadcast(self, tensor: Tensor) -> None:
        """Write rank 0's ``tensor`` into that of every other rank. Mutates."""
        message = self.message("broadcast", tensor)
        if self.rank == 0:
            for rank in self.writers:
                self.send(rank, message)
        else:
            tensor.copy_(self.receive(0, "broadcast", tensor))

    def leave(self, fault: Any) -> None:
        """Say why to all, and close what they read from."""
        if self.said is None:
            self.said = fault
            for rank in self.writers:
                self.send(rank, ("fault", fault.rank, fault.reason))
        self.close()

    def close(self) -> None:
        """Close all ends of this rank. Mutates."""
        for own in (*self.readers.values(), *self.writers.values()):
            os.close(own)
        self.readers, self.writers = {}, {}


def run_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Fork ``size`` processes and run ``work(group)`` in each -> what it returned, by rank.

    An exception becomes its type and its words. Raises ``NotImplementedError`` if it is one.
    """
    pipes = {(a, b): os.pipe() for a in range(size) for b in range(size) if a != b}  # from a to b: reader, writer
    results = [os.pipe() for _ in range(size)]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            be_rank(rank, size, pipes, results, work)
        children.append(child)
    for reader, writer in pipes.values():
        os.close(reader)
        os.close(writer)
    for _, writer in results:
        os.close(writer)
    found = [read_result(reader) for reader, _ in results]
    for child in children:
        os.waitpid(child, 0)
    for kind, value in found:
        if kind == "NotImplementedError":
            raise NotImplementedError(value)
    return [value if kind == "returned" else f"{kind}: {value}" for kind, value in found]


def be_rank(rank: int, size: int, pipes: Any, results: Any, work: Callable[[Any], Any]) -> None:
    """Be one rank: run the work, write what came of it, and end. Never returns."""
    try:
        group = PipeGroup(
            rank,
            size,
            {a: reader for (a, b), (reader, _) in pipes.items() if b == rank},
            {b: writer for (a, b), (_, writer) in pipes.items() if a == rank},
        )
        own = {*group.readers.values(), *group.writers.values(), results[rank][1]}
        for end in (*(end for ends in pipes.values() for end in ends), *(end for ends in results for end in ends)):
            if end not in own:
                os.close(end)
        try:
            result = ("returned", work(group))
        except BaseException as error:
            result = (type(error).__name__, str(error))
        os.write(results[rank][1], pickle.dumps(result))
    finally:
        os._exit(0)


def read_result(reader: int) -> Any:
    """Return what a rank wrote until its end."""
    data = b""
    while more := os.read(reader, 65536):
        data += more
    os.close(reader)
    return pickle.loads(data) if data else ("ended", "its process wrote nothing")
