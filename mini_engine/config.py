"""What a model is (``ModelConfig``) and how the engine runs it (``EngineConfig``): frozen, validated, every option off.

Owns: shapes, options and their checks. Must not know: weights, files, requests. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from mini_engine.checks import Check, device_name, flag, one_of, or_none, registered, seconds, whole
from mini_engine.other_names import knows_other_names

Dtype = Literal["float32", "bfloat16"]
Compute = Literal["reference", "packed", "fast", "compiled", "triton"]
Policy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "shortest"]
PrefixCacheKind = Literal["radix"]
Eviction = Literal["lru", "lfu", "fifo", "mru", "priority"]
GrammarBackend = Literal["none", "auto", "fsm", "xgrammar", "llguidance", "outlines"]
Whitespace = Literal["spaced", "compact", "any"]
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
    """The shape of a dense Qwen3 model. Names follow Hugging Face's ``Qwen3Config``.

    ``head_dim`` is independent of ``hidden_size / num_attention_heads``: Qwen3-0.6B has 16 heads of 128 over a hidden
    size of 1024. ``rope_scaling`` is ``None`` where the rotary embedding is not scaled within the model's positions.
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

    def __post_init__(self) -> None:
        """Check that the sizes make a model. Raises ``ValueError`` naming the field."""
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
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding turns pairs, so it must be even")
        if not self.rope_theta > 0 or not self.rms_norm_eps >= 0:
            raise ValueError(f"rope_theta is {self.rope_theta} and rms_norm_eps {self.rms_norm_eps}; both are positive")
        if self.rope_scaling is not None and self.rope_theta <= 1:
            raise ValueError(f"rope_theta is {self.rope_theta}; a scaled rotary embedding needs one above 1")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read the dictionary of a Hugging Face ``config.json``, of transformers 4 or 5.

        Raises ``ValueError`` for a field that is missing or of another type, and for anything that is not a plain dense
        Qwen3: another architecture, a rotary embedding that is not computed, other kinds of layers, biases, another
        activation or quantised weights.
        """
        if raw.get("model_type") != "qwen3":
            raise ValueError(
                f"config.json says model_type {raw.get('model_type')!r}; this engine runs dense 'qwen3' models"
            )
        from mini_engine.hf_files import ConfigFile, check_computed, parse  # here: pydantic takes time to import

        file = parse(ConfigFile, raw, "config.json")
        check_computed(raw, file)
        return cls(
            **{key: getattr(file, key) for key in REQUIRED_KEYS},
            head_dim=file.head_dim,
            rope_theta=file.theta,
            tie_word_embeddings=bool(file.tie_word_embeddings),
            rope_scaling=None if (fields := file.rope_scaling_fields) is None else RopeScaling(**fields),
        )


REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


# option -> what it may hold. The names of registered policies, evictions and grammar backends are taken too.
OPTIONS: dict[str, Check] = {
    "dtype": one_of(Dtype),
    "device": device_name,
    "page_size": whole(1),
    "compute": one_of(Compute),
    "batch_invariant": flag,
    "max_model_len": or_none(whole(1)),
    "max_running_requests": whole(1),
    "max_tokens_per_step": or_none(whole(1)),
    "policy": registered(Policy),
    "policy_seed": or_none(whole(-(2**63))),
    "max_steps_waited": whole(1),
    "preemption": flag,
    "num_pages": or_none(whole(1)),
    "prefix_cache": or_none(one_of(PrefixCacheKind)),
    "eviction": registered(Eviction),
    "wait_for_prefix": or_none(whole(1)),
    "wait_below_match": whole(0),
    "grammar_backend": registered(GrammarBackend),
    "json_whitespace": one_of(Whitespace),
    "grammar_timeout_s": seconds,
    "jump_forward": flag,
}


@knows_other_names
@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model. ``EngineConfig()`` is the baseline: every option disabled.

    ``dtype``: "float32" or "bfloat16"; weights are converted when they are loaded.
    ``device``: a torch device name.
    ``page_size``: tokens in one page of the KV pool.
    ``compute``: how things are computed; each with ``batch_invariant`` off or on.
    "reference" is off: the calls and so the bits of transformers.
    "packed" stores each weight as its product wants it (``fast/products.py`` has the rule), computes with fewer
    operations (``fast/fused.py``) and reads a sequence where it lies (``fast/attention/consecutive.py``): on a CPU
    faster, with the same bits in bfloat16, in float32 others for large products.
    "fast" is "packed", and attention hands the query heads of one key-value head to the kernel as rows of one matrix,
    the decode rows of a step in few calls (``fast/attention/strided.py``): on a CPU several times faster in bfloat16,
    other bits now and then. With ``batch_invariant`` attention is the invariant one, as with "packed".
    "compiled" has packed weights too, and computes what lies between the products in loops compiled for the CPU
    (``fast/compiled``), in float32, equal to "reference" but for rounding: the fastest way for a small model.
    "triton" computes everything between the matrix products, attention and sampling with the kernels of
    ``mini_engine/kernels``: on NVIDIA GPUs, or anywhere in Triton's interpreter (TRITON_INTERPRET=1).
    ``batch_invariant``: off by default. On, the bits of a request's logits do not depend on what shares its batch, on
    how its prompt was cut into chunks, on the process or on the thread count; they are not those of transformers, so
    weights may be packed. A model is refused where this machine cannot keep that.
    ``max_model_len``: the most positions of a request, prompt and answer together. ``None``: as many as the model has,
    or fewer if the memory that is free has no room for them (``llm.fitted``).
    ``max_running_requests``: how many requests share a step; 1 is one after the other.
    ``max_tokens_per_step``: rows of a step, so that a long prompt is computed in chunks between others' tokens;
    ``None`` computes every prompt whole.
    ``policy``: the order of waiting requests (``scheduler.policy.POLICIES``); ``policy_seed`` is for "random".
    ``max_steps_waited``: a request that so many steps have passed over goes before all others, whatever the policy.
    ``preemption``: off, a request starts when its longest possible answer fits. On, it starts when an estimate fits,
    and when pages run out some request is sent back to wait and computed again.
    ``prefix_cache``: "radix" keeps the pages of what was computed, and requests that begin alike start from them.
    ``eviction``: who goes first when they are needed (``radix_cache.EVICTIONS``). ``wait_for_prefix``: a request waits
    while one computes so many more tokens of its beginning than it found, if it found at most ``wait_below_match``.
    ``grammar_backend``: what answers with a grammar are constrained by: "fsm", "xgrammar", "llguidance", "outlines",
    one that was registered, or "auto": for each grammar the first of fsm, llguidance and xgrammar that is installed and
    takes it. ``json_whitespace``: "spaced" as
    ``json.dumps`` writes it, "compact", or "any". ``grammar_timeout_s``: a request whose grammar takes longer fails.
    ``jump_forward``: text that the grammar forces is appended without a forward pass for each token.
    ``num_pages``: size of the KV pool; ``None`` gives room for ``max_running_requests`` of the longest requests, but no
    more than ``DEFAULT_POOL_TOKENS`` tokens or one longest request.
    """

    dtype: Dtype = "float32"
    device: str = "cpu"
    page_size: int = 16
    compute: Compute = "reference"
    batch_invariant: bool = False
    max_model_len: int | None = None
    max_running_requests: int = 1
    max_tokens_per_step: int | None = None
    policy: str = "fcfs"
    policy_seed: int | None = None
    max_steps_waited: int = 256
    preemption: bool = False
    num_pages: int | None = None
    prefix_cache: PrefixCacheKind | None = None
    eviction: str = "lru"
    wait_for_prefix: int | None = None
    wait_below_match: int = 32
    grammar_backend: str = "none"
    json_whitespace: Whitespace = "spaced"
    grammar_timeout_s: float = 60.0
    jump_forward: bool = False

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
        """Return the number of pages of the KV pool for ``model``: ``num_pages`` or its default."""
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
        for name, check in OPTIONS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.policy_seed is not None and self.policy != "random":
            raise ValueError(
                f"policy_seed is {self.policy_seed} and the policy {self.policy!r} draws nothing; leave it out"
            )
        if self.prefix_cache is None and (self.eviction != "lru" or self.wait_for_prefix is not None):
            raise ValueError(
                f"eviction is {self.eviction!r} and wait_for_prefix {self.wait_for_prefix}, but there is no prefix "
                "cache; set prefix_cache='radix', or leave them out"
            )
        check_grammar_options(self)
        check_ways_to_compute(self)


def check_ways_to_compute(config: EngineConfig) -> None:
    """Raise ``ValueError`` for a way to compute that the device or the dtype does not have."""
    on_cpu = is_cpu(config.device)
    if config.packs_weights and not on_cpu:
        raise ValueError(
            f"compute={config.compute!r} is for CPUs and the device is {config.device!r}; use compute='reference' "
            "there, or 'triton'"
        )
    if config.compute == "compiled" and config.dtype != "float32":
        raise ValueError(
            f"compute='compiled' computes in float32 and dtype is {config.dtype!r}; set dtype='float32', or "
            "compute='fast'"
        )
    if config.batch_invariant and not on_cpu and config.compute != "triton":
        raise ValueError(
            f"torch keeps batch_invariant=True on CPUs only and the device is {config.device!r}; "
            "set compute='triton', use device='cpu' or leave it off"
        )


def check_grammar_options(config: EngineConfig) -> None:
    """Raise ``ValueError`` for options of grammars that mean nothing without a backend."""
    changed = {"json_whitespace": config.json_whitespace != "spaced", "jump_forward": config.jump_forward}
    useless = [name for name, is_changed in changed.items() if is_changed]
    if config.grammar_backend == "none" and useless:
        raise ValueError(f"{useless[0]} is set, but there are no grammars; set grammar_backend, or leave it out")


def is_count(value: object) -> bool:
    """Whether ``value`` is a whole number of at least 1 (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_cpu(device: str) -> bool:
    """Whether the torch device of this name is the CPU, with a number or without."""
    return device.split(":", maxsplit=1)[0] == "cpu"
