"""L1: the Qwen3 forward pass, from token ids to logits.

The model does not know batches, caches or pages. Everything that depends on how sequences are laid out comes in through
two objects: the ``attention`` of a call and the ``projections`` of the constructor (``linear.py``).

Shapes: ``T`` tokens in the step, ``R`` rows whose logits are wanted, ``H`` hidden size, ``Hq``/``Hkv`` query and
key-value heads, ``D`` head dim, ``F`` intermediate size, ``V`` vocabulary.

The order of operations is that of ``transformers.Qwen3ForCausalLM``. Where a comment says "before" or "after", the
other order is as good in exact arithmetic and gives other bits in floating point.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import ModelConfig
from mini_engine.families import EMBEDDING, FINAL_NORM, HEAD
from mini_engine.linear import Linear, Projections, TorchProjections
from mini_engine.rope import scaled_frequencies
from mini_engine.weights import LayerWeights, Weights, take_layer


class Attention(Protocol):
    """The attention seam: the only part of a forward pass that looks at more than one token."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D], rotated and normed -> [T, Hq, D], same dtype."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to root mean square 1, then by ``weight``. ``x`` [..., H], ``weight`` [H] -> [..., H].

    The mean is taken in float32; the result is cast back *before* the weight is applied, as transformers does
    (``F.rms_norm`` applies it first and so differs in bfloat16). ``eps`` stands inside the square root.
    """
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
    return weight * (wide * inverse_rms).to(x.dtype)


def rotary_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return the angle per position of each pair of dimensions, ``1 / theta ** (2i / D)`` -> [D / 2], float32.

    Source: RoFormer (Su et al., 2021), section 3.2.2.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D / 2], from 0 up to 1
    return 1.0 / (theta**exponents)


def rotary_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles. ``positions`` [T], ``frequencies`` [D/2] -> two [T, D].

    Angles are float32 products; only the cosine and sine are cast to ``dtype``. Both halves of D hold the same angles,
    because ``rotate_half`` pairs dimension i with i + D/2.
    """
    angles = positions[:, None].float() * frequencies  # [T, D/2]
    angles = torch.cat((angles, angles), dim=-1)  # [T, D]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Map the pair (x[i], x[i + D/2]) to (-x[i + D/2], x[i]): a quarter turn of every pair. [..., D] -> [..., D]."""
    first, second = x.chunk(2, dim=-1)  # each [..., D/2]
    return torch.cat((-second, first), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every pair of ``x`` [T, heads, D] by its position's angle; ``cos``, ``sin`` [T, D] -> [T, heads, D]."""
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer: norms as vectors, projections as functions of rows."""

    input_norm: Tensor  # [H]
    q_proj: Linear  # [T, H] -> [T, Hq * D]
    k_proj: Linear  # [T, H] -> [T, Hkv * D]
    v_proj: Linear  # [T, H] -> [T, Hkv * D]
    q_norm: Tensor  # [D], one for all query heads
    k_norm: Tensor  # [D]
    o_proj: Linear  # [T, Hq * D] -> [T, H]
    post_attention_norm: Tensor  # [H]
    gate_proj: Linear  # [T, H] -> [T, F]
    up_proj: Linear  # [T, H] -> [T, F]
    down_proj: Linear  # [T, F] -> [T, H]


class Qwen3:
    """A dense Qwen3 decoder. Holds weights and nothing else: the same call twice gives the same bits."""

    def __init__(self, config: ModelConfig, weights: Weights, projections: Projections | None = None) -> None:
        """Take everything out of ``weights``, which are named as in a checkpoint (``config.weight_shapes()``)."""
        self.config = config
        self.projections = projections or TorchProjections()
        self.embedding = weights.pop(EMBEDDING)  # [V, H]
        self.take_layers(weights)
        self.final_norm = weights.pop(FINAL_NORM)  # [H]
        head = self.embedding if config.tie_word_embeddings else weights.pop(HEAD)
        self.lm_head = self.projections.linear(head)  # [R, H] -> [R, V]
        self.frequencies, self.rotary_factor = self._frequencies()

    def take_layers(self, weights: Weights) -> None:
        """Make ``layers`` of ``weights``: each before the next one is taken, so that a stored copy can be let go."""
        count = self.config.num_hidden_layers
        self.layers = [self._layer(take_layer(weights, self.config, layer)) for layer in range(count)]

    def _layer(self, own: LayerWeights) -> Layer:
        """Turn the matrices of one layer into products."""
        linear = self.projections.linear
        return Layer(
            input_norm=own.input_norm,
            q_proj=linear(*own.q_proj),
            k_proj=linear(*own.k_proj),
            v_proj=linear(*own.v_proj),
            q_norm=own.q_norm,
            k_norm=own.k_norm,
            o_proj=linear(*own.o_proj),
            post_attention_norm=own.post_attention_norm,
            gate_proj=linear(*own.gate_proj),
            up_proj=linear(*own.up_proj),
            down_proj=linear(*own.down_proj),
        )

    def _frequencies(self) -> tuple[Tensor, float]:
        """Return the rotary frequencies [D / 2] of the checkpoint, and the factor of every cosine and sine."""
        cfg = self.config
        if cfg.rope_scaling is None:
            return rotary_frequencies(cfg.head_dim, cfg.rope_theta).to(self.embedding.device), 1.0
        frequencies, factor = scaled_frequencies(cfg)
        return frequencies.to(self.embedding.device), factor

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``rotary_table`` of the checkpoint's frequencies. ``positions`` [T] -> cosine and sine, two [T, D].

        With YaRN both are multiplied by a factor before they are cast to ``dtype``.
        """
        if self.rotary_factor == 1.0:
            return rotary_table(positions, self.frequencies, dtype)
        cos, sin = rotary_table(positions, self.frequencies, torch.float32)
        return (cos * self.rotary_factor).to(dtype), (sin * self.rotary_factor).to(dtype)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor | None = None
    ) -> Tensor:
        """Run the step. ``input_ids`` and ``positions`` [T] int64 -> logits [T, V] in the weights' dtype.

        ``logit_rows`` [R] names the tokens whose logits are wanted -> [R, V]. Rows are taken *before* the head: in a
        prefill of 500 tokens only the last row is sampled from, and the head is the largest matrix of the model.
        """
        x = self.hidden_states(input_ids, positions, attention)  # [T, H]
        if logit_rows is not None:
            x = x[logit_rows]  # [R, H]
        return self.lm_head(x)

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers and the final norm. ``input_ids`` and ``positions`` [T] -> [T, H].

        Cosines and sines come from ``self.rotary``.
        """
        x = F.embedding(input_ids, self.embedding)  # [T, H]
        cos, sin = self.rotary(positions, x.dtype)  # [T, D] each, the same for every layer
        for index, layer in enumerate(self.layers):
            x = x + self.attention_block(index, layer, x, cos, sin, attention)
            x = x + self.mlp_block(layer, x)
        return rms_norm(x, self.final_norm, self.config.rms_norm_eps)

    def attention_block(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """Norm, project, norm each head, rotate, attend, project back. ``x`` [T, H] -> [T, H] (without residual)."""
        cfg = self.config
        x = rms_norm(x, layer.input_norm, cfg.rms_norm_eps)
        q = layer.q_proj(x).view(-1, cfg.num_attention_heads, cfg.head_dim)  # [T, Hq, D]
        k = layer.k_proj(x).view(-1, cfg.num_key_value_heads, cfg.head_dim)  # [T, Hkv, D]
        v = layer.v_proj(x).view(-1, cfg.num_key_value_heads, cfg.head_dim)  # [T, Hkv, D]
        q = apply_rotary(rms_norm(q, layer.q_norm, cfg.rms_norm_eps), cos, sin)
        k = apply_rotary(rms_norm(k, layer.k_norm, cfg.rms_norm_eps), cos, sin)
        out = attention(index, q, k, v)  # [T, Hq, D]
        return layer.o_proj(out.flatten(-2))

    def mlp_block(self, layer: Layer, x: Tensor) -> Tensor:
        """SwiGLU (Shazeer, 2020): ``down(silu(gate(x)) * up(x))`` of the normed rows. ``x`` [T, H] -> [T, H]."""
        x = rms_norm(x, layer.post_attention_norm, self.config.rms_norm_eps)
        return layer.down_proj(self.projections.silu(layer.gate_proj(x)) * layer.up_proj(x))
