"""The attention cases of ``bench kernels``: decoding from a paged cache, and prompts.

The pages of a sequence lie anywhere in the pool. The peers have better conditions: the keys and values of every
sequence in one piece, and all sequences equally long, so that nothing is padded. The peers are torch's
``scaled_dot_product_attention`` and ``flex_attention``.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.bench.kernels.cases import BANDWIDTH, LARGE_BYTES, Case, Function, Inputs, Setting
from mini_engine.kernels.attention import num_processors
from mini_engine.kernels.paged_attention import paged_attention, paged_attention_reference, paged_queries
from mini_engine.kernels.query_blocks import cut_queries, whole_sequences
from mini_engine.kernels.split_attention import INVARIANT_SPLIT, choose_split_size, split_attention, split_queries

TOLERANCE = 1e-2
DECODE_GOAL = (BANDWIDTH, 0.75)
PREFILL_GOAL = ("SDPA flash", 0.5)
FLEX_AT = (16, 8192)  # batch and context: torch compiles flex attention for a minute, so it is done once


def paged_inputs(setting: Setting, batch: int, q_len: int, kv_len: int, queries: int, seed: int) -> Inputs:
    """Return (q, keys, values, metadata, blocks) of ``batch`` sequences whose pages lie anywhere in the pool."""
    shape, device, page_size = setting.shape, setting.device, setting.page_size
    pages = -(-kv_len // page_size)
    q = setting.normal(seed, batch * q_len, shape.q_heads, shape.head_dim)
    # The pool's layout: heads first, and one slot that belongs to no page.
    keys, values = (
        setting.normal(seed + n, shape.kv_heads, batch * pages * page_size + 1, shape.head_dim) for n in (1, 2)
    )
    generator = torch.Generator(device).manual_seed(seed)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=device),
        seq_lens_kv=torch.full((batch,), kv_len, dtype=torch.int32, device=device),
        block_table=torch.randperm(batch * pages, generator=generator, device=device).view(batch, pages).int(),
        slot_mapping=torch.zeros(batch * q_len, dtype=torch.int64, device=device),  # nothing is stored
        page_size=page_size,
    )
    return q, keys, values, metadata, cut_queries(whole_sequences(metadata), queries, device)


def in_one_piece(pool: Tensor, batch: int, length: int) -> Tensor:
    """View a pool [Hkv, slots + 1, D] as ``batch`` sequences without pages -> [batch, Hkv, length, D]."""
    heads, slots, dim = pool.shape
    return pool[:, : slots - 1].view(heads, batch, -1, dim)[:, :, :length].transpose(0, 1)


def returning(attend: Function, *more: Any) -> Function:
    """Return ``attend``, which takes where its rows go and then ``more``, as a function that returns them."""

    def call(q: Tensor, *cache: Any) -> Tensor:
        out = torch.empty_like(q)
        attend(q, *cache, out, *more)
        return out

    return call


reference = returning(paged_attention_reference)  # of both kernels


def decode_cases(setting: Setting) -> Iterator[Case]:
    """Yield one new token for each of some sequences, for every context and batch. Bytes: keys and values alone."""
    for context in setting.sizes.contexts:
        for batch in setting.sizes.batches:
            yield decode_case(setting, batch, context)


def decode_case(setting: Setting, batch: int, context: int) -> Case:
    """Return the step of ``batch`` sequences with ``context`` keys each."""
    shape = setting.shape
    group = setting.shape.q_heads // setting.shape.kv_heads
    queries = split_queries(group, shape.head_dim, setting.dtype)
    split_size = choose_split_size(context, batch, shape.kv_heads, num_processors(setting.device))

    def sdpa(q: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
        key, value = (in_one_piece(pool, batch, context) for pool in (keys, values))
        return F.scaled_dot_product_attention(q.unsqueeze(2), key, value, enable_gqa=True)

    peers = {"SDPA": sdpa, "fixed split": returning(split_attention, INVARIANT_SPLIT)}
    if setting.compiled and (batch, context) == FLEX_AT:
        peers["flex attention"] = flex_peer(batch, context)
    kv_bytes = 2 * batch * context * shape.kv_heads * shape.head_dim * setting.dtype.itemsize
    return Case(
        "decode",
        "split_attention",
        f"{batch} x {context}, GQA {group}",
        lambda seed: paged_inputs(setting, batch, 1, context, queries, seed),
        returning(split_attention, split_size),
        reference,
        num_bytes=kv_bytes,
        num_flops=4 * batch * shape.q_heads * context * shape.head_dim,
        peers=peers,
        goal=DECODE_GOAL if kv_bytes >= LARGE_BYTES else None,
        tolerance=TOLERANCE,
        is_reference_timed=False,
    )


def flex_peer(batch: int, context: int) -> Function:
    """Return flex attention, compiled at its first call, for one query per sequence."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def flex(q: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Any:
        key, value = (in_one_piece(pool, batch, context) for pool in (keys, values))
        return compiled(q.unsqueeze(2), key, value, enable_gqa=True)

    return flex


def prefill_cases(setting: Setting) -> Iterator[Case]:
    """Yield whole prompts, for every length and batch."""
    for length in setting.sizes.prompts:
        for batch in setting.sizes.prompt_batches:
            yield prefill_case(setting, batch, length)


def prefill_case(setting: Setting, batch: int, length: int) -> Case:
    """Return the prefill of ``batch`` prompts. Operations: two products over the pairs that the causal mask leaves."""
    shape = setting.shape
    group = setting.shape.q_heads // setting.shape.kv_heads
    queries = paged_queries(group, shape.head_dim, setting.dtype)

    def flash(q: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
        key, value = (in_one_piece(pool, batch, length) for pool in (keys, values))
        heads_first = q.view(batch, length, *q.shape[1:]).transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(heads_first, key, value, is_causal=True, enable_gqa=True)

    pairs = batch * shape.q_heads * length * (length + 1) // 2
    return Case(
        "prefill",
        "paged_attention",
        f"{batch} x {length}, GQA {group}",
        lambda seed: paged_inputs(setting, batch, length, length, queries, seed),
        returning(paged_attention),
        reference,
        num_bytes=2 * batch * length * (shape.q_heads + shape.kv_heads) * shape.head_dim * setting.dtype.itemsize,
        num_flops=4 * pairs * shape.head_dim,
        peers={"SDPA flash": flash},
        goal=PREFILL_GOAL,
        tolerance=TOLERANCE,
        is_reference_timed=False,
    )
