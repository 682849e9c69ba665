"""Beside L1's plain path: the same forward pass in fewer and larger operations, for packed weights.

One token of a decode step is so little work that calling an operation costs as much as computing it. So the projections
of the same rows become one product over stacked weights; query and key heads are normed and turned together; and a norm
makes no more calls than it has steps. ``model.Qwen3`` is the oracle: every value goes through the same roundings in the
same order, and in bfloat16 the bits are those of ``Qwen3`` with the same projections. In float32 a product may choose
another order of additions for a larger matrix.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.linear import Linear
from mini_engine.model import Attention, Qwen3
from mini_engine.weights import LayerWeights, Weights, stacked, take_layer


@cache
def number(value: float) -> Tensor:
    """Return ``value`` as a tensor without dimensions: a small operation takes half as long as with a Python number."""
    return torch.tensor(float(value))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``model.rms_norm`` in the memory of its own results. ``x`` [..., H], ``weight`` [..., H] -> [..., H].

    ``pow``, ``mean`` and ``F.rms_norm`` call several smaller operations each; these are the smallest ones.
    """
    wide = x.float()
    mean_square = (wide * wide).sum(-1, keepdim=True).div_(number(x.shape[-1]))  # [..., 1]
    return (wide * mean_square.add_(number(eps)).rsqrt_()).to(x.dtype).mul_(weight)


def signed_sine(sin: Tensor) -> Tensor:
    """Negate the first half of ``sin`` [T, D] -> [T, D], so that ``apply_rotary`` need not negate half of its input."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Compute ``model.apply_rotary`` in place. ``x`` [T, heads, D]; ``cos``, ``signed_sin`` [T, 1, D]. Mutates ``x``.

    ``(-b) * sin == b * (-sin)`` to the bit, so swapping the halves of ``x`` is all that is left of the quarter turn.
    """
    turned = x.roll(x.shape[-1] // 2, -1).mul_(signed_sin)
    return x.mul_(cos).add_(turned)


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one decoder layer, those that multiply the same rows stacked into one matrix."""

    input_norm: Tensor  # [H]
    qkv_proj: Linear  # [T, H] -> [T, (Hq + 2 Hkv) * D]: query heads, key heads, value heads
    qk_norm: Tensor  # [Hq + Hkv, D]: the query norm for every query head, the key norm for every key head; or [.., 0]
    o_proj: Linear  # [T, Hq * D] -> [T, H]
    post_attention_norm: Tensor  # [H]
    gate_up_proj: Linear  # [T, H] -> [T, 2 F]: gate, up
    down_proj: Linear  # [T, F] -> [T, H]


class FusedQwen3(Qwen3):
    """``Qwen3`` with fewer operations: same weights, same call, same values. It has ``fused`` layers, no ``layers``."""

    def take_layers(self, weights: Weights) -> None:
        """Make ``fused`` of ``weights``, layer after layer. Keeps no tensor that it stacked."""
        self.layers = []
        count = self.config.num_hidden_layers
        self.fused = [self._fused_layer(take_layer(weights, self.config, layer)) for layer in range(count)]

    def _fused_layer(self, own: LayerWeights) -> FusedLayer:
        """Turn the matrices of one layer into products, those of the same rows into one."""
        linear = self.projections.linear
        q_norm = own.q_norm.expand(self.config.num_attention_heads, -1)  # [Hq, D]
        k_norm = own.k_norm.expand(self.config.num_key_value_heads, -1)  # [Hkv, D]
        return FusedLayer(
            input_norm=own.input_norm,
            qkv_proj=linear(*stacked(own.q_proj, own.k_proj, own.v_proj)),
            qk_norm=torch.cat((q_norm, k_norm)),
            o_proj=linear(*own.o_proj),
            post_attention_norm=own.post_attention_norm,
            gate_up_proj=linear(*stacked(own.gate_proj, own.up_proj)),
            down_proj=linear(*own.down_proj),
        )

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers and the final norm. ``input_ids`` and ``positions`` [T] -> [T, H]."""
        x = F.embedding(input_ids, self.embedding)  # [T, H]
        cos, sin = self.rotary(positions, x.dtype)  # [T, D] each
        cos, sin = cos[:, None], signed_sine(sin)[:, None]  # [T, 1, D]: one angle for all heads
        for index, layer in enumerate(self.fused):
            x = x + self.fused_attention_block(index, layer, x, cos, sin, attention)
            x = x + self.fused_mlp_block(layer, x)
        return rms_norm(x, self.final_norm, self.config.rms_norm_eps)

    def fused_attention_block(
        self, index: int, layer: FusedLayer, x: Tensor, cos: Tensor, signed_sin: Tensor, attention: Attention
    ) -> Tensor:
        """Compute ``Qwen3.attention_block``. ``x`` [T, H]; ``cos`` and ``signed_sin`` [T, 1, D] -> [T, H]."""
        cfg = self.config
        num_heads, num_kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
        x = rms_norm(x, layer.input_norm, cfg.rms_norm_eps)
        heads = layer.qkv_proj(x).view(-1, num_heads + 2 * num_kv_heads, cfg.head_dim)  # [T, Hq + 2 Hkv, D]
        # ``split`` is the same behind a wrapper in Python, which takes longer than the operation.
        qk, v = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.qk_norm.numel():
            qk = rms_norm(qk, layer.qk_norm, cfg.rms_norm_eps)
        if index not in cfg.unrotated_layers:
            qk = apply_rotary(qk, cos, signed_sin)  # [T, Hq + Hkv, D]
        q, k = qk.split_with_sizes((num_heads, num_kv_heads), dim=1)
        out = attention(index, q, k, v)  # [T, Hq, D]
        return layer.o_proj(out.flatten(-2))

    def fused_mlp_block(self, layer: FusedLayer, x: Tensor) -> Tensor:
        """Compute ``Qwen3.mlp_block``. ``x`` [T, H] -> [T, H]."""
        x = rms_norm(x, layer.post_attention_norm, self.config.rms_norm_eps)
        gate, up = layer.gate_up_proj(x).chunk(2, dim=-1)  # [T, F] each, views into rows of 2 F
        # Gapless memory, because the bits of SiLU can depend on where in its tensor a value stands (see linear.py).
        return layer.down_proj(self.projections.silu(gate.contiguous()).mul_(up))
