"""What each operation of a step reads, writes and computes, and how programs fill a GPU: arithmetic, without a GPU.

Bytes are those that an operation cannot avoid: inputs read once, outputs written once. An addition, a multiplication, a
division, a reciprocal root and an exponential are one floating-point operation each. Of attention only the two products
count, as in the benchmark.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_engine.config import ModelConfig

QWEN3_0_6B = ModelConfig(
    vocab_size=151_936,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    max_position_embeddings=40_960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)
HALF, FLOAT, WORD, INDEX = 2, 4, 4, 8  # bytes of a bfloat16, a float32, 32 mask bits and a slot's or a token's number
ALLOWED_SHARE = 1 / 512  # of the vocabulary, by the grammar's mask
PROCESSORS = 132  # streaming multiprocessors of an H200
TILE = 64  # keys that a program of split attention loads at once
DECODE_SIZE = re.compile(r"(\d+) x (\d+), GQA \d+")  # how the benchmark writes the size of a decode step


@dataclass(frozen=True)
class Roof:
    """The limits of a device: bytes per second of its memory, floating-point operations per second of a product."""

    name: str
    bytes_per_s: float
    flops_per_s: float

    @property
    def ridge(self) -> float:
        """Operations per byte at which memory and arithmetic take equally long."""
        return self.flops_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """Return the most operations per second at ``intensity`` operations per byte (Williams et al., 2009)."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)


H200 = Roof("H200 (data sheet)", 4.8e12, 989e12)  # NVIDIA's data sheet; bfloat16 without sparsity


@dataclass(frozen=True)
class Operation:
    """One operation of a step, which runs ``count`` times in it; operations and bytes are those of one run."""

    name: str
    num_flops: int
    num_bytes: int
    count: int

    @property
    def intensity(self) -> float:
        """Operations per byte; 0 for one that only copies."""
        return self.num_flops / self.num_bytes

    def least_seconds(self, roof: Roof) -> float:
        """Return the least seconds that all its runs take on a device."""
        return self.count * max(self.num_bytes / roof.bytes_per_s, self.num_flops / roof.flops_per_s)


def step_operations(config: ModelConfig, sequences: Sequence[tuple[int, int]]) -> list[Operation]:
    """Return the operations of one step in bfloat16, in the order of the forward pass.

    ``sequences``: new tokens and keys of each, the keys of the new tokens included. Each has one row of logits. The
    embedding and the norm before the first layer are left out: they come once and are small.
    """
    rows = sum(new for new, _ in sequences)
    layers = config.num_hidden_layers
    hidden = config.hidden_size
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    inner = config.intermediate_size
    return [
        Operation("add_rms_norm", *add_norm_work(rows, hidden), 2 * layers),
        Operation("q, k, v projection", *product_work(rows, hidden, (heads + 2 * kv_heads) * dim), layers),
        Operation("rms_norm of q and k", *head_norm_work(rows, heads + kv_heads, dim), layers),
        Operation("apply_rotary", *rotary_work(rows, heads + kv_heads, dim), layers),
        Operation("store_kv", 0, 4 * rows * kv_heads * dim * HALF + rows * INDEX, layers),
        Operation("attention", *attention_work(sequences, heads, kv_heads, dim), layers),
        Operation("output projection", *product_work(rows, heads * dim, hidden), layers),
        Operation("gate, up projection", *product_work(rows, hidden, 2 * inner), layers),
        Operation("silu_and_mul", 5 * rows * inner, 3 * rows * inner * HALF, layers),
        Operation("down projection", *product_work(rows, inner, hidden), layers),
        Operation("language model head", *product_work(len(sequences), hidden, config.vocab_size), 1),
        Operation("apply_token_bitmask", 0, bitmask_bytes(len(sequences), config.vocab_size), 1),
        Operation("sampling", *sampling_work(len(sequences), config.vocab_size), 1),
    ]


def product_work(rows: int, depth: int, columns: int) -> tuple[int, int]:
    """Multiply [rows, depth] by [depth, columns]: a multiplication and an addition for each of their pairs."""
    return 2 * rows * depth * columns, (rows * depth + depth * columns + rows * columns) * HALF


def norm_flops(rows: int, width: int) -> int:
    """Square, add up, divide, add epsilon, root; then scale by the root and by the weight."""
    return rows * (4 * width + 3)


def add_norm_work(rows: int, width: int) -> tuple[int, int]:
    """Add and norm: both summands and the weight read, the sum and its norm written."""
    return norm_flops(rows, width) + rows * width, (4 * rows * width + width) * HALF


def head_norm_work(rows: int, heads: int, dim: int) -> tuple[int, int]:
    """Norm every head of the queries and of the keys; each of the two kinds has a weight."""
    return norm_flops(rows * heads, dim), (2 * rows * heads + 2) * dim * HALF


def rotary_work(rows: int, heads: int, dim: int) -> tuple[int, int]:
    """Turn pairs in place: four products and two sums each; half of the sines and cosines is read."""
    return 3 * rows * heads * dim, (2 * rows * heads * dim + rows * dim) * HALF


def attention_work(sequences: Sequence[tuple[int, int]], heads: int, kv_heads: int, dim: int) -> tuple[int, int]:
    """Multiply queries by the keys that they see, and weights by values; keys and values are read once."""
    pairs = sum(new * length - new * (new - 1) // 2 for new, length in sequences)  # the causal mask hides the others
    rows, keys = (sum(own) for own in zip(*sequences, strict=True))
    return 4 * pairs * heads * dim, (2 * rows * heads + 2 * keys * kv_heads) * dim * HALF


def bitmask_bytes(rows: int, vocab: int) -> int:
    """Read a bit for each token and write each banned logit."""
    return rows * (-(-vocab // 32) * WORD + round(vocab * (1 - ALLOWED_SHARE)) * FLOAT)


def sampling_work(rows: int, vocab: int) -> tuple[int, int]:
    """Read each logit; subtract the maximum, exponentiate, add up. Passes for a cut read the row from the cache."""
    return 3 * rows * vocab, rows * vocab * FLOAT


# ----------------------------------------------------------------------------------------------- programs on processors


@dataclass(frozen=True)
class DecodeLaunch:
    """Attention of one decode step: ``batch`` sequences of ``context`` keys, in splits of ``split_size`` keys."""

    batch: int
    context: int
    split_size: int
    num_heads: int = QWEN3_0_6B.num_attention_heads
    num_kv_heads: int = QWEN3_0_6B.num_key_value_heads
    head_dim: int = QWEN3_0_6B.head_dim

    @property
    def num_splits(self) -> int:
        """Splits of each sequence."""
        return -(-self.context // self.split_size)

    @property
    def num_programs(self) -> int:
        """One for each sequence, key-value head and split."""
        return self.batch * self.num_kv_heads * self.num_splits

    @property
    def num_waves(self) -> int:
        """Most programs of one processor, if they are distributed evenly."""
        return -(-self.num_programs // PROCESSORS)

    @property
    def bytes_per_program(self) -> int:
        """Keys and values of one full split and head."""
        return 2 * min(self.split_size, self.context) * self.head_dim * HALF

    @property
    def num_bytes(self) -> int:
        """Keys and values of all sequences."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * HALF

    @property
    def merge_bytes(self) -> int:
        """Results and log-sum-exps of all splits, written by one kernel and read by the other."""
        return 2 * self.batch * self.num_heads * self.num_splits * (self.head_dim + 1) * FLOAT

    @property
    def bandwidth_share(self) -> float:
        """Useful bytes over those that the memory could have moved in the same time: an upper bound.

        In this model every processor has an equal share of the bandwidth and can use all of it with one program. The
        step lasts as long as the processor with most programs reads. Then the merge runs at full speed. Latencies and
        launches cost nothing.
        """
        moved_meanwhile = self.num_waves * PROCESSORS * self.bytes_per_program + self.merge_bytes
        return self.num_bytes / moved_meanwhile


def split_launches(batch: int, context: int, least: int = 16) -> list[DecodeLaunch]:
    """Return a launch for each number of splits that whole tiles give, from one split up.

    Splits have at least ``least`` keys. Below one tile the sizes are halved, as with a smaller tile.
    """
    sizes = [TILE * n for n in range(-(-context // TILE), 0, -1)]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    found = {launch.num_splits: launch for launch in (DecodeLaunch(batch, context, size) for size in sizes)}
    return [found[count] for count in sorted(found)]  # the smallest size for each count: the most even splits


def measured_shares(report: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """Read the JSON of ``mini-engine bench kernels``: (batch, context) -> share of the measured bandwidth in decoding.

    Raises ``ValueError`` for a report without a GPU, or without decode steps.
    """
    if not report.get("comparable"):
        raise ValueError("the report was made without a GPU; run `mini-engine bench kernels` where there is one")
    sizes = {row["size"]: row["bandwidth_share"] for row in report["rows"] if row["part"] == "decode"}
    found = {DECODE_SIZE.fullmatch(size): share for size, share in sizes.items()}
    shares = {(int(size[1]), int(size[2])): share for size, share in found.items() if size}
    if not shares:
        raise ValueError("the report has no decode steps; run `mini-engine bench kernels --parts decode`")
    return shares
