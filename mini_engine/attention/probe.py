"""The start-up probe of ``batch_invariant=True``: whether this machine keeps the promise.

Owns: one small experiment. Must not know: what to do about the answer.

The recipe in ``invariant.py`` and ``linear.py`` was measured on some CPUs, and a library may choose other kernels on
another one. So the promise is tried with the model at hand: a prompt alone and whole, against the same prompt in chunks
beside a neighbour.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.metadata import BatchInputs, SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig, ModelConfig

PROMPT_LENGTH = 40
FIRST_CHUNKS = (1, 7, 32, 39)


def invariance_fault(
    forward: Callable[[BatchInputs, KVPool], Tensor], model: ModelConfig, engine: EngineConfig
) -> str | None:
    """Run the probe with ``forward(batch, pool) -> logits [N, V]``; return one line about the fault, ``None`` if none.

    Costs five forward passes of about 40 tokens.
    """
    length = min(PROMPT_LENGTH, model.max_position_embeddings)
    rng = random.Random(0)
    prompt, neighbour = ([rng.randrange(model.vocab_size) for _ in range(length)] for _ in range(2))
    alone = run_chunks(forward, model, engine, prompt, [length])
    for sizes in [(first, length - first) for first in FIRST_CHUNKS if first < length]:
        if not torch.equal(run_chunks(forward, model, engine, prompt, sizes, neighbour), alone):
            return (
                f"batch_invariant=True is not kept on this machine: a prompt of {length} tokens gave other bits in "
                f"chunks of {' + '.join(map(str, sizes))} beside a neighbour than alone; logits may depend on the batch"
            )
    return None


def run_chunks(
    forward: Callable[[BatchInputs, KVPool], Tensor],
    model: ModelConfig,
    engine: EngineConfig,
    prompt: Sequence[int],
    sizes: Sequence[int],
    neighbour: Sequence[int] = (),
) -> Tensor:
    """Prefill ``prompt`` in chunks of ``sizes``, each packed after a piece of ``neighbour`` -> its last logits [V]."""
    per_sequence = pages_needed(len(prompt), engine.page_size)
    pool = KVPool(model, 2 * per_sequence, engine.page_size, getattr(torch, engine.dtype), engine.device)
    pages, other_pages = range(per_sequence), range(per_sequence, 2 * per_sequence)
    done, logits = 0, torch.empty(0)
    for size in sizes:
        chunks = [SequenceChunk(prompt[done : done + size], done, pages)]
        if neighbour:
            chunks.insert(0, SequenceChunk(neighbour[done : done + size], done, other_pages))
        logits = forward(pack_batch(chunks, engine.page_size, engine.device), pool)[-1]
        done += size
    return logits
