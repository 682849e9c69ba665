"""Pools with random keys and values, and chunks of sequences that lie in them."""

import torch

from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.metadata import SequenceChunk
from mini_engine.attention.pool import KVPool
from mini_engine.config import ModelConfig

CONFIG = ModelConfig(32, 64, 2, 6, 2, 16, 64, 4096, 1e4, 1e-6, True)


def make_pool(num_pages, page_size, dtype=torch.float32):
    torch.manual_seed(0)
    pool = KVPool(CONFIG, num_pages, page_size, dtype)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()  # what earlier owners left behind
    return pool


def chunk_at(first_page, kv_len, page_size, new=1):
    pages = list(range(first_page, first_page + pages_needed(kv_len, page_size)))
    return SequenceChunk([1] * new, kv_len - new, pages)
