"""Causal attention behind one signature, ``attention(layer, q, k, v) -> out``.

``dense``      L1: one sequence, no cache.
``pool``, ``allocator``, ``metadata``, ``paged``      L2: ragged batches over a paged KV pool.
Faster forms are in ``fast/attention``; ``invariant/attention.py`` has the form whose bits do not depend on the batch.

Import from the modules: this package re-exports nothing, so that L1 can be read and run without L2.
"""
