"""What a model is (``ModelConfig``) and how the engine runs it (``EngineConfig``): frozen, validated, every option off.

Owns: shapes, options and their checks. Must not know: weights, files, requests. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, Self, get_type_hints

from mini_engine.checks import device_name, flag, one_of, or_none, registered, seconds, whole
from mini_engine.families import EMBEDDING, FINAL_NORM, HEAD, Family, Part, family_of
from mini_engine.other_names import knows_other_names

Dtype = Literal["float32", "bfloat16"]
Compute = Literal["reference", "packed", "fast", "compiled", "triton"]
Policy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "shortest"]
PrefixCacheKind = Literal["radix"]
Eviction = Literal["lru", "lfu", "fifo", "mru", "priority"]
GrammarBackend = Literal["none", "auto", "fsm", "xgrammar", "llguidance", "outlines"]
Whitespace = Literal["spaced", "compact", "any"]
Drafts = Literal["off", "ngram", "own"]
Quantize = Literal["off", "int8", "int4"]
Exchange = Literal["gather", "sum"]
RopeType = Literal["linear", "yarn", "llama3"]
DEFAULT_POOL_TOKENS = 16_384


@dataclass(frozen=True)
class RopeScaling:
    """How a checkpoint stretches its rotary embedding (``rope.py``). Names follow ``rope_parameters`` of transformers.

    Every type has ``factor``. "yarn" reads ``attention_factor``, ``beta_fast``, ``beta_slow`` and ``truncate``,
    "llama3" ``low_freq_factor`` and ``high_freq_factor``, and both ``original_max_position_embeddings``.
    """

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Names follow Hugging Face's ``Qwen3Config`` and ``LlamaConfig``.

    ``head_dim`` is independent of ``hidden_size / num_attention_heads``: Qwen3-0.6B has 16 heads of 128 over a hidden
    size of 1024. ``rope_scaling`` is ``None`` where the rotary embedding is not scaled within the model's positions.
    ``sliding_window``: the newest positions that a query of this model sees. The engine computes no longer sequences,
    so ``max_position_embeddings`` is no larger. ``unrotated_layers``: numbers of layers whose heads are not turned.
    ``unscaled_layers``: those that turn them without ``rope_scaling``. ``attention_multiplier``: the factor of scores,
    ``None`` for 1 / sqrt(head_dim). The other multipliers are factors of what the embedding and each block give. Logits
    are divided by ``logits_scaling``. Of ``num_experts`` MLPs each token goes through ``num_experts_per_tok``;
    ``norm_topk_prob``: its shares of them are scaled to a sum of 1. ``moe_intermediate_size``: their size, if it is not
    ``intermediate_size``. ``shared_intermediate_size``: that of the MLP in Granite 4.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    model_type: str = "qwen3"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    unrotated_layers: tuple[int, ...] = ()
    unscaled_layers: tuple[int, ...] = ()
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        """Check that the sizes make a model of a known family. Raises ``ValueError`` naming the field."""
        family_of(self.model_type)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            if not is_count(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; a model needs a whole number of at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} and num_key_value_heads "
                f"{self.num_key_value_heads}; every key-value head must serve the same number of query heads"
            )
        if "num_experts" in self.family.reads and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok} and num_experts {self.num_experts}; a token goes "
                "through at least one of them and at most all"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding turns pairs, so it must be even")
        if not self.rope_theta > 0 or not self.rms_norm_eps >= 0:
            raise ValueError(f"rope_theta is {self.rope_theta} and rms_norm_eps {self.rms_norm_eps}; both are positive")
        if self.rope_scaling is not None and self.rope_theta <= 1:
            raise ValueError(f"rope_theta is {self.rope_theta}; a scaled rotary embedding needs one above 1")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read the dictionary of a Hugging Face ``config.json``, of transformers 4 or 5.

        Raises ``ValueError`` for a field that is missing or of another type, and for anything that is not computed: a
        family that is not in the table, what that family ``computes_only`` otherwise, a rotary embedding of another
        kind, other kinds of layers or quantised weights.
        """
        family = family_of(raw.get("model_type"))
        from mini_engine import hf_files  # here: pydantic takes time to import

        rope = hf_files.of_full_layers(raw) if family.scales_full_layers else {}
        file = hf_files.parse(hf_files.ConfigFile, {**family.defaults, **raw, **rope}, "config.json")
        hf_files.check_computed(raw, file, family)
        window = file.window(family)
        scaling = file.rope_scaling_fields
        biases = {part.has_bias for part in family.parts.values() if isinstance(part.has_bias, str)}
        return cls(
            **{key: getattr(file, key) for key in (*REQUIRED_KEYS, *family.reads)},
            **{name: bool(getattr(file, name)) for name in biases},
            num_key_value_heads=file.num_key_value_heads or file.num_attention_heads,
            head_dim=file.head_dim or file.hidden_size // file.num_attention_heads,
            max_position_embeddings=min(file.max_position_embeddings, window or file.max_position_embeddings),
            sliding_window=window,
            unrotated_layers=file.unrotated_layers if family.skips_rotation else (),
            rope_theta=file.theta,
            tie_word_embeddings=bool(file.tie_word_embeddings),
            rope_scaling=None if scaling is None else RopeScaling(**scaling),
            unscaled_layers=file.sliding_layers if family.scales_full_layers and scaling is not None else (),
            model_type=raw["model_type"],
        )

    @property
    def family(self) -> Family:
        """What a layer of this model holds."""
        return family_of(self.model_type)

    def has_bias(self, part: Part) -> bool:
        """Whether this model has a bias in a part of its layers."""
        return bool(getattr(self, part.has_bias)) if isinstance(part.has_bias, str) else part.has_bias

    def names(self, part: Part, layer: int) -> list[dict[str, str]]:
        """Return the names of a part's tensors in a checkpoint, as ``Part.names`` does: one mapping for each expert."""
        experts = range(self.num_experts) if part.is_of_expert else range(1)
        return [part.names(layer, self.has_bias(part), expert) for expert in experts]

    @property
    def q_size(self) -> int:
        """The features of all query heads, ``Hq * D``."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The features of all keys, and of all values, ``Hkv * D``."""
        return self.num_key_value_heads * self.head_dim

    @property
    def shared_gate_up_size(self) -> int:
        """The rows of Granite 4's matrix that holds gate and up."""
        return 2 * self.shared_intermediate_size

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor that a checkpoint of this model holds, in the order of the forward.

        The bias of a matrix [out, in] is [out].
        """
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_hidden_layers):
            for part in self.family.parts.values():
                shape = tuple(getattr(self, size) for size in part.shape)
                for names in self.names(part, layer):
                    shapes |= {name: shape if kind == "weight" else shape[:1] for kind, name in names.items()}
        shapes[FINAL_NORM] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[HEAD] = shapes[EMBEDDING]
        return shapes


REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class Needs:
    """The option without which another one does nothing, and the value that it must have if any other will not do."""

    option: str
    value: str | None = None


Count = Annotated[int, whole(1)]
CountOrNone = Annotated[int | None, or_none(whole(1))]
Flag = Annotated[bool, flag]
COMPUTE = (
    "How things are computed. reference: the bits of transformers. packed: weights packed once, 2-3 times faster on a "
    "CPU. fast: packed, and faster decode steps in bfloat16. compiled: compiled loops, fastest on a "
    "CPU, with bits of their own. triton: the course's kernels, on an NVIDIA GPU or with TRITON_INTERPRET=1."
)
QUANTIZE = (
    "Round matrices to fewer bytes as they are loaded, on a CPU. int8: a scale for each row. int4: for each 32 columns "
    "of a row a scale and a zero point."
)
DRAFTS = (
    "Guess tokens and compute several in a step. ngram: as the request's text went on before. own: a drafter given to "
    "LLM. With batch_invariant no bit changes, without it the last bits may, as beside other requests."
)
EXCHANGE = (
    "What these processes exchange. gather: parts of results, with the bits of one process. sum: parts of sums, half "
    "as often, with other bits."
)


@knows_other_names
@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model. ``EngineConfig()`` is the baseline: every option disabled.

    Each option has a check, a meaning and perhaps another one that it needs. Help, tables and errors come from there.
    """

    dtype: Annotated[Dtype, one_of(Dtype), "float32 or bfloat16; weights are converted when they are loaded."] = (
        "float32"
    )
    device: Annotated[str, device_name, "Where the model is: cpu, cuda, cuda:1, …"] = "cpu"
    page_size: Annotated[Count, "Tokens in one page of the KV pool."] = 16
    compute: Annotated[Compute, one_of(Compute), COMPUTE] = "reference"
    quantize: Annotated[Quantize, one_of(Quantize), QUANTIZE] = "off"
    batch_invariant: Annotated[Flag, "Bits that do not depend on batch, chunks, threads or process."] = False
    max_model_len: Annotated[CountOrNone, "Most positions of a request. None: the model's, or what memory holds."] = (
        None
    )
    max_running_requests: Annotated[Count, "Requests that share a step; 1 is one after the other."] = 1
    max_tokens_per_step: Annotated[CountOrNone, "Tokens of a step, prompts in chunks. None: no limit."] = None
    policy: Annotated[
        str, registered(Policy), "The order of waiting requests: fcfs, lpm, dfs-weight, lof, random, shortest."
    ] = "fcfs"
    policy_seed: Annotated[
        int | None, or_none(whole(-(2**63))), "Seed of the random policy.", Needs("policy", "random")
    ] = None
    max_steps_waited: Annotated[Count, "A request that so many steps passed over goes before all others."] = 256
    preemption: Annotated[Flag, "Start what is expected to fit; send one back to wait when pages run out."] = False
    num_pages: Annotated[CountOrNone, "Pages of the KV pool. None: for all that may run, within limits."] = None
    prefix_cache: Annotated[
        PrefixCacheKind | None,
        or_none(one_of(PrefixCacheKind)),
        "Keep prompts for requests that begin alike, in a radix tree.",
    ] = None
    eviction: Annotated[
        str, registered(Eviction), "Which cached pages go first: lru, lfu, fifo, mru, priority.", Needs("prefix_cache")
    ] = "lru"
    wait_for_prefix: Annotated[
        CountOrNone, "Wait while another request computes so many more common tokens.", Needs("prefix_cache")
    ] = None
    wait_below_match: Annotated[
        int, whole(0), "Wait only if at most so many tokens are cached.", Needs("wait_for_prefix")
    ] = 32
    grammar_backend: Annotated[
        str, registered(GrammarBackend), "What keeps answers to grammars. auto: for each the first that takes it."
    ] = "none"
    json_whitespace: Annotated[
        Whitespace, one_of(Whitespace), "Blanks in JSON. spaced: as json.dumps.", Needs("grammar_backend")
    ] = "spaced"
    grammar_timeout_s: Annotated[float, seconds, "A request fails whose grammar takes longer to compile."] = 60.0
    jump_forward: Annotated[
        Flag, "Append forced text without a forward pass for each token.", Needs("grammar_backend")
    ] = False
    drafts: Annotated[Drafts, one_of(Drafts), DRAFTS] = "off"
    max_draft_rows: Annotated[Count, "Drafts fill a step up to so many rows.", Needs("drafts")] = 16
    tensor_parallel: Annotated[Count, "So many processes share the model, each with a part of every matrix."] = 1
    tensor_parallel_mode: Annotated[Exchange, one_of(Exchange), EXCHANGE, Needs("tensor_parallel")] = "gather"

    @classmethod
    def serving(cls, **changes: Any) -> Self:
        """Return what a server wants: many requests, chunked prompts, preemption, fast weights; ``changes`` on top."""
        compute = "fast" if is_cpu(str(changes.get("device", "cpu"))) else "reference"
        many = {"max_running_requests": 32, "max_tokens_per_step": 512, "preemption": True, "grammar_backend": "auto"}
        return cls(**{"compute": compute, **many, **changes})

    @property
    def packs_weights(self) -> bool:
        """Whether weights are stored as their products want them."""
        return self.compute in ("packed", "fast", "compiled")

    def positions(self, model: ModelConfig) -> int:
        """Return the most positions of a request to ``model``. Raises ``ValueError`` for more than the model has."""
        if self.max_model_len is not None and self.max_model_len > model.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {self.max_model_len} and the model has {model.max_position_embeddings} positions; "
                "give at most as many, or leave it out"
            )
        return self.max_model_len or model.max_position_embeddings

    def pool_pages(self, model: ModelConfig) -> int:
        """Return the number of pages of the KV pool for ``model``: ``num_pages`` or its default.

        That has room for ``max_running_requests`` of the longest requests, but for no more than ``DEFAULT_POOL_TOKENS``
        tokens or one longest request.
        """
        longest = self.positions(model)
        tokens = min(self.max_running_requests * longest, max(DEFAULT_POOL_TOKENS, longest))
        return self.num_pages or -(-tokens // self.page_size)

    def check_parts(self, has_prefix_cache: bool, has_constraints: bool) -> None:
        """Raise ``ValueError`` if an engine lacks a part that this configuration asks for."""
        wants_cache = self.prefix_cache is not None and not has_prefix_cache
        if wants_cache or (self.grammar_backend != "none" and not has_constraints):
            raise ValueError(
                f"prefix_cache={self.prefix_cache!r} and grammar_backend={self.grammar_backend!r} need parts of later "
                "lessons; build the engine with mini_engine.llm.make_engine"
            )

    def __post_init__(self) -> None:
        """Check every option. Raises ``ValueError`` naming the value, the limit and the remedy."""
        for name, (check, *_) in options().items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        for name, (_, _, *needs) in options().items():
            if needs and getattr(self, name) != getattr(EngineConfig, name):
                check_need(self, name, needs[0])
        check_ways_to_compute(self)
        if self.tensor_parallel > 1:
            check_ranks(self)


@cache
def options() -> dict[str, tuple[Any, ...]]:
    """Return, for each option of ``EngineConfig``, its check, its meaning and perhaps what it ``Needs``."""
    hints = get_type_hints(EngineConfig, include_extras=True)
    return {each.name: hints[each.name].__metadata__ for each in fields(EngineConfig)}


def check_need(config: EngineConfig, name: str, needs: Needs) -> None:
    """Raise ``ValueError`` if the option ``name``, which is set, does nothing without another one."""
    value = getattr(config, needs.option)
    if value == getattr(EngineConfig, needs.option) or needs.value not in (None, value):
        wanted = f"={needs.value!r}" if needs.value else ""
        raise ValueError(
            f"{name} is {getattr(config, name)!r} and does nothing while {needs.option} is {value!r}; set "
            f"{needs.option}{wanted}, or leave {name} out"
        )


def check_ways_to_compute(config: EngineConfig) -> None:
    """Raise ``ValueError`` for a way to compute that the device or the dtype does not have."""
    on_cpu = is_cpu(config.device)
    if config.packs_weights and not on_cpu:
        raise ValueError(
            f"compute={config.compute!r} is for CPUs and the device is {config.device!r}; use compute='reference' "
            "there, or 'triton'"
        )
    if config.quantize != "off" and (not on_cpu or config.compute == "triton"):
        raise ValueError(
            f"quantize={config.quantize!r} is for CPUs and not for compute='triton'; compute is {config.compute!r} and "
            f"device {config.device!r}; set quantize='off', or device='cpu' with compute='fast'"
        )
    if config.batch_invariant and not on_cpu and config.compute != "triton":
        raise ValueError(
            f"torch keeps batch_invariant=True on CPUs only and the device is {config.device!r}; "
            "set compute='triton', use device='cpu' or leave it off"
        )


def check_ranks(config: EngineConfig) -> None:
    """Raise ``ValueError`` for what several processes do not compute together."""
    asked = f"tensor_parallel is {config.tensor_parallel}"
    if not is_cpu(config.device):
        raise ValueError(f"{asked}, which is for CPUs, and device is {config.device!r}; set device='cpu'")
    if config.compute in ("compiled", "triton"):
        raise ValueError(f"{asked}, and compute={config.compute!r} runs in one process; set compute='fast'")
    if config.tensor_parallel_mode == "sum" and (config.batch_invariant or config.quantize != "off"):
        name = "batch_invariant" if config.batch_invariant else "quantize"
        raise ValueError(
            f"{asked} with tensor_parallel_mode='sum', whose sums depend on the number of processes and on the step, "
            f"and {name} is {getattr(config, name)!r}; set tensor_parallel_mode='gather', or leave {name} out"
        )


def is_count(value: object) -> bool:
    """Whether ``value`` is a whole number of at least 1 (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_cpu(device: str) -> bool:
    """Whether the torch device of this name is the CPU, with a number or without."""
    return device.split(":", maxsplit=1)[0] == "cpu"


EngineConfig.__doc__ = "\n".join(
    [EngineConfig.__doc__ or "", *(f"    {name}: {meaning}" for name, (_, meaning, *_) in options().items())]
)
