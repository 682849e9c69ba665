"""What each of several ranks keeps of a model, and what they exchange in a forward pass.

Every matrix is split by its rows, the output features, and attention by heads. So each number of a product is the whole
sum that one rank would compute, in the same order, and an exchange copies numbers and adds none: the bits are those of
one rank. Of a layer four results are gathered, so that each rank has whole rows to multiply:

    heads ── gather ── o_proj ── gather ── + ── gate, up ── gather ── down_proj ── gather ── +

The mode "sum" splits ``o_proj`` and ``down_proj`` by columns. Then a rank computes a part of every sum there, and two
sums over the ranks take the place of the four gathers. They add in another order, so the bits are others.

Shapes: ``n`` ranks, and otherwise those of ``model.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.driver import AttentionFactory
from mini_engine.families import EMBEDDING, HEAD, Part
from mini_engine.fast.products import InvariantProjections
from mini_engine.fast.quantized_products import Rows, make_parts
from mini_engine.linear import Linear, Projections, with_bias
from mini_engine.llama import Llama
from mini_engine.model import Qwen3
from mini_engine.ranks.checks import check_attention, check_silu, linear_of, needs_padding
from mini_engine.weights import Index, Weights

BACK = ("o_proj", "down_proj", "expert_downs")  # the products that need what all ranks have computed
Role = Literal["in", "back", "sum", "tokens"]  # "tokens": the table of embeddings or the head


class Group(Protocol):
    """The ranks of a model, seen from one of them. All of them make the same calls in the same order."""

    rank: int
    size: int

    def stack(self, x: Tensor) -> Tensor:
        """Return the ``x`` of all ranks, which have one shape and dtype -> [n, ...]."""

    def stack_at_first(self, x: Tensor) -> Tensor:
        """Return what ``stack`` returns at rank 0, and elsewhere ``x[None]``."""

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of the ``x`` of all ranks, with the same bits at each."""


def side_by_side(parts: Tensor) -> Tensor:
    """Put the columns of all ranks together. ``parts`` [n, T, C] -> [T, n * C]."""
    return parts.movedim(0, -2).flatten(-2)


class Piece(NamedTuple):
    """What a rank has of a weight: the ``place`` in it, and the number of rows of the ``whole``."""

    place: Index
    whole: int
    role: Role


@dataclass(frozen=True)
class Split:
    """A model that is split among the ranks of ``group``. ``sums``: products of ``BACK`` are split by columns."""

    model: ModelConfig
    group: Group
    sums: bool = False

    @property
    def config(self) -> ModelConfig:
        """The model as a rank sees it, with the heads that are its own. Fewer key-value heads than ranks are shared."""
        heads, kv_heads = self.model.num_attention_heads // self.group.size, self.model.num_key_value_heads
        return replace(self.model, num_attention_heads=heads, num_key_value_heads=max(1, kv_heads // self.group.size))

    @property
    def most_tokens(self) -> int:
        """The rows of the table of embeddings and of the head that a rank has; the last rank may have fewer."""
        return -(-self.model.vocab_size // self.group.size)

    def share(self, count: int) -> Tensor:
        """Return this rank's of ``count`` rows, columns or heads."""
        return torch.arange(count).view(self.group.size, -1)[self.group.rank]

    def pieces(self) -> Mapping[str, Piece]:
        """Return what this rank has of each weight that is split, by its name."""
        cfg = self.model
        tokens = torch.arange(cfg.vocab_size).split(self.most_tokens)[self.group.rank]
        found = dict.fromkeys((EMBEDDING, HEAD), Piece((tokens,), cfg.vocab_size, "tokens"))
        for field, part in cfg.family.parts.items():
            if len(part.shape) > 1 and field != "router":
                each = [names for layer in range(cfg.num_hidden_layers) for names in cfg.names(part, layer)]
                found |= {name: self.piece(field, part, kind) for names in each for kind, name in names.items()}
        return found

    def piece(self, field: str, part: Part, kind: str) -> Piece:
        """Return what this rank has of a part of a layer, of its "weight" or its "bias"."""
        whole, columns = (getattr(self.model, size) for size in part.shape)
        if field in BACK and self.sums:
            return Piece(() if kind == "bias" else (slice(None), self.share(columns)), whole, "sum")
        if field == "gate_up_proj":  # two matrices in one
            rows = torch.cat((self.share(whole // 2), self.share(whole // 2) + whole // 2))
        elif part.shape[0] == "kv_size":
            first = self.group.rank * self.model.num_key_value_heads // self.group.size * self.model.head_dim
            rows = torch.arange(first, first + self.config.kv_size)
        else:
            rows = self.share(whole)
        return Piece((rows,), whole, "back" if field in BACK else "in")


def divided(model: ModelConfig) -> list[str]:
    """Return the fields of a model's configuration that the number of ranks must divide."""
    sizes = {size for part in model.family.parts.values() for size in part.shape if "intermediate" in size}
    return ["num_attention_heads", "hidden_size", *sorted(sizes)]


def divides(size: int, model: ModelConfig) -> bool:
    """Whether a model can be split among ``size`` ranks."""
    kv_heads = model.num_key_value_heads
    divides_all = not any(getattr(model, name) % size for name in divided(model))
    return divides_all and 0 in (kv_heads % size, size % kv_heads) and size * size <= model.vocab_size


def check_size(size: int, model: ModelConfig) -> None:
    """Raise ``ValueError`` for a model that cannot be split among ``size`` ranks."""
    if not divides(size, model):
        fitting = ", ".join(str(n) for n in range(1, model.num_attention_heads + 1) if divides(n, model))
        sizes = ", ".join(f"{name} {getattr(model, name)}" for name in ("num_key_value_heads", *divided(model)))
        raise ValueError(
            f"tensor_parallel is {size}, which does not divide this model ({sizes}); choose one of {fitting}"
        )


@dataclass(frozen=True)
class Shard:
    """The rows of a matrix that one rank has. ``F.embedding`` and ``torch.cat`` take it for a tensor.

    ``weight`` [own, in], a tensor or quantized. ``rows`` [own]: their places in the matrix, which has ``whole`` rows.
    """

    weight: Any
    rows: Any
    whole: int
    role: Role
    split: Split

    @property
    def shape(self) -> tuple[int, int]:
        """Those of its own rows."""
        return self.weight.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """What it is multiplied by."""
        return self.weight.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.weight.device  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Stack shards that multiply the same rows, or look up rows of the table; torch asks here."""
        if function is torch.cat:
            (shards,) = args
            stacked = torch.cat([shard.weight for shard in shards])
            first = accumulate((shard.whole for shard in shards), initial=0)
            rows = torch.cat([shard.rows + at for shard, at in zip(shards, first, strict=False)])
            return replace(shards[0], weight=stacked, rows=rows, whole=sum(shard.whole for shard in shards))
        if function is F.embedding:
            token_ids, table = args
            return table.look_up(token_ids)
        return NotImplemented

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Return the rows of a table for ``token_ids`` [T], each from the rank that has it -> [T, H]."""
        most, group = self.split.most_tokens, self.split.group
        own = (token_ids - group.rank * most).clamp(0, self.shape[0] - 1)
        rows = group.stack(F.embedding(own, self.weight))  # [n, T, H]
        return rows[token_ids // most, torch.arange(len(token_ids))]


class Shards:
    """The weights of a rank. Those that are split are given away as ``Shard``. ``num_bytes``: of what was given away.

    ``weights`` gives tensors, perhaps quantized ones, and of those that are split only what ``split`` leaves to it.
    """

    def __init__(self, weights: Weights, split: Split) -> None:
        """Empty ``weights``."""
        self.weights = weights
        self.split = split
        self.pieces = split.pieces()
        self.num_bytes = 0

    def pop(self, name: str, /) -> Any:
        """Give the weight ``name`` away. Raises ``KeyError`` if it is not there, or no longer."""
        weight, piece = self.weights.pop(name), self.pieces.get(name)
        self.num_bytes += sum(
            tensor.nbytes for tensor in (weight.tensors().values() if isinstance(weight, Rows) else [weight])
        )
        if piece is None or len(weight.shape) == 1:
            return weight
        return Shard(weight, piece.place[0], piece.whole, piece.role, self.split)


class SplitProjections:
    """Products with shards: those of ``own``, between exchanges with the other ranks.

    ``choices`` and ``quantize``: see ``QuantizedProjections``. ``num_bytes``: of all weights that the model has taken.
    """

    num_bytes = 0

    def __init__(self, own: Projections, split: Split) -> None:
        """Multiply with ``own``."""
        self.own = own
        self.split = split
        self.silu = own.silu
        self.choices: Mapping[str, str] = getattr(own, "choices", {})
        self.quantize: str = getattr(own, "quantize", "off")

    def linear(self, weight: Any, bias: Tensor | None = None) -> Linear:
        """Return the product with ``weight``, a ``Shard`` or a matrix that every rank has, plus ``bias``.

        Raises ``ValueError`` if a product with some of the rows has other bits on this machine.
        """
        if not isinstance(weight, Shard):
            return self.own.linear(weight, bias)
        group, cfg = self.split.group, self.split.model
        if weight.role == "sum":
            part = self.own.linear(weight.weight)
            return with_bias(lambda x: group.add(part(x)), bias)
        product = self.product(weight, bias)
        if weight.role == "back":
            return lambda x: side_by_side(group.stack(product(side_by_side(group.stack(x)))))
        if weight.role == "tokens":
            missing = self.split.most_tokens - weight.shape[0]
            return lambda x: side_by_side(group.stack_at_first(F.pad(product(x), (0, missing))))[:, : cfg.vocab_size]
        return product

    def check_heads(self, make: Callable[[ModelConfig], AttentionFactory], dtype: str) -> None:
        """Raise ``ValueError`` if a rank's heads have other bits than among all. ``make``: see ``check_attention``."""
        if not self.split.sums:
            check_attention(make, self.split.model, self.split.config, getattr(torch, dtype))

    def product(self, shard: Shard, bias: Tensor | None) -> Linear:
        """Return the product with the rows of ``shard``, which has the bits of one with the whole matrix."""
        fixed = self.split.sums or isinstance(self.own, InvariantProjections)
        if fixed or not needs_padding(self.own, shard.weight, shard.whole, self.split.group.size):
            return linear_of(self.own, shard.weight, shard.whole, bias)
        rows = shard.rows
        in_place = torch.zeros(shard.whole, shard.shape[1], dtype=shard.dtype).index_copy_(0, rows, shard.weight)
        if bias is not None:
            bias = torch.zeros(shard.whole, dtype=shard.dtype).index_copy_(0, rows, bias)
        padded = linear_of(self.own, in_place, shard.whole, bias)
        return lambda x: padded(x).index_select(1, rows)


class SplitLlama(Llama):
    """``Llama`` of one rank, also of a family that norms all heads at once."""

    projections: SplitProjections

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Cut rows into heads, normed with a ``weight``. For one over all heads, those of the other ranks are fetched.

        ``x`` [T, heads * D] -> [T, heads, D].
        """
        size = self.config.head_dim
        if weight.numel() <= size:
            return super().heads(x, weight)
        split, own = self.projections.split, x.shape[1] // size
        every = side_by_side(split.group.stack(x)).view(len(x), -1, size)
        copies = every.shape[1] * size // len(weight)  # of each head, where ranks share it
        normed = super().heads(every[:, ::copies].flatten(1), weight)
        first = split.group.rank * own // copies
        return normed[:, first : first + own]


def build_split(kind: type[Qwen3], weights: Shards, engine: EngineConfig) -> Qwen3:
    """Build one rank's part of a model of this ``kind``. Empties ``weights``.

    Raises ``ValueError`` where its bits would be others.
    """
    split = weights.split
    if not (split.sums or engine.batch_invariant):
        for size in divided(split.model)[2:]:
            check_silu(getattr(split.model, size), split.group.size, getattr(torch, engine.dtype))
    weights.weights, own = make_parts(weights.weights, engine)
    projections = SplitProjections(own, split)
    model = (SplitLlama if kind is Llama else kind)(split.config, weights, projections)
    projections.num_bytes = weights.num_bytes
    return model
