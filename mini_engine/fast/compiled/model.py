"""The fused forward pass with a loop for everything between two matrix products.

``model.Qwen3`` is the oracle.

As in ``kernels/model.py`` the residual stream is one array that every block's output is added to, in the same loop that
norms the sum for the next block.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import ModelConfig
from mini_engine.fast.compiled import loops
from mini_engine.fast.compiled.loops import Floats
from mini_engine.fast.compiled.products import halves
from mini_engine.fast.fused import FusedLayer, FusedQwen3
from mini_engine.linear import Projections
from mini_engine.model import Attention
from mini_engine.weights import Weights


@dataclass(frozen=True)
class Norms:
    """The norm weights of a layer as arrays."""

    heads: Floats  # [Hq + Hkv, D]
    post_attention: Floats  # [H]
    next: Floats  # [H]: what begins the next layer, or the final norm


def array(norm: Tensor) -> Floats:
    """Return the weights of a norm as float32 numbers."""
    return norm.float().numpy()


class Shared:
    """Memory for one matrix, as a tensor for torch and as an array for the loops."""

    def __init__(self, *shape: int) -> None:
        """Allocate float32 numbers that are not set yet."""
        self.tensor = torch.empty(shape)
        self.array: Floats = self.tensor.numpy()


class Room:
    """The memory of one step that every layer uses again."""

    def __init__(self, rows: int, config: ModelConfig) -> None:
        """Allocate it for T = ``rows``."""
        dim = config.head_dim
        self.cos, self.sin = np.empty((2, rows, dim // 2), np.float32)
        self.x = Shared(rows, config.hidden_size)  # normed: what the next product is of
        self.q = Shared(rows, config.num_attention_heads, dim)
        self.k = Shared(rows, config.num_key_value_heads, dim)
        self.product = Shared(rows, config.intermediate_size)  # silu(gate) * up


class CompiledQwen3(FusedQwen3):
    """``FusedQwen3`` on the CPU, its small operations compiled: same call, same values to rounding.

    All that lies between two products is computed in float32, and so are the logits, whatever the dtype of the weights.
    """

    def __init__(self, config: ModelConfig, weights: Weights, projections: Projections) -> None:
        """Stack and hand over the weights as ``FusedQwen3`` does. Empties ``weights``."""
        super().__init__(config, weights, projections)
        self.first_norm = array(self.fused[0].input_norm)
        following = [layer.input_norm for layer in self.fused[1:]] + [self.final_norm]
        self.norms = [
            Norms(array(own.qk_norm), array(own.post_attention_norm), array(after))
            for own, after in zip(self.fused, following, strict=True)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the step as ``Qwen3`` does; the logits are float32."""
        return super().__call__(*args, **kwargs).float()

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers and the final norm. ``input_ids`` and ``positions`` [T] -> [T, H]."""
        eps = self.config.rms_norm_eps
        residual = F.embedding(input_ids, self.embedding).float().numpy()  # [T, H], fresh memory
        room = Room(len(input_ids), self.config)
        loops.rotary_table(positions.numpy(), self.frequencies.numpy(), room.cos, room.sin)
        if self.rotary_factor != 1.0:
            room.cos *= self.rotary_factor
            room.sin *= self.rotary_factor
        loops.rms_norm(residual, self.first_norm, eps, room.x.array)
        for index, (layer, norms) in enumerate(zip(self.fused, self.norms, strict=True)):
            out = self.attend(index, layer, norms, room, attention)
            loops.add_rms_norm(halves(out), residual, norms.post_attention, eps, room.x.array)
            loops.silu_and_mul(halves(layer.gate_up_proj(room.x.tensor)), room.product.array)
            out = layer.down_proj(room.product.tensor)
            loops.add_rms_norm(halves(out), residual, norms.next, eps, room.x.array)
        return room.x.tensor

    def attend(self, index: int, layer: FusedLayer, norms: Norms, room: Room, attention: Attention) -> Tensor:
        """Compute ``Qwen3.attention_block`` of the normed rows ``room.x`` [T, H] -> [T, H]."""
        cfg = self.config
        num_heads, num_kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
        heads = layer.qkv_proj(room.x.tensor).view(-1, num_heads + 2 * num_kv_heads, cfg.head_dim)
        loops.norm_and_rotate(
            halves(heads), norms.heads, room.cos, room.sin, cfg.rms_norm_eps, room.q.array, room.k.array
        )
        v = heads.narrow(1, num_heads + num_kv_heads, num_kv_heads)  # [T, Hkv, D], a view
        return layer.o_proj(attention(index, room.q.tensor, room.k.tensor, v).view(-1, num_heads * cfg.head_dim))
