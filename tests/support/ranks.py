"""Ranks as threads of one process: what they compute and exchange, without what starts and watches processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.llm import build_model, make_driver
from mini_engine.model import Qwen3
from mini_engine.ranks.split import Shards, Split
from mini_engine.ranks.worker import LeadingDriver, follow_rank_0

T = TypeVar("T")
PATIENCE_S = 60


class Board:
    """What the threads of a group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Any] = [None] * size
        self.barrier = Barrier(size)
        self.orders: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in range(size)]
        self.num_exchanges = 0


class ThreadRanks:
    """A ``split.Group``, and what workers need of ``processes.Ranks``, among threads."""

    fault = None

    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank
        self.size = board.size

    def exchange(self, part: T) -> list[T]:
        self.board.parts[self.rank] = part
        self.board.barrier.wait(PATIENCE_S)
        parts = list(self.board.parts)
        self.board.num_exchanges += self.rank == 0
        self.board.barrier.wait(PATIENCE_S)
        return parts

    def stack(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(x))

    def stack_at_first(self, x: Tensor) -> Tensor:
        parts = self.exchange(x)
        return torch.stack(parts) if self.rank == 0 else x[None]

    def add(self, x: Tensor) -> Tensor:
        return self.stack(x).sum(0)

    def agree(self, name: str, text: str = "", limit_s: float = 0) -> list[str]:
        return self.exchange(text)

    def send(self, order: bytes) -> None:
        for queue in self.board.orders[1:]:
            queue.put(order)

    def receive(self) -> bytes:
        return self.board.orders[self.rank].get()

    def together(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        self.send(b"")


def at_each_rank(size: int, action: Callable[[ThreadRanks], T]) -> tuple[list[T], Board]:
    """Run ``action`` in a thread for each rank, and return what it returned. Raises what it raised."""
    board = Board(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = action(ThreadRanks(board, rank))
        except BaseException as error:
            if not isinstance(error, BrokenBarrierError):
                errors.append(error)
            board.barrier.abort()

    threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    return results, board


def part_of(
    config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig, ranks: ThreadRanks, sums: bool = False
) -> Qwen3:
    """Build a rank's part of a model of which ``weights`` are all tensors, and take no other elements of them."""
    split = Split(config, ranks, sums)
    pieces = split.pieces()
    own = {
        name: tensor[pieces[name].place].clone() if name in pieces else tensor.clone()
        for name, tensor in weights.items()
    }
    return build_model(split.config, Shards(own, split), engine)


@contextmanager
def leading_driver(
    size: int, config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig, **parts: Any
) -> Iterator[LeadingDriver]:
    """Give the driver of rank 0 in this thread; the other ranks follow in theirs."""
    board = Board(size)
    errors: list[BaseException] = []

    def follow(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            ranks = ThreadRanks(board, rank)
            follow_rank_0(make_driver(part_of(config, weights, engine, ranks), engine), ranks)
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    ranks = ThreadRanks(board, 0)
    own = make_driver(part_of(config, weights, engine, ranks), engine, **parts)
    driver = LeadingDriver(own, ranks, [0] * size)
    try:
        yield driver
    finally:
        driver.close()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not errors, errors


def equal_everywhere(results: Sequence[Tensor], expected: Tensor) -> bool:
    return all(torch.equal(result, expected) for result in results)
