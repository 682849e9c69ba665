"""Llama, Qwen2, Mistral and SmolLM3 beside L1's Qwen3: the same forward pass without the norm of each head.

Whether a product adds a bias is in ``families.py``; L1's ``_layer`` hands it to the products.
"""

from torch import Tensor

from mini_engine.model import Attention, Layer, Qwen3, apply_rotary, rms_norm


class Llama(Qwen3):
    """A dense Llama decoder: ``Qwen3`` whose heads are turned as they are, and not in ``unrotated_layers``."""

    def attention_block(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """Norm, project, rotate, attend, project back. ``x`` [T, H] -> [T, H] (without residual)."""
        cfg = self.config
        x = rms_norm(x, layer.input_norm, cfg.rms_norm_eps)
        q = layer.q_proj(x).view(-1, cfg.num_attention_heads, cfg.head_dim)  # [T, Hq, D]
        k = layer.k_proj(x).view(-1, cfg.num_key_value_heads, cfg.head_dim)  # [T, Hkv, D]
        v = layer.v_proj(x).view(-1, cfg.num_key_value_heads, cfg.head_dim)  # [T, Hkv, D]
        if index not in cfg.unrotated_layers:
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return layer.o_proj(attention(index, q, k, v).flatten(-2))
