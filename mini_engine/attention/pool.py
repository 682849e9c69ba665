"""L2: the memory of keys and values: one tensor for K and one for V per layer.

Which request owns a page is the business of ``allocator``, which pages make a sequence that of ``metadata``.

A *slot* is the place of one token: page p holds the slots p * page_size … (p + 1) * page_size - 1. The layout is
``[Hkv, slots, D]``, heads first, so that gathering a sequence is one ``index_select`` whose result goes into the
attention kernel as it is.
"""

import torch
from torch import Tensor

from mini_engine.config import ModelConfig
from mini_engine.device import free_memory


class KVPool:
    """Keys and values of ``num_pages`` pages of ``page_size`` tokens, for every layer.

    One slot beyond the last page is never written and stays zero: padding reads it (``zero_slot``), because a masked
    key still needs a finite value.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        """Allocate zeroed memory: 2 * layers * Hkv * D * num_pages * page_size numbers of ``dtype``.

        Raises ``ValueError`` as ``check_memory`` does.
        """
        check_memory(config, num_pages, page_size, dtype, device)
        self.num_pages = num_pages
        self.page_size = page_size
        self.zero_slot = num_pages * page_size
        shape = (config.num_key_value_heads, self.zero_slot + 1, config.head_dim)  # [Hkv, slots + 1, D]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store ``k`` and ``v`` [T, Hkv, D] in the slots ``slot_mapping`` [T] of one layer. Mutates its tensors."""
        self.keys[layer].index_copy_(1, slot_mapping, k.transpose(0, 1))
        self.values[layer].index_copy_(1, slot_mapping, v.transpose(0, 1))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read the ``slots`` [n] of one layer, in that order -> K and V, each [Hkv, n, D] (copies)."""
        return self.keys[layer].index_select(1, slots), self.values[layer].index_select(1, slots)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the slots ``source`` [n] to the slots ``target`` [n] in every layer. Mutates."""
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def poison(self, pages: list[int]) -> None:
        """Fill ``pages`` with NaN in every layer, so that a read of a freed page shows in the output. Mutates."""
        self.fill(pages, float("nan"))

    def fill(self, pages: list[int], value: float) -> None:
        """Fill ``pages`` with ``value`` in every layer. Mutates."""
        size = self.page_size
        slots = torch.tensor([page * size + i for page in pages for i in range(size)], dtype=torch.int64)
        for tensor in (*self.keys, *self.values):
            tensor[:, slots.to(tensor.device)] = value


def check_memory(config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
    """Raise ``ValueError`` for a pool on the CPU that is larger than what is free there, weights and cgroups counted.

    A GPU's allocator says so itself.
    """
    page = page_size * slot_bytes(config, dtype)
    if torch.device(device).type == "cpu" and num_pages * page > (free := free_memory(device)):
        raise ValueError(
            f"a KV pool of {num_pages} pages of {page_size} tokens takes {num_pages * page / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free; ask for at most {free // page} pages (num_pages), or for fewer "
            "positions (max_model_len)"
        )


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
