"""Record what a forward pass computes, without changing it, and compare two such records."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine import model as model_module
from mini_engine.attention import dense
from mini_engine.fast.fused import FusedQwen3
from mini_engine.linear import Linear, Projections, TorchProjections
from mini_engine.model import Attention, Layer, Qwen3


@dataclass(frozen=True)
class ForwardTrace:
    """What one forward pass of T tokens through L layers computed.

    ``residual``: 2 L + 1 tensors [T, H], the stream after the embedding and after every block. ``updates``: 2 L tensors
    [T, H], what every block added. ``weights``: L tensors [Hq, T, T], the attention weights, query by key. ``logits``
    [T, V].
    """

    residual: list[Tensor]
    updates: list[Tensor]
    weights: list[Tensor]
    logits: Tensor

    @property
    def stages(self) -> list[str]:
        """Name the places of ``residual``."""
        return ["embedding"] + [f"{block} {i}" for i in range(len(self.updates) // 2) for block in ("attn", "mlp")]


class RecordingModel(Qwen3):
    """A model that shares the weights of another and records the input and the output of every block."""

    def __new__(cls, model: Qwen3) -> Self:
        """Make one of the kind of ``model``."""
        kind = type(cls.__name__, (cls, type(model)), {})
        return object.__new__(kind)

    def __init__(self, model: Qwen3) -> None:
        """Share everything that ``model`` holds, and compute as it does."""
        self.__dict__.update(model.__dict__)
        self.inputs: list[Tensor] = []
        self.updates: list[Tensor] = []

    def attention_block(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """Run the attention block of the model and record its input and output."""
        return self.keep(x, super().attention_block(index, layer, x, cos, sin, attention))

    def mlp_block(self, layer: Layer, x: Tensor) -> Tensor:
        """Run the MLP block of the model and record its input and output."""
        return self.keep(x, super().mlp_block(layer, x))

    def keep(self, x: Tensor, update: Tensor) -> Tensor:
        """Append to the two lists and return ``update``. Mutates."""
        self.inputs.append(x)
        self.updates.append(update)
        return update


class RecordingAttention:
    """An attention that records the weights of every layer and lets ``inner`` compute the output."""

    def __init__(self, inner: Attention) -> None:
        """Pass every call on to ``inner``."""
        self.inner = inner
        self.weights: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend like ``inner``. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]."""
        self.weights.append(attention_weights(q, k))
        return self.inner(layer, q, k, v)


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the softmax weights of one sequence. ``q`` [T, Hq, D], ``k`` [T, Hkv, D] -> [Hq, T, T].

    The engine's own kernel computes them: with the identity matrix as values, the weighted sum *is* the weights.
    """
    tokens, num_kv_heads, _ = k.shape
    identity = torch.eye(tokens, dtype=q.dtype).expand(num_kv_heads, tokens, tokens)
    return dense.eager_attention(q.transpose(0, 1), k.transpose(0, 1), identity)


@torch.inference_mode()
def trace_forward(model: Qwen3, token_ids: Sequence[int], attention: Attention | None = None) -> ForwardTrace:
    """Run ``token_ids`` as one sequence and return everything that was computed; default attention: eager.

    Raises ``ValueError`` for a fused model, whose blocks are not the ones that are recorded, and for one that
    multiplies scores by a number of its own.
    """
    if model.config.attention_multiplier is not None:
        raise ValueError(
            f"the model multiplies scores by {model.config.attention_multiplier}, and a record knows 1 / sqrt(head_dim)"
            " alone; record another model"
        )
    if isinstance(model, FusedQwen3):
        raise ValueError(
            "a model with packed weights is fused and has no separate blocks; load it with compute='reference'"
        )
    recorder = RecordingAttention(attention or dense.DenseAttention())
    recording = RecordingModel(model)
    logits = recording(torch.tensor(token_ids), torch.arange(len(token_ids)), recorder)
    last = recording.inputs[-1] + recording.updates[-1]
    return ForwardTrace([*recording.inputs, last], recording.updates, recorder.weights, logits)


class RowByRow:
    """Projections that multiply every row alone, as if each token were the only one of its batch."""

    def __init__(self, inner: Projections | None = None) -> None:
        """Call ``inner`` with one row at a time; default: ``F.linear``."""
        self.inner = inner or TorchProjections()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the product with ``weight`` as T products of one row each."""
        multiply = self.inner.linear(weight, bias)
        return lambda x: torch.cat([multiply(row) for row in x.split(1)])

    def silu(self, x: Tensor) -> Tensor:
        """Return SiLU of every row alone."""
        return torch.cat([self.inner.silu(row) for row in x.split(1)])


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call the fused operator of torch: the formula of ``model.rms_norm``, rounded at other places."""
    return F.rms_norm(x, weight.shape, weight, eps)


@contextmanager
def fused_norms() -> Iterator[None]:
    """Let every model normalise with ``F.rms_norm`` inside this context."""
    with mock.patch.object(model_module, "rms_norm", fused_rms_norm):
        yield


def strongest_head(trace: ForwardTrace, query: int, keys: Sequence[int]) -> tuple[int, int]:
    """Return (layer, head) of the head that puts most weight from token ``query`` on the tokens ``keys``."""
    weights = torch.stack(trace.weights)[:, :, query, list(keys)].sum(-1)  # [L, Hq]
    return divmod(int(weights.argmax()), weights.shape[1])


@dataclass(frozen=True)
class ErrorCurve:
    """The relative difference of two residual streams at every stage: rms(a - b) / rms(a) over all tokens."""

    name: str
    errors: list[float]


def error_curve(name: str, first: ForwardTrace, second: ForwardTrace) -> ErrorCurve:
    """Compare two residual streams stage by stage."""
    pairs = zip(first.residual, second.residual, strict=True)
    return ErrorCurve(name, [relative_error(a, b) for a, b in pairs])


def relative_error(first: Tensor, second: Tensor) -> float:
    """Return rms(first - second) / rms(first), in float64."""
    a, b = first.double(), second.double()
    return float((a - b).pow(2).mean().sqrt() / a.pow(2).mean().sqrt())


def root_mean_square(x: Tensor) -> Tensor:
    """Return the size of each row's entries, [T, H] -> [T]."""
    return x.float().pow(2).mean(dim=-1).sqrt()
