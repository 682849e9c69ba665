"""What the JSON files of a Hugging Face checkpoint must look like, checked field by field before they are read."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from mini_engine.families import Family

# Far beyond any model; a larger number is a mistake that would take hours to fail.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrNone = Annotated[int, Field(ge=0, le=2**31 - 1)] | None
Positive = Annotated[float, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Strict(BaseModel):
    """Fields have exactly their type: ``"131"`` is no number. Other fields are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Rope(Strict):
    """``rope_parameters`` or, in files of transformers 4, ``rope_scaling``; ``check_rope`` refuses other fields."""

    model_config = ConfigDict(extra="allow")

    rope_theta: Positive | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None

    @property
    def kind(self) -> str:
        """The type of scaling, ``"default"`` for none."""
        return self.rope_type or self.type or "default"


class ConfigFile(Strict):
    """``config.json`` of a model of one of the families."""

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    intermediate_size: Count
    max_position_embeddings: Count
    rms_norm_eps: Annotated[float, Field(ge=0)]
    head_dim: Count | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: Count | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count | None = None
    position_embedding_type: str | None = "rope"
    rope_theta: Positive | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    original_max_position_embeddings: Count | None = None
    tie_word_embeddings: bool | None = None
    layer_types: list[str] | None = None
    attention_multiplier: Positive | None = None
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0
    num_experts: CountOrNone = Field(None, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: CountOrNone = None
    moe_intermediate_size: Count | None = None
    shared_intermediate_size: Count | None = None
    norm_topk_prob: bool = True
    eos_token_id: TokenId | list[TokenId] | None = None

    @property
    def rope(self) -> Rope:
        """The rotary embedding that transformers would compute: ``rope_scaling`` goes before ``rope_parameters``.

        One without fields counts as absent.
        """
        given = [rope for rope in (self.rope_scaling, self.rope_parameters) if rope is not None]
        return next((rope for rope in given if rope.model_fields_set), Rope())

    @property
    def unrotated_layers(self) -> tuple[int, ...]:
        """The layers whose heads are not turned: those that ``no_rope_layers`` has a 0 for. It stands for the opposite.

        Granite 4 turns the heads of all its layers or of none. Raises ``ValueError`` unless ``no_rope_layers`` has an
        entry for each layer.
        """
        layers = range(self.num_hidden_layers)
        if self.position_embedding_type != "rope":
            return tuple(layers)
        if self.no_rope_layers is None:
            every = self.no_rope_layer_interval
            return tuple(layer for layer in layers if every and (layer + 1) % every == 0)
        if len(self.no_rope_layers) != len(layers):
            raise ValueError(
                f"config.json has {len(self.no_rope_layers)} no_rope_layers and num_hidden_layers {len(layers)}; there "
                "must be one for each layer"
            )
        return tuple(layer for layer in layers if not self.no_rope_layers[layer])

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """The layers with a window. Where nothing says which, all but every fourth, as in OLMo 3."""
        usual = [SLIDING if (layer + 1) % 4 else "" for layer in range(self.num_hidden_layers)]
        return tuple(layer for layer, kind in enumerate(self.layer_types or usual) if kind == SLIDING)

    def window(self, family: Family) -> int | None:
        """Return how many of the newest positions a query sees in some layer; ``None`` for all of them in all."""
        if "sliding_window" not in family.defaults:
            return None
        slides = not family.slides_by_layer or SLIDING in (self.layer_types or (SLIDING,))
        return self.sliding_window if slides else None

    @property
    def theta(self) -> float:
        """The base that transformers would compute with. Raises ``ValueError`` where the file does not say it.

        Of ``rope_parameters`` beside a ``rope_scaling`` transformers reads nothing.
        """
        unread = self.rope_parameters.rope_theta if self.rope_parameters is not None else None
        theta = self.rope.rope_theta or self.rope_theta
        if theta is not None:
            return float(theta)
        if unread is None:
            raise ValueError("config.json lacks rope_theta; is it the file of a model?")
        if unread != UNSTATED_THETA:
            raise ValueError(
                f"config.json has rope_scaling without rope_theta, and rope_parameters with rope_theta {unread}; "
                f"transformers reads only the first and computes with {UNSTATED_THETA}; move the fields of "
                "rope_scaling into rope_parameters"
            )
        return UNSTATED_THETA

    @property
    def rope_scaling_fields(self) -> dict[str, Any] | None:
        """The fields of ``config.RopeScaling``, ``None`` if nothing is scaled. ``check_rope`` comes first.

        As in transformers ``original_max_position_embeddings`` of the model itself goes before the rotary embedding's.
        """
        rope = self.rope
        if rope.kind in ("default", "dynamic"):
            return None
        fields = rope.model_dump(
            include={"original_max_position_embeddings", *ROPE_FIELDS[rope.kind]}, exclude_none=True
        )
        fields = {"original_max_position_embeddings": self.max_position_embeddings} | fields
        if self.original_max_position_embeddings is not None:
            fields["original_max_position_embeddings"] = self.original_max_position_embeddings
        if rope.kind == "yarn":
            mscales = fields.pop("mscale", None), fields.pop("mscale_all_dim", None)
            fields.setdefault("attention_factor", yarn_attention_factor(fields["factor"], *mscales))
        return {"rope_type": rope.kind, **fields}


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return what YaRN multiplies cosines and sines with where the file does not say it."""

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1)


class GenerationFile(Strict):
    """``generation_config.json``. Of its other fields ``check_generation`` refuses those that are not computed."""

    eos_token_id: TokenId | list[TokenId] | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_strings: str | list[str] | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """The fields of ``SamplingParams`` that the file stores, as vLLM and SGLang read them; ranges are not checked.

        ``do_sample: false`` is temperature 0, and the other fields of drawing do not apply, as in transformers.
        ``do_sample: true`` without a temperature is temperature 1.
        """
        stored = self.model_dump(include=set(DEFAULTS), exclude_none=True)
        if self.do_sample is False:
            stored = {"temperature": 0.0} | {name: stored[name] for name in stored if name not in DRAWING}
        elif self.do_sample:
            stored = {"temperature": 1.0} | stored
        return {DEFAULTS[name]: value for name, value in stored.items()}


class IndexFile(Strict):
    """``model.safetensors.index.json``: the file of each tensor."""

    weight_map: dict[str, str]


Kind = TypeVar("Kind", bound=Strict)

SLIDING, FULL = "sliding_attention", ("full_attention", "attention")  # of ``layer_types``; the last is an older name
UNSTATED_THETA = 10_000.0  # what transformers computes with where a file has no ``rope_theta`` in the right place

# The rope types that are computed, and the fields that each of them reads; ``NEEDED`` are those without a default.
# "dynamic" scales nothing within ``max_position_embeddings``, and the engine runs no longer sequences. Beyond them each
# token would change the frequencies, and the keys in the cache would keep the old ones. For this reason "longrope" is
# not computed.
NEEDED = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
# Fields of a rotary embedding that transformers does not read -> values that mean nothing to other programs either.
CHANGES_NOTHING: dict[str, tuple[object, ...]] = {"attn_factor": (1, 1.0), "extrapolation_factor": (1, 1.0)}
OWN_METHOD = "mini_engine"  # the ``quant_method`` of what ``mini-engine quantize`` writes
STORED_QUANTIZED = (
    "weights that are stored quantized are not read, load the model's bfloat16 checkpoint and set quantize='int8' or "
    "'int4'"
)
# What changes logits, or the choice among them, and is computed for no family: field -> values that ask for nothing.
NOT_COMPUTED: dict[str, tuple[object, ...]] = {
    "is_causal": (None, True),
    "partial_rotary_factor": (None, 1, 1.0),
}
# What ``generation_config.json`` may store as a default of a request: its name there -> the field of SamplingParams.
DRAWING = ("temperature", "top_k", "top_p", "min_p")
DEFAULTS = {**{name: name for name in (*DRAWING, "repetition_penalty")}, "stop_strings": "stop"}
# What else transformers would apply to a generation; here it is computed for a request that asks, or not at all.
NO_DEFAULTS: dict[str, tuple[object, ...]] = {
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
    "sequence_bias": (None, {}, []),
    "no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "top_h": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "constraints": (None, []),
    "force_words_ids": (None, []),
    "dola_layers": (None,),
    "token_healing": (None, False),
}


def parse(kind: type[Kind], raw: Mapping[str, Any], file: str) -> Kind:
    """Check ``raw``. Raises ``ValueError`` naming the file, the first field at fault, its value and what it must be."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        missing = [str(fault["loc"][0]) for fault in error.errors() if fault["type"] == "missing"]
        if missing:
            raise ValueError(f"{file} lacks {', '.join(missing)}; is it the file of a model?") from None
        fault = error.errors()[0]
        raise ValueError(
            f"{file}: {place(raw, fault['loc'])} is {fault['input']!r:.60}; {fault['msg'].lower()}"
        ) from None


def place(raw: object, path: tuple[str | int, ...]) -> str:
    """Return the field at ``path``, such as ``rope_parameters.rope_theta``, without what pydantic adds to a path."""
    names = []
    for name in path:
        if not isinstance(raw, Mapping) or name not in raw:
            break
        names.append(str(name))
        raw = raw[name]
    return ".".join(names)


def check_computed(raw: Mapping[str, Any], config: ConfigFile, family: Family) -> None:
    """Raise ``ValueError`` if a config asks for something that the forward pass of its family does not compute."""
    check_rope(config.rope)
    slides = family.slides_by_layer and config.sliding_window is not None
    known = (*FULL, SLIDING) if slides else FULL
    other = [kind for kind in config.layer_types or () if kind not in known]
    if other:
        raise ValueError(f"config.json has layer_types {other[0]!r}; this engine computes only 'full_attention'")
    if config.layer_types is not None and len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"config.json has {len(config.layer_types)} layer_types and num_hidden_layers {config.num_hidden_layers}; "
            "there must be one for each layer"
        )
    stored = raw.get("quantization_config")
    if stored is not None and not (isinstance(stored, Mapping) and stored.get("quant_method") == OWN_METHOD):
        raise ValueError(f"config.json has quantization_config {stored!r:.60}; {STORED_QUANTIZED}")
    refuse(raw, {**family.computes_only, **NOT_COMPUTED}, "config.json", "this engine computes only")


def of_full_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``rope_parameters`` of the layers without a window, where ``raw`` has them for each kind of layer.

    Raises ``ValueError`` if that of layers with a window is scaled, or has another base.
    """
    kinds = raw.get("rope_parameters")
    if not isinstance(kinds, Mapping) or not isinstance(full := kinds.get("full_attention"), Mapping):
        return {}
    plain = {"rope_type": "default", "rope_theta": full.get("rope_theta")}
    if kinds.get(SLIDING) != plain:
        raise ValueError(
            f"config.json has rope_parameters {kinds.get(SLIDING)!r:.60} for {SLIDING!r}; this engine computes only "
            f"{plain} there"
        )
    return {"rope_parameters": full}


def check_rope(rope: Rope) -> None:
    """Raise ``ValueError`` for a rotary embedding that is not computed, that lacks a field or has one too many."""
    if rope.kind not in ROPE_FIELDS or rope.partial_rotary_factor not in NOT_COMPUTED["partial_rotary_factor"]:
        raise ValueError(
            f"config.json has rope type {rope.kind!r}, partial_rotary_factor {rope.partial_rotary_factor}; this engine "
            f"computes only the rope types {', '.join(ROPE_FIELDS)}, over whole heads; run this model with transformers"
        )
    given = rope.model_dump(exclude_unset=True, exclude_none=True)
    known = ROPE_FIELDS[rope.kind]
    missing = [name for name in NEEDED if name in known and name not in given]
    if missing:
        raise ValueError(f"config.json has rope type {rope.kind!r} without {missing[0]}; write it there")
    refuse_unread(rope, given)
    if rope.kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise ValueError(
            f"config.json has high_freq_factor {given['high_freq_factor']} and low_freq_factor "
            f"{given['low_freq_factor']}; the first must be larger"
        )


def refuse_unread(rope: Rope, given: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a field of the rotary embedding that transformers reads over, unless it changes nothing.

    ``attn_factor`` is in published Qwen3 checkpoints. Other programs multiply with it what transformers computes.
    """
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_FIELDS[rope.kind]}
    unread = sorted(name for name in given.keys() - known if given[name] not in CHANGES_NOTHING.get(name, ()))
    if not unread:
        return
    value = given[unread[0]]
    remedy = "remove it to compute what transformers computes"
    if rope.kind == "yarn" and unread[0] == "attn_factor" and isinstance(value, float | int):
        factor = rope.attention_factor or yarn_attention_factor(given["factor"], rope.mscale, rope.mscale_all_dim)
        remedy = (
            f"write attention_factor {factor!r} in its place to compute what transformers computes, or "
            f"attention_factor {factor * value!r}, the product, which other programs compute"
        )
    raise ValueError(
        f"config.json has {unread[0]} {value!r:.60}, which transformers does not read with the rope type "
        f"{rope.kind!r}; {remedy}"
    )


def check_generation(raw: Mapping[str, Any], file: str) -> None:
    """Raise ``ValueError`` for a stored default of ``NO_DEFAULTS``."""
    refuse(raw, NO_DEFAULTS, file, "this engine does not take it as a default; remove it there, or write")


def refuse(raw: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], file: str, remedy: str) -> None:
    """Raise ``ValueError`` for the first field whose value is none of its ``neutral`` ones."""
    for name, values in neutral.items():
        value = raw.get(name)
        if not any(value == own and isinstance(value, bool) == isinstance(own, bool) for own in values):
            raise ValueError(f"{file} has {name} {value!r:.60}; {remedy} {name} {values[-1]!r}")
