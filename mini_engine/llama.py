"""The models of other families beside L1's Qwen3: its forward pass, with what ``families.py`` says of each.

A trait that a family does not have is a branch that is not taken. Whether a product adds a bias is in ``families.py``
as well; L1's ``_layer`` hands it to the products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel, causal_mask
from mini_engine.config import ModelConfig
from mini_engine.linear import Linear, Projections
from mini_engine.model import Attention, Layer, Qwen3, apply_rotary, rms_norm, rotary_frequencies, rotary_table
from mini_engine.weights import LayerWeights, Matrix, Weights


@dataclass(frozen=True)
class StackedLayer(Layer):
    """A layer of E MLPs that have gate and up in one matrix; ``gate_proj``, ``up_proj`` and ``down_proj`` are ``None``.

    A router sends each row through some of them. Without one E is 1.
    """

    router: Linear | None  # [T, H] -> [T, E]
    experts: Sequence[tuple[Linear, Linear]]  # E times [rows, H] -> [rows, 2 F], gate and up; [rows, F] -> [rows, H]


class Llama(Qwen3):
    """A decoder as Llama's: ``Qwen3`` without the norm of each head, unless the family has another one."""

    def __init__(self, config: ModelConfig, weights: Weights, projections: Projections | None = None) -> None:
        """Take everything out of ``weights``."""
        super().__init__(config, weights, projections)
        if config.logits_scaling != 1:
            head = self.lm_head
            self.lm_head = lambda x: head(x) / config.logits_scaling

    def _layer(self, own: LayerWeights) -> Layer:
        """Turn the matrices of one layer into products."""
        if not own.experts:
            return super()._layer(own)
        linear = self.projections.linear
        fields = vars(own).items()
        made: dict[str, Any] = {name: linear(*each) if isinstance(each, Matrix) else each for name, each in fields}
        made["experts"] = [(linear(*gate_up), linear(*down)) for gate_up, down in own.experts]
        return StackedLayer(**made)

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers and the final norm. ``input_ids`` and ``positions`` [T] -> [T, H]."""
        cfg = self.config
        x = F.embedding(input_ids, self.embedding)  # [T, H]
        if cfg.embedding_multiplier != 1:
            x = x * cfg.embedding_multiplier
        dtype = torch.float32 if cfg.family.norms_after else x.dtype
        tables = plain = self.rotary(positions, dtype)  # [T, D] each
        if cfg.unscaled_layers:
            plain = rotary_table(positions, rotary_frequencies(cfg.head_dim, cfg.rope_theta).to(x.device), dtype)
        for index, layer in enumerate(self.layers):
            cos, sin = plain if index in cfg.unscaled_layers else tables
            x = x + self.attention_block(index, layer, x, cos, sin, attention)
            x = x + self.mlp_block(layer, x)
        return self.norm(x, self.final_norm)

    def attention_block(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """Norm, project, rotate, attend, project back. ``x`` [T, H] -> [T, H] (without residual)."""
        cfg = self.config
        normed = self.norm_before(x, layer.input_norm)
        q = self.heads(layer.q_proj(normed), layer.q_norm)  # [T, Hq, D]
        k = self.heads(layer.k_proj(normed), layer.k_norm)  # [T, Hkv, D]
        v = layer.v_proj(normed).view(k.shape)  # [T, Hkv, D]
        if index not in cfg.unrotated_layers:
            q, k = apply_rotary(q, cos, sin).to(x.dtype), apply_rotary(k, cos, sin).to(x.dtype)
        return self.norm_after(layer.o_proj(attention(index, q, k, v).flatten(-2)), layer.input_norm)

    def mlp_block(self, layer: Layer, x: Tensor) -> Tensor:
        """SwiGLU of the normed rows. ``x`` [T, H] -> [T, H] (without residual)."""
        x = self.norm_before(x, layer.post_attention_norm)
        if not isinstance(layer, StackedLayer):
            x = layer.down_proj(self.projections.silu(layer.gate_proj(x)) * layer.up_proj(x))
        elif layer.router is None:
            x = self.expert(layer.experts[0], x)
        else:
            x = self.experts(layer.experts, layer.router(x), x)
        return self.norm_after(x, layer.post_attention_norm)

    def expert(self, products: tuple[Linear, Linear], x: Tensor) -> Tensor:
        """SwiGLU with one product for gate and up. ``x`` [rows, H] -> [rows, H]."""
        gate_up, down = products
        gate, up = gate_up(x).chunk(2, dim=-1)  # [rows, F] each
        return down(self.projections.silu(gate) * up)

    def experts(self, experts: Sequence[tuple[Linear, Linear]], logits: Tensor, x: Tensor) -> Tensor:
        """Send each row through the experts that the router prefers, and add up their shares.

        ``logits`` [T, E] of the router, ``x`` [T, H] -> [T, H]. Expert after expert multiplies its rows. A row's sum
        begins with its lowest expert, and is rounded after each.
        """
        cfg = self.config
        shares, chosen = logits.float().softmax(-1).topk(cfg.num_experts_per_tok)  # [T, K] each
        if cfg.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        if cfg.family.rounds_shares:
            shares = shares.to(x.dtype)
        chosen, shares = chosen.T.flatten(), shares.T.flatten()  # [K T] each, the first choice of all rows before all
        order = chosen.argsort(stable=True)  # by expert
        rows = order % len(x)
        each = enumerate(rows.split(chosen.bincount(minlength=len(experts)).tolist()))
        updates = torch.cat([self.expert(experts[expert], x[own]) for expert, own in each if len(own)])  # [K T, H]
        updates = (updates * shares[order, None]).to(x.dtype)
        first, *others = rows.argsort(stable=True).view(len(x), -1).T  # [T] each: where a row's updates are
        out = updates[first]
        for other in others:
            out += updates[other]
        return out

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Cut rows into heads, normed if there is a ``weight``: [D] for each, or one for the whole row of all heads.

        ``x`` [T, heads * D] -> [T, heads, D].
        """
        if weight.numel():
            x = self.norm(x.view(len(x), -1, len(weight)), weight)
        return x.view(len(x), -1, self.config.head_dim)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``rms_norm``, same shape. A family that rounds late applies the weight in float32, before the cast."""
        own = x.float() if self.config.family.norms_after else x
        return rms_norm(own, weight, self.config.rms_norm_eps).to(x.dtype)

    def norm_before(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm what goes into a block, unless the family norms what comes out of it. [T, H] -> [T, H]."""
        return x if self.config.family.norms_after else self.norm(x, weight)

    def norm_after(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm what comes out of a block, or multiply it, if the family does. [T, H] -> [T, H]."""
        if self.config.residual_multiplier != 1:
            return x * self.config.residual_multiplier
        return self.norm(x, weight) if self.config.family.norms_after else x


def sdpa_with(scale: float) -> AttentionKernel:
    """Return ``sdpa_attention`` whose scores are multiplied by ``scale`` instead of 1 / sqrt(D)."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_len, kv_len = q.shape[1], k.shape[1]
        mask = causal_mask(q_len, kv_len, q.device) if 1 < q_len < kv_len else None
        is_causal, is_grouped = q_len > 1 and mask is None, q.shape[0] != k.shape[0]
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
        )[0]

    return kernel
