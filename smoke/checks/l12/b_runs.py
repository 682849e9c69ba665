"""The check of whole models by ranks (L12.B): transformers' logits, whatever the number of ranks.

Owns: L1's model with the blocks of ranks in the place of its own.
"""

from typing import Any

import torch
from torch import Tensor

from smoke.framework import peer
from smoke.framework.cases import ModelCase, embedded_case, random_case, random_ids
from smoke.framework.check import Registry, Values
from smoke.framework.compare import close

REGISTRY = Registry()
NUM_TOKENS = 40
FEW = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "hidden_size": 64}


def cases(seed: int) -> list[tuple[ModelCase, tuple[int, ...]]]:
    """Return models, and the numbers of ranks that compute each."""
    shared = random_case("MHA 4:4, tied, theta 1e6", seed)
    few = tuple((shared.hf_config | FEW).items())
    return [
        (embedded_case(), (1, 2)),
        (shared, (2, 4)),
        (ModelCase("GQA 8:2, more ranks than key-value heads", few, seed), (4, 8)),
    ]


def by_ranks(case: ModelCase, size: int) -> Any:
    """Build L1's model, and let ``size`` ranks compute its blocks and its head."""
    from mini_engine.config import ModelConfig
    from mini_engine.model import Qwen3, apply_rotary, rms_norm
    from mini_engine.processes.halves import attention_of_ranks, gathered, mlp_of_ranks, row_part

    weights = case.weights("float32")

    class ByRanks(Qwen3):
        """L1's model in parts."""

        def attention_block(
            self, index: int, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, attention: Any
        ) -> Tensor:
            """Give each rank its heads."""
            cfg = self.config

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k = rms_norm(q, layer.q_norm, cfg.rms_norm_eps), rms_norm(k, layer.k_norm, cfg.rms_norm_eps)
                out: Tensor = attention(index, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
                return out

            q, k, v, o = (weights[f"model.layers.{index}.self_attn.{kind}_proj.weight"] for kind in "qkvo")
            rows = rms_norm(x, layer.input_norm, cfg.rms_norm_eps)
            heads = cfg.num_attention_heads, cfg.num_key_value_heads
            return attention_of_ranks(rows, torch.cat([q, k, v]), o, size, *heads, attend)

        def mlp_block(self, layer: Any, x: Tensor) -> Tensor:
            """Give each rank its features."""
            index = next(place for place, own in enumerate(self.layers) if own is layer)
            names = [f"model.layers.{index}.mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")]
            gate, up, down = (weights[name] for name in names)
            rows = rms_norm(x, layer.post_attention_norm, self.config.rms_norm_eps)
            return mlp_of_ranks(rows, torch.cat([gate, up]), down, size)

    model = ByRanks(ModelConfig.from_hf(case.hf_config), dict(weights))
    model.lm_head = lambda x: gathered(x, [row_part(model.embedding, rank, size) for rank in range(size)])
    return model


def models_probe(seed: int) -> Values:
    """Compute a text with every model and every number of ranks."""
    from mini_engine.attention.dense import DenseAttention, sdpa_attention

    values: Values = {}
    for case, sizes in cases(seed):
        ids = torch.tensor(random_ids(case.vocab_size, NUM_TOKENS, seed))
        for size in sizes:
            with torch.inference_mode():
                model = by_ranks(case, size)
                logits = model(ids, torch.arange(NUM_TOKENS), DenseAttention(sdpa_attention))
            values[f"{case.name}, {size} ranks"] = logits.clone()
    return values


def models_spec(seed: int) -> Values:
    """Ask transformers, which knows no ranks."""
    values: Values = {}
    for case, sizes in cases(seed):
        logits = peer.logits(case, "float32", "sdpa", random_ids(case.vocab_size, NUM_TOKENS, seed))
        values |= {f"{case.name}, {size} ranks": logits for size in sizes}
    return values


REGISTRY.add(
    "L12.B.models",
    "Models of which every layer and the head are computed by ranks give the logits of transformers: the embedded one "
    "with 1 and 2, random ones with up to 8.",
    models_probe,
    close(models_spec, 2e-4),
    seconds=40.0,
)
