"""The worker of rank 0, which tells the other ranks what to compute, and the loop in which they compute it.

Everything that decides is at rank 0: scheduler, caches, grammars, sampler, text. The others get the inputs of each step
and know no requests. So they cannot come to other decisions, only see other inputs or compute other numbers; after each
step rank 0 compares digests of both.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata, BatchInputs
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig
from mini_engine.ranks.processes import LIMIT_S, Ranks
from mini_engine.receipt import checkpoint_of, environment_of
from mini_engine.sampler.driver import SamplingDriver, StepInputs, Worker, WorkerLostError

ZEROED = 1 << 29  # bytes of a pool that a slow rank sets to zero in a second
POOL, RUN, MORE = range(3)  # what an order asks for
OF_BATCH = ("input_ids", "positions", "logit_rows")
OF_METADATA = ("cu_seqlens_q", "seq_lens_kv", "block_table", "slot_mapping")
Order = Mapping[str, Tensor]


def order_of(step: StepInputs) -> Order:
    """Return the tensors that say what to compute in a step."""
    batch = step.batch
    tensors = {name: getattr(batch, name) for name in OF_BATCH}
    tensors |= {name: getattr(batch.metadata, name) for name in OF_METADATA}
    tensors["page_size"] = torch.tensor(batch.metadata.page_size)
    tensors["rows"] = step.rows.clone()  # which may be those of the batch
    tensors["clear"] = torch.tensor(step.clear, dtype=torch.int64)
    return tensors | {f"copy {i} {j}": slots for i, pair in enumerate(step.copies) for j, slots in enumerate(pair)}


def step_of(order: Order) -> StepInputs:
    """Return the inputs of a step from the tensors of ``order_of``."""
    where = {name: order[name] for name in OF_METADATA}
    tensors = {name: order[name] for name in OF_BATCH}
    batch = BatchInputs(**tensors, metadata=AttentionMetadata(**where, page_size=int(order["page_size"])))
    copies: list[tuple[Tensor, Tensor]] = []
    while f"copy {len(copies)} 0" in order:
        copies.append((order[f"copy {len(copies)} 0"], order[f"copy {len(copies)} 1"]))
    return StepInputs(batch, order["rows"], copies, order["clear"].tolist())


def digests_of(step: StepInputs, hidden: Tensor) -> Tensor:
    """Return two numbers for what a rank was given in a step and for what it has computed -> [2] int64.

    ``hidden`` [T, H] is the same at every rank.
    """
    given = hashlib.sha256()
    for tensor in order_of(step).values():
        given.update(tensor.contiguous().numpy().tobytes())
    bits = hidden.contiguous().view(torch.int32 if hidden.dtype == torch.float32 else torch.int16)
    return torch.tensor([int.from_bytes(given.digest()[:8], signed=True), int(bits.sum(dtype=torch.int64))])


class LeadingWorker(Worker):
    """The worker of rank 0: it has the other ranks do what it does."""

    def __init__(self, own: Worker, driver: "LeadingDriver") -> None:
        """Lead with ``own``, this rank's. Each rank makes a pool like its pool, in the place of the one that it had.

        Raises ``ValueError`` if one has no memory for it.
        """
        super().__init__(own.model, own.pool, own.make_attention, own.head)
        self.own = own
        self.driver = driver
        self.number = driver.num_workers = driver.num_workers + 1
        self.order(POOL, {"num_pages": torch.tensor(own.pool.num_pages)})
        num_bytes = sum(tensor.nbytes for tensor in (*own.pool.keys, *own.pool.values))
        with driver.ranks.together():
            driver.ranks.agree(f"pool {self.number}", limit_s=LIMIT_S + num_bytes / ZEROED)

    @property
    def fault(self) -> str | None:  # type: ignore[override]
        """Why it computes nothing any more; ``None`` while it does."""
        return self.driver.ranks.fault

    def order(self, kind: int, tensors: Order) -> None:
        """Tell the other ranks what to do. Raises ``RuntimeError`` for a worker after which another one was made."""
        if self.number != self.driver.num_workers:
            raise RuntimeError("the ranks have the pool of a newer worker; use one engine of a driver at a time")
        self.driver.ranks.send(save({"kind": torch.tensor(kind), **tensors}))

    def run(self, step: StepInputs) -> Tensor:
        """Run all layers of one packed step at every rank -> logits [R, V] of ``step.rows``. Mutates the pools.

        Raises ``WorkerLostError`` if a rank is lost, or was given or has computed something else than this one.
        """
        ranks = self.driver.ranks
        self.order(RUN, order_of(step))
        with ranks.together():
            logits = self.own.run(step)
            digests = ranks.stack(digests_of(step, self.own.hidden))  # [n, 2]
            for of_ranks, what in zip(digests.T, ("was given other inputs", "has computed other numbers"), strict=True):
                wrong = of_ranks.ne(of_ranks[0]).nonzero().flatten().tolist()
                if wrong:
                    raise WorkerLostError(f"rank {wrong[0]} of {len(digests)} {what} than rank 0")
        return logits

    def more(self, rows: Tensor) -> Tensor:
        """Return the logits of ``rows`` [R] of the last step -> [R, V]."""
        self.order(MORE, {"rows": rows})
        with self.driver.ranks.together():
            return self.own.more(rows)


class LeadingDriver(SamplingDriver):
    """The driver of rank 0."""

    num_workers = 0
    greedy: LeadingWorker | None = None

    def __init__(self, own: SamplingDriver, ranks: Ranks, weight_bytes: Sequence[int]) -> None:
        """Lead ``ranks`` with ``own``, this rank's driver. ``weight_bytes``: of each rank."""
        super().__init__(
            own.model, own.config, own.eos_token_ids, sampler=own.sampler, head=own.head, attention=own.make_attention
        )
        self.ranks = ranks
        self.weight_bytes = weight_bytes

    def make_worker(self, num_pages: int) -> Worker:
        """Return a worker over a pool of ``num_pages`` pages at each rank. Raises ``ValueError`` without memory."""
        return LeadingWorker(super().make_worker(num_pages), self)

    @torch.inference_mode()
    def forward(self, batch: BatchInputs, pool: KVPool) -> Tensor:
        """Run one packed step -> logits [N, V] of every sequence's last row. Writes the step's slots of ``pool``."""
        if self.greedy is None or self.greedy.pool is not pool:
            self.greedy = LeadingWorker(Worker(self.model, pool, self.make_attention, self.head), self)
        return self.greedy.run(StepInputs(batch, batch.logit_rows))

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()


def follow_rank_0(driver: SamplingDriver, ranks: Ranks) -> None:
    """Compute what rank 0 computes, until it says that it has ended. Raises ``WorkerLostError`` if it is lost."""
    worker: Worker | None = None
    num_workers = 0
    while content := ranks.receive():
        order = load(content)
        kind = int(order["kind"])
        if kind == POOL:
            worker = None  # its memory first
            worker = driver.make_worker(int(order["num_pages"]))
            num_workers += 1
            ranks.agree(f"pool {num_workers}")
            continue
        assert worker is not None, "rank 0 makes a pool first"
        if kind == RUN:
            step = step_of(order)
            worker.run(step)
            ranks.stack(digests_of(step, worker.hidden))
        else:
            worker.more(order["rows"])


def lead_or_follow(driver: SamplingDriver, folder: Path, engine: EngineConfig, ranks: Ranks) -> LeadingDriver:
    """Return the driver of rank 0 over ``driver``, this rank's. At every other rank, compute and end the process.

    Raises ``ValueError`` unless all ranks have loaded the same checkpoint for the same ``engine``, with the same
    libraries and on the same kind of machine.
    """
    facts = environment_of(driver) | asdict(engine)
    del facts["products"]  # they follow from the others
    if not ranks.is_local:  # otherwise they have read the same files
        facts |= {name: digests for name, digests in checkpoint_of(folder).items() if name != "folder"}
    own = {"facts": facts, "weight_bytes": getattr(driver.model.projections, "num_bytes", 0)}
    each = [json.loads(text) for text in ranks.agree("loaded", json.dumps(own, default=repr))]
    for rank, other in enumerate(each):
        for name, value in each[0]["facts"].items():
            if other["facts"][name] != value:
                found = f"{name} {other['facts'][name]!r} and rank 0 {value!r}"
                raise ValueError(f"rank {rank} of {len(each)} has {found}; give all ranks the same")
    if ranks.rank:
        follow_rank_0(driver, ranks)
        os._exit(0)
    leading = LeadingDriver(driver, ranks, [one["weight_bytes"] for one in each])
    leading.folder = folder
    return leading
