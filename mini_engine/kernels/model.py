"""L8: the fused forward pass with every operation between two matrix products done by a kernel.

``model.Qwen3`` is the oracle.

The residual stream is one tensor that ``add_rms_norm`` updates in place: each block's output is added and the sum
normed for the next block in one pass over memory. So the norm that begins a block is computed where the last one ends.
"""

import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import ModelConfig
from mini_engine.fast.fused import FusedLayer, FusedQwen3
from mini_engine.kernels.registry import KernelSet
from mini_engine.linear import Linear, TorchProjections, with_bias
from mini_engine.model import Attention
from mini_engine.weights import Weights


class KernelProjections(TorchProjections):
    """torch's own product; with ``batch_invariant`` the product whose bits do not depend on the number of rows."""

    def __init__(self, kernels: KernelSet, batch_invariant: bool) -> None:
        """Multiply with ``kernels.invariant_matmul`` or with ``F.linear``."""
        self.kernels = kernels
        self.batch_invariant = batch_invariant

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the product with ``weight`` [out, in], plus ``bias`` [out]."""
        if not self.batch_invariant:
            return super().linear(weight, bias)
        return with_bias(lambda x: self.kernels.invariant_matmul(x, weight), bias)


class KernelQwen3(FusedQwen3):
    """``FusedQwen3`` whose operations come from ``kernels``: same weights, same call, same values to rounding."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: KernelSet, batch_invariant: bool = False
    ) -> None:
        """Stack and hand over the weights as ``Qwen3`` does. Empties ``weights``."""
        super().__init__(config, weights, KernelProjections(kernels, batch_invariant))
        self.kernels = kernels

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers and the final norm. ``input_ids`` and ``positions`` [T] -> [T, H]."""
        eps = self.config.rms_norm_eps
        norms = [layer.input_norm for layer in self.fused[1:]] + [self.final_norm]
        residual = F.embedding(input_ids, self.embedding)  # [T, H], fresh memory
        cos, sin = self.rotary(positions, residual.dtype)  # [T, D] each
        x = self.kernels.rms_norm(residual, self.fused[0].input_norm, eps)  # [T, H]
        for index, (layer, next_norm) in enumerate(zip(self.fused, norms, strict=True)):
            out = self.attend(index, layer, x, cos, sin, attention)
            x = self.kernels.add_rms_norm(out, residual, layer.post_attention_norm, eps)
            out = layer.down_proj(self.kernels.silu_and_mul(layer.gate_up_proj(x)))
            x = self.kernels.add_rms_norm(out, residual, next_norm, eps)
        return x  # type: ignore[no-any-return]

    def attend(
        self, index: int, layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """Project, norm each head, rotate in place, attend, project back. ``x`` [T, H], normed -> [T, H]."""
        cfg = self.config
        num_heads, num_kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
        heads = layer.qkv_proj(x).view(-1, num_heads + 2 * num_kv_heads, cfg.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)  # views
        if layer.qk_norm.numel():
            q = self.kernels.rms_norm(q, layer.qk_norm[0], cfg.rms_norm_eps)  # [T, Hq, D]; the rows of qk_norm are
            k = self.kernels.rms_norm(k, layer.qk_norm[-1], cfg.rms_norm_eps)  # [T, Hkv, D]; the query's, the key's
        self.kernels.apply_rotary(q, k, cos, sin)
        return layer.o_proj(attention(index, q, k, v).flatten(-2))
