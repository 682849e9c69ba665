"""The embedded model on one of several ranks: it keeps its parts of every layer and of the head, and tells a story.

Every layer has four exchanges, all of them gathers: the heads' outputs, o, gate times up, down. The head has one.
The table of embeddings is whole on every rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import sdpa_attention
from mini_engine.checkpoint import TINY_MODEL, load_config, load_weights
from mini_engine.config import EngineConfig
from mini_engine.families import EMBEDDING, FINAL_NORM
from mini_engine.model import apply_rotary, rms_norm, rotary_frequencies, rotary_table
from mini_engine.processes.group import Group
from mini_engine.processes.halves import keep_gate_up, keep_qkv, row_part
from mini_engine.processes.together import check_same, gather, ids_of_first, in_step


@dataclass(frozen=True)
class LayerPart:
    """What a rank keeps of a layer. Norms are whole."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(h + 2 g) * D, H], the rank's heads
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]
    o: Tensor  # [H / size, Hq * D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 F / size, H]
    down: Tensor  # [H / size, F]


class OneRank:
    """One rank's part of the model, and its part of every step."""

    def __init__(self, group: Group, folder: Path = TINY_MODEL) -> None:
        """Read the checkpoint layer by layer, and keep what this rank needs."""
        self.group = group
        self.config = load_config(folder)
        self.weights = load_weights(folder, self.config, EngineConfig())
        self.table = self.weights.pop(EMBEDDING)  # [V, H]
        self.head = row_part(self.table, group.rank, group.size)  # [V / size, H]
        self.layers = [self.part_of(f"model.layers.{layer}.") for layer in range(self.config.num_hidden_layers)]
        self.final_norm = self.weights.pop(FINAL_NORM)

    def part_of(self, layer: str) -> LayerPart:
        """Cut one layer, whose names begin with ``layer``."""
        cfg, rank, size = self.config, self.group.rank, self.group.size

        def take(name: str) -> Tensor:
            """Read a tensor of the layer."""
            return self.weights.pop(f"{layer}{name}.weight")

        qkv = torch.cat([take(f"self_attn.{kind}_proj") for kind in "qkv"])
        gate_up = torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")])
        return LayerPart(
            input_norm=take("input_layernorm"),
            qkv=keep_qkv(qkv, rank, size, cfg.num_attention_heads, cfg.num_key_value_heads),
            q_norm=take("self_attn.q_norm"),
            k_norm=take("self_attn.k_norm"),
            o=row_part(take("self_attn.o_proj"), rank, size),
            post_norm=take("post_attention_layernorm"),
            gate_up=keep_gate_up(gate_up, rank, size),
            down=row_part(take("mlp.down_proj"), rank, size),
        )

    def num_bytes(self) -> int:
        """Return the bytes of all weights that this rank keeps."""
        own = [self.table, self.final_norm, *(part for layer in self.layers for part in vars(layer).values())]
        own += [self.head] if self.group.size > 1 else []  # with one rank it is the table
        return sum(each.numel() * each.element_size() for each in own)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Compute a text -> the logits [V] behind its last token, on every rank."""
        cfg, x = self.config, F.embedding(torch.tensor(ids), self.table)  # [T, H]
        cos, sin = rotary_table(torch.arange(len(ids)), rotary_frequencies(cfg.head_dim, cfg.rope_theta), x.dtype)
        for layer in self.layers:
            heads = self.heads(layer, rms_norm(x, layer.input_norm, cfg.rms_norm_eps), cos, sin)
            x = x + self.product(gather(self.group, heads), layer.o)
            gate, up = F.linear(rms_norm(x, layer.post_norm, cfg.rms_norm_eps), layer.gate_up).chunk(2, dim=-1)
            x = x + self.product(gather(self.group, F.silu(gate) * up), layer.down)
        return self.product(rms_norm(x[-1:], self.final_norm, cfg.rms_norm_eps), self.head)[0]

    def product(self, x: Tensor, part: Tensor) -> Tensor:
        """Multiply ``x`` [T, K], which all ranks have, by this rank's rows [N / size, K] -> [T, N], on every rank."""
        return gather(self.group, F.linear(x, part))

    def heads(self, layer: LayerPart, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Let this rank's heads attend: ``x`` [T, H] -> [T, h * D]."""
        cfg = self.config
        own = cfg.num_attention_heads // self.group.size
        rows = F.linear(x, layer.qkv).unflatten(-1, (-1, cfg.head_dim))
        q, k, v = rows.split([own, *[(rows.shape[1] - own) // 2] * 2], dim=1)
        q = apply_rotary(rms_norm(q, layer.q_norm, cfg.rms_norm_eps), cos, sin)
        k = apply_rotary(rms_norm(k, layer.k_norm, cfg.rms_norm_eps), cos, sin)
        out = sdpa_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
        return out.transpose(0, 1).flatten(1)

    def story(self, prompt: Sequence[int] | None, count: int) -> Iterator[int]:
        """Yield ``count`` tokens on every rank. Rank 0 alone has the prompt, and chooses; the others are told."""
        ids = ids_of_first(self.group, prompt)
        for _ in range(count):
            chosen = int(self.logits(ids).argmax())
            ids += ids_of_first(self.group, [chosen] if self.group.rank == 0 else None)
            check_same(self.group, ids)
            yield ids[-1]


def tell(group: Group, prompt: Sequence[int], count: int, folder: Path = TINY_MODEL) -> tuple[list[int], int]:
    """Tell a story on this rank; return its tokens, and the bytes of weights that the rank keeps."""

    def work() -> tuple[list[int], int]:
        """Build the rank's model, and let all ranks begin together."""
        model = OneRank(group, folder)
        return list(model.story(prompt if group.rank == 0 else None, count)), model.num_bytes()

    return in_step(group, work)
