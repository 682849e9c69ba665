"""L3: the greedy driver, one request at a time, from prompt ids to output ids.

It prefills, takes the likeliest token and feeds it back until the request ends. What it computes with every option off
is what "off" means in all later lessons.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from mini_engine.attention.allocator import PageAllocator, pages_needed
from mini_engine.attention.metadata import AttentionMetadata, BatchInputs, SequenceChunk, pack_batch
from mini_engine.attention.paged import PagedAttention
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig
from mini_engine.model import Attention, Qwen3

FinishReason = Literal["stop", "length"]
AttentionFactory = Callable[[KVPool, AttentionMetadata], Attention]  # makes the attention object of one step


@dataclass(frozen=True)
class GreedyStep:
    """One generated token and the logits [V] it was chosen from."""

    token_id: int
    logits: Tensor


@dataclass(frozen=True)
class Generation:
    """A finished request: the generated ids, an end-of-sequence id included when it was generated, and why it ended."""

    token_ids: list[int]
    finish_reason: FinishReason


class GreedyDriver:
    """Generates greedily with a KV cache: a prefill of the prompt, then one token a step.

    ``use_kv_cache=False`` recomputes the whole sequence at every step: the slow oracle, with the same pages and the
    same kernels, only with nothing counted as computed.
    """

    def __init__(
        self,
        model: Qwen3,
        config: EngineConfig,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        use_kv_cache: bool = True,
        attention: AttentionFactory | None = None,
    ) -> None:
        """Drive ``model``; stop after any of ``eos_token_ids``. ``attention``: L2's plain one if it is not given.

        Raises ``ValueError`` for a configuration that the plain one does not compute.
        """
        if attention is None and (config.batch_invariant or config.compute == "fast"):
            raise ValueError(
                f"batch_invariant={config.batch_invariant} and compute={config.compute!r} need an attention of "
                "their own; build the driver with mini_engine.llm.make_driver, or give it one of mini_engine.ways"
            )
        self.model = model
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.use_kv_cache = use_kv_cache
        self.make_attention = attention or PagedAttention

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Generation:
        """Generate until an end-of-sequence id or ``max_new_tokens``. Raises ``ValueError`` as ``steps`` does."""
        token_ids = [step.token_id for step in self.steps(prompt_ids, max_new_tokens)]
        return Generation(token_ids, "stop" if token_ids[-1] in self.eos_token_ids else "length")

    def steps(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Iterator[GreedyStep]:
        """Yield one ``GreedyStep`` per generated token; the last one is an end-of-sequence id or hits the limit.

        Raises ``ValueError`` for an empty prompt, an id outside the vocabulary, or more tokens than the model has
        positions for.
        """
        self.check_request(prompt_ids, max_new_tokens)
        return self._steps(list(prompt_ids), max_new_tokens)

    def _steps(self, token_ids: list[int], max_new_tokens: int) -> Iterator[GreedyStep]:
        """Run the loop; ``token_ids`` grows by one token a step.

        Raises ``ValueError`` if the largest logit of a step is NaN or infinite.
        """
        page_size = self.config.page_size
        # The last token is never fed back, so its key and value are never computed and need no room.
        allocator = PageAllocator(pages_needed(len(token_ids) + max_new_tokens - 1, page_size))
        pool = KVPool(self.model.config, allocator.num_pages, page_size, self.model.embedding.dtype, self.config.device)
        pages: list[int] = []
        num_computed_tokens = 0
        for _ in range(max_new_tokens):
            pages += allocator.allocate(pages_needed(len(token_ids), page_size) - len(pages))
            chunk = SequenceChunk(token_ids[num_computed_tokens:], num_computed_tokens, pages)
            logits = self.forward(pack_batch([chunk], page_size, self.config.device), pool)[0]  # [V]
            token_id = int(logits.argmax())  # the lowest id among equals
            check_choice(float(logits[token_id]), len(token_ids))
            yield GreedyStep(token_id, logits)
            if token_id in self.eos_token_ids:
                return
            num_computed_tokens = len(token_ids) if self.use_kv_cache else 0
            token_ids.append(token_id)

    @torch.inference_mode()
    def forward(self, batch: BatchInputs, pool: KVPool) -> Tensor:
        """Run one packed step -> logits [N, V] of every sequence's last row. Writes the step's slots of ``pool``."""
        attention = self.make_attention(pool, batch.metadata)
        return self.model(batch.input_ids, batch.positions, attention, batch.logit_rows)

    def check_request(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Raise ``ValueError``, naming value, limit and remedy, for a request that cannot be run.

        Four rules: the prompt has at least 1 token; every id is a whole number of the vocabulary; ``max_new_tokens`` is
        at least 1; prompt and new tokens together fit into the model's ``max_position_embeddings``.
        """
        cfg = self.model.config
        if not prompt_ids:
            raise ValueError("the prompt has 0 tokens; give at least 1")
        other = [token for token in prompt_ids if not isinstance(token, Integral)]
        if other:
            raise ValueError(f"the prompt holds {other[0]!r}, which is not a token id; encode the text first")
        wrong = [token for token in prompt_ids if not 0 <= token < cfg.vocab_size]
        if wrong:
            raise ValueError(
                f"the prompt holds token id {wrong[0]}, the vocabulary ends at {cfg.vocab_size - 1}; "
                "was it encoded with another tokenizer?"
            )
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1")
        if len(prompt_ids) + max_new_tokens > cfg.max_position_embeddings:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and max_new_tokens={max_new_tokens} need "
                f"{len(prompt_ids) + max_new_tokens} positions, the model has {cfg.max_position_embeddings}; "
                "shorten the prompt or ask for fewer tokens"
            )


def check_choice(largest: float, position: int) -> None:
    """Raise ``ValueError`` if the ``largest`` logit of a row is NaN or infinite: its argmax has no meaning.

    NaN wins every comparison, so one NaN in a row is its largest logit. ``position`` is that of the token.
    """
    if not math.isfinite(largest):
        raise ValueError(
            f"token {position} cannot be chosen: the model's row of logits has the maximum {largest}; "
            "check the weights and the prompt's length"
        )
