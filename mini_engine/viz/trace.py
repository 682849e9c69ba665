"""Look inside a forward pass without changing it.

Owns: recorders that stand at the model's seams and blocks and pass on what they are given. Must not know: pictures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """What one forward pass of T tokens through L layers computed on its way.

    ``residual``: 2 L + 1 tensors [T, H], the stream after the embedding and after every block. ``updates``: 2 L tensors
    [T, H], what every block added. ``stages``: the names of the 2 L + 1 places. ``weights``: L tensors [Hq, T, T], the
    attention weights, query by key. ``logits`` [T, V].
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
    """The same model, sharing its weights, that keeps the input and the output of every block."""

    def __init__(self, model: Qwen3) -> None:
        """Share everything that ``model`` holds."""
        self.__dict__.update(model.__dict__)
        self.inputs: list[Tensor] = []
        self.updates: list[Tensor] = []

    def attention_block(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """Run the model's own attention block and keep what went in and what came out."""
        return self.keep(x, super().attention_block(index, layer, x, cos, sin, attention))

    def mlp_block(self, layer: Layer, x: Tensor) -> Tensor:
        """Run the model's own MLP block and keep what went in and what came out."""
        return self.keep(x, super().mlp_block(layer, x))

    def keep(self, x: Tensor, update: Tensor) -> Tensor:
        """Append to the two lists and return ``update``. Mutates."""
        self.inputs.append(x)
        self.updates.append(update)
        return update


class RecordingAttention:
    """Stands at the attention seam: keeps the weights of every layer, then lets ``inner`` compute the output."""

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

    Raises ``ValueError`` for a fused model, whose blocks are not the ones that are recorded.
    """
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
    """A projection family that multiplies every row alone, as if each token came in a batch of its own."""

    def __init__(self, inner: Projections | None = None) -> None:
        """Call ``inner`` with one row at a time; default: ``F.linear``."""
        self.inner = inner or TorchProjections()

    def linear(self, weight: Tensor) -> Linear:
        """Return the product with ``weight`` as T products of one row each."""
        multiply = self.inner.linear(weight)
        return lambda x: torch.cat([multiply(row) for row in x.split(1)])

    def silu(self, x: Tensor) -> Tensor:
        """Return SiLU of every row alone."""
        return torch.cat([self.inner.silu(row) for row in x.split(1)])


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call torch's fused operator: the same formula as ``model.rms_norm``, rounded at other places."""
    return F.rms_norm(x, weight.shape, weight, eps)


@contextmanager
def fused_norms() -> Iterator[None]:
    """Inside this context every model normalises with ``F.rms_norm``: a what-if, undone at the end."""
    with mock.patch.object(model_module, "rms_norm", fused_rms_norm):
        yield


def strongest_head(trace: ForwardTrace, query: int, keys: Sequence[int]) -> tuple[int, int]:
    """Return (layer, head) of the head that puts most weight from token ``query`` on the tokens ``keys``."""
    weights = torch.stack(trace.weights)[:, :, query, list(keys)].sum(-1)  # [L, Hq]
    return divmod(int(weights.argmax()), weights.shape[1])
