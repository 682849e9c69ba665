"""The families of models: for each ``model_type`` of a ``config.json`` what its layers hold, said once.

``ModelConfig.weight_shapes`` asks a checkpoint for these tensors, and ``weights.take_layer`` reads them. Every form of
the model is made of what it read, and adds a bias wherever this table has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
UNREAD = "rotary_emb.inv_freq"  # old checkpoints store it; transformers and this engine compute it from config.json


@dataclass(frozen=True)
class Part:
    """A vector or a matrix of every layer: its name there in a checkpoint, and its shape in sizes of ``ModelConfig``.

    A matrix is [out features, in features]. ``has_bias``: whether its product adds a vector [out features], or the
    field of ``ModelConfig`` that says so. A name with "{expert}" stands for one in each expert.
    """

    stored: str
    shape: tuple[str, ...]
    has_bias: bool | str = False

    @property
    def is_of_expert(self) -> bool:
        """Whether each expert of a layer has one."""
        return "{expert}" in self.stored

    def names(self, layer: int, has_bias: bool, expert: int = 0) -> dict[str, str]:
        """Return the names of its tensors in a checkpoint, by what they are: "weight", perhaps "bias"."""
        kinds = ("weight", "bias") if has_bias else ("weight",)
        return {kind: f"model.layers.{layer}.{self.stored.format(expert=expert)}.{kind}" for kind in kinds}


@dataclass(frozen=True)
class Family:
    """Models of one ``model_type``.

    ``models``: names that people know. ``differs``: from Qwen3, in words. ``parts``: each field of
    ``weights.LayerWeights``, in the order of the forward pass. ``computes_only``: fields of ``config.json``, and the
    values of each that the forward pass computes. ``defaults``: what transformers takes for fields that are not there.
    ``reads``: fields of ``ModelConfig`` that no other file has. ``skips_rotation``: some layers turn no heads.
    ``slides_by_layer``: ``layer_types`` says which layers have the window of ``sliding_window``; otherwise all have.
    ``scales_full_layers``: ``rope_scaling`` is for the layers that have none. ``norms_after``: a layer norms what comes
    out of its attention and its MLP, not what goes in; norms and rotations are computed in float32 to their end.
    ``rounds_shares``: a token's shares of its experts are rounded before they are applied.
    """

    models: str
    differs: str
    parts: Mapping[str, Part]
    computes_only: Mapping[str, tuple[object, ...]]
    defaults: Mapping[str, object]
    reads: tuple[str, ...] = ()
    skips_rotation: bool = False
    slides_by_layer: bool = False
    scales_full_layers: bool = False
    norms_after: bool = False
    rounds_shares: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether "packed" and "fast" have fewer operations for it (``fast/fused.py``)."""
        return not (self.norms_after or self.reads)

    @property
    def ways(self) -> tuple[str, ...]:
        """The values of ``EngineConfig.compute`` that can run it."""
        more = ("compiled", "triton") if self.is_fused and not self.skips_rotation else ()
        return ("reference", "packed", "fast", *more)


def attention(norms_heads: bool, inputs: bool | str = False, output: bool | str = False) -> dict[str, Part]:
    """Return the parts of a decoder layer around its attention as Llama has them, with or without a norm of each head.

    ``inputs`` and ``output``: ``has_bias`` of the projections to queries, keys and values, and of the one back.
    """
    heads = {name: Part(f"self_attn.{name}", ("head_dim",)) for name in ("q_norm", "k_norm") if norms_heads}
    return {
        "input_norm": Part("input_layernorm", ("hidden_size",)),
        "q_proj": Part("self_attn.q_proj", ("q_size", "hidden_size"), inputs),
        "k_proj": Part("self_attn.k_proj", ("kv_size", "hidden_size"), inputs),
        "v_proj": Part("self_attn.v_proj", ("kv_size", "hidden_size"), inputs),
        **heads,
        "o_proj": Part("self_attn.o_proj", ("hidden_size", "q_size"), output),
        "post_attention_norm": Part("post_attention_layernorm", ("hidden_size",)),
    }


def mlp(bias: bool | str = False) -> dict[str, Part]:
    """Return the parts of an MLP. ``bias``: ``has_bias`` of all three."""
    return {
        "gate_proj": Part("mlp.gate_proj", ("intermediate_size", "hidden_size"), bias),
        "up_proj": Part("mlp.up_proj", ("intermediate_size", "hidden_size"), bias),
        "down_proj": Part("mlp.down_proj", ("hidden_size", "intermediate_size"), bias),
    }


def experts(block: str, matrices: tuple[str, str, str], size: str) -> dict[str, Part]:
    """Return the parts of an MLP that is split among experts.

    ``block`` and ``matrices``: what a checkpoint calls the MLP and an expert's gate, up and down. ``size``: the field
    of ``ModelConfig`` with the intermediate size of an expert.
    """
    gate, up, down = (f"{block}.experts.{{expert}}.{name}" for name in matrices)
    return {
        "router": Part(f"{block}.gate", ("num_experts", "hidden_size")),
        "expert_gates": Part(gate, (size, "hidden_size")),
        "expert_ups": Part(up, (size, "hidden_size")),
        "expert_downs": Part(down, ("hidden_size", size)),
    }


ATTENTION_BIASES = ("attention_bias", "attention_bias")
# What norms a block of OLMo stands for the norm before the block, and is after it.
OLMO_NORMS = {
    "input_norm": Part("post_attention_layernorm", ("hidden_size",)),
    "q_norm": Part("self_attn.q_norm", ("q_size",)),
    "k_norm": Part("self_attn.k_norm", ("kv_size",)),
    "post_attention_norm": Part("post_feedforward_layernorm", ("hidden_size",)),
}
GRANITE_4_MLP = {
    "gate_up_proj": Part("shared_mlp.input_linear", ("shared_gate_up_size", "hidden_size")),
    "down_proj": Part("shared_mlp.output_linear", ("hidden_size", "shared_intermediate_size")),
}
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
EXPERTS = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
SILU = {"hidden_act": (None, "silu")}
FULL = {"use_sliding_window": (None, False)}  # every layer sees all positions
FAMILIES = {
    "qwen3": Family(
        models="Qwen3, dense",
        differs="",
        parts=attention(norms_heads=True) | mlp(),
        computes_only={**SILU, **FULL, "attention_bias": (None, False)},
        defaults={"head_dim": 128, "num_key_value_heads": 32},
    ),
    "qwen2": Family(
        models="Qwen2, Qwen2.5",
        differs="heads are not normed; a bias on queries, keys and values",
        parts=attention(norms_heads=False, inputs=True) | mlp(),
        computes_only={**SILU, **FULL},
        defaults={"rope_theta": 10_000.0, "num_key_value_heads": 32},
    ),
    "llama": Family(
        models="Llama 2 and 3, SmolLM2, TinyLlama, Yi, and what else calls itself llama",
        differs="heads are not normed; biases where config.json says so",
        parts=attention(False, *ATTENTION_BIASES) | mlp("mlp_bias"),
        computes_only=SILU,
        defaults={"rope_theta": 10_000.0},
    ),
    "smollm3": Family(
        models="SmolLM3",
        differs="heads are not normed, and in every fourth layer not turned; biases where config.json says so",
        parts=attention(False, *ATTENTION_BIASES) | mlp("mlp_bias"),
        computes_only={**SILU, **FULL},
        defaults={"rope_theta": 2_000_000.0, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"no_rope_layer_interval": 4},
        skips_rotation=True,
    ),
    "mistral": Family(
        models="Mistral",
        differs="heads are not normed; a request ends at the window of its attention",
        parts=attention(norms_heads=False) | mlp(),
        computes_only=SILU,
        defaults={"rope_theta": 10_000.0, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
}
FAMILIES["ministral"] = replace(
    FAMILIES["mistral"],
    models="Ministral",
    differs="heads are not normed; a request ends at the window, if a layer has one",
    slides_by_layer=True,
)
FAMILIES["olmo2"] = Family(
    models="OLMo 2",
    differs="norms after attention and MLP; queries and keys are normed over all heads at once",
    parts=attention(True, *ATTENTION_BIASES) | mlp() | OLMO_NORMS,
    computes_only=SILU,
    defaults={"rope_theta": 10_000.0},
    norms_after=True,
)
FAMILIES["olmo3"] = replace(
    FAMILIES["olmo2"],
    models="OLMo 3",
    differs="as OLMo 2; a request ends at the window, if a layer has one",
    defaults={"rope_theta": 500_000.0, "sliding_window": 4096},
    slides_by_layer=True,
    scales_full_layers=True,
)
FAMILIES["granite"] = replace(
    FAMILIES["llama"],
    models="Granite 3, dense",
    differs="as Llama; config.json multiplies embeddings, scores, what each block adds, and logits",
    defaults={"rope_theta": 10_000.0, "attention_multiplier": 1.0},
    reads=MULTIPLIERS,
)
FAMILIES["granitemoehybrid"] = replace(
    FAMILIES["granite"],
    models="Granite 4, dense",
    differs="as Granite 3; gate and up are one matrix; heads are turned if config.json says so",
    parts=attention(False, *ATTENTION_BIASES) | GRANITE_4_MLP,
    computes_only={**SILU, "num_local_experts": (0,)},
    defaults={**FAMILIES["granite"].defaults, "shared_intermediate_size": 1024}
    | {"position_embedding_type": None, "layer_types": ["linear_attention"]},
    reads=(*MULTIPLIERS, "shared_intermediate_size"),
    skips_rotation=True,
)
FAMILIES["qwen3_moe"] = Family(
    models="Qwen3, mixture of experts",
    differs="each token goes through a few of many MLPs; biases where config.json says so",
    parts=attention(True, *ATTENTION_BIASES)
    | experts("mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size"),
    computes_only={**SILU, **FULL, "mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)},
    defaults={"rope_theta": 10_000.0, "num_key_value_heads": 4}
    | {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
    reads=(*EXPERTS, "moe_intermediate_size"),
    rounds_shares=True,
)
FAMILIES["mixtral"] = Family(
    models="Mixtral",
    differs="heads are not normed; each token goes through a few of many MLPs; a request ends at the window, if any",
    parts=attention(norms_heads=False) | experts("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size"),
    computes_only={**SILU, "norm_topk_prob": (None, True)},
    defaults={"rope_theta": 1_000_000.0, "num_key_value_heads": 8, "sliding_window": None}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    reads=EXPERTS,
)


def family_of(model_type: object) -> Family:
    """Return the family of this name. Raises ``ValueError`` for one that is not in the table."""
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(map(repr, FAMILIES))
        raise ValueError(f"config.json says model_type {model_type!r}; this engine runs models of {known}")
    return family
