"""Causal attention behind one signature, ``attention(layer, q, k, v) -> out``.

``dense``      L1: one sequence, no cache.
``pool``, ``allocator``, ``metadata``, ``paged``      L2: ragged batches over a paged KV pool.
``consecutive``      beside the plain path: the same bits without copies, for pages that follow one another.
``strided``, ``cascade``      beside it too: many decode rows in one call; common first pages read once. ``ragged`` is
what they share.
``invariant``                 beside it too: the same result with bits that do not depend on the batch.

Import from the modules: this package re-exports nothing, so that L1 can be read and run without L2.
"""
