"""The families of models: for each ``model_type`` of a ``config.json`` what its layers hold, said once.

``ModelConfig.weight_shapes`` asks a checkpoint for these tensors, and ``weights.take_layer`` reads them. Every form of
the model is made of what it read, and adds a bias wherever this table has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """A vector or a matrix of every layer: its name there in a checkpoint, and its shape in sizes of ``ModelConfig``.

    A matrix is [out features, in features]. ``has_bias``: its product adds a vector [out features].
    """

    stored: str
    shape: tuple[str, ...]
    has_bias: bool = False

    def names(self, layer: int) -> dict[str, str]:
        """Return the names of its tensors in a checkpoint, by what they are: "weight", perhaps "bias"."""
        kinds = ("weight", "bias") if self.has_bias else ("weight",)
        return {kind: f"model.layers.{layer}.{self.stored}.{kind}" for kind in kinds}


@dataclass(frozen=True)
class Family:
    """Models of one ``model_type``.

    ``parts``: each field of ``weights.LayerWeights``, in the order of the forward pass. ``computes_only``: fields of
    ``config.json``, and the values of each that the forward pass computes.
    """

    parts: Mapping[str, Part]
    computes_only: Mapping[str, tuple[object, ...]]


FAMILIES = {
    "qwen3": Family(
        parts={
            "input_norm": Part("input_layernorm", ("hidden_size",)),
            "q_proj": Part("self_attn.q_proj", ("q_size", "hidden_size")),
            "k_proj": Part("self_attn.k_proj", ("kv_size", "hidden_size")),
            "v_proj": Part("self_attn.v_proj", ("kv_size", "hidden_size")),
            "q_norm": Part("self_attn.q_norm", ("head_dim",)),
            "k_norm": Part("self_attn.k_norm", ("head_dim",)),
            "o_proj": Part("self_attn.o_proj", ("hidden_size", "q_size")),
            "post_attention_norm": Part("post_attention_layernorm", ("hidden_size",)),
            "gate_proj": Part("mlp.gate_proj", ("intermediate_size", "hidden_size")),
            "up_proj": Part("mlp.up_proj", ("intermediate_size", "hidden_size")),
            "down_proj": Part("mlp.down_proj", ("hidden_size", "intermediate_size")),
        },
        computes_only={
            "hidden_act": (None, "silu"),
            "attention_bias": (None, False),
            "use_sliding_window": (None, False),
        },
    ),
}


def family_of(model_type: object) -> Family:
    """Return the family of this name. Raises ``ValueError`` for one that is not in the table."""
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(map(repr, FAMILIES))
        raise ValueError(f"config.json says model_type {model_type!r}; this engine runs dense {known} models")
    return family
