"""The ways to compute: for each word of ``EngineConfig.compute`` the model, the attention, the sampler and the pages.

Two ways need a library that an engine without them does without. It is imported when the way is asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mini_engine.attention.allocator import PageAllocator
from mini_engine.attention.paged import PagedAttention
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.driver import AttentionFactory
from mini_engine.fast.attention.consecutive import consecutive, grouped
from mini_engine.fast.fused import FusedQwen3
from mini_engine.fast.pages import PlacedAllocator
from mini_engine.fast.quantized_products import make_parts
from mini_engine.invariant.attention import InvariantAttention, query_rows
from mini_engine.llama import Llama, sdpa_with
from mini_engine.model import Attention, Qwen3
from mini_engine.ranks.split import Shards, build_split
from mini_engine.sampler.sampler import Sampler
from mini_engine.scheduler.scheduler import Allocator
from mini_engine.weights import Weights


@dataclass(frozen=True)
class Way:
    """One way to compute.

    ``model`` builds the model. ``attention`` returns what makes the attention of each step for it. ``sampler`` makes
    its sampler. ``places_pages``: the attention reads a sequence in place where its pages follow one another.
    """

    model: Callable[[ModelConfig, Weights, EngineConfig], Qwen3]
    attention: Callable[[EngineConfig, Any], AttentionFactory]
    sampler: Callable[[Any], Sampler] | None = None
    places_pages: bool = False


def build_plain(config: ModelConfig, weights: Weights, engine: EngineConfig) -> Qwen3:
    """Build L1's model, or its like of another family, with the projections of ``engine``. Empties ``weights``."""
    return build(Qwen3 if config.model_type == "qwen3" else Llama, config, weights, engine)


def build_fused(config: ModelConfig, weights: Weights, engine: EngineConfig) -> Qwen3:
    """Build the model with fewer operations, if its family has such a form. Empties ``weights``."""
    return build(FusedQwen3 if config.family.is_fused else Llama, config, weights, engine)


def build(kind: type[Qwen3], config: ModelConfig, weights: Weights, engine: EngineConfig) -> Qwen3:
    """Build a model of this ``kind``, or what one rank has of it. Empties ``weights``."""
    if isinstance(weights, Shards):
        return build_split(kind, weights, engine)
    return kind(config, *make_parts(weights, engine))


def unless_invariant(
    attention: AttentionFactory, alone: Callable[..., Attention]
) -> Callable[[EngineConfig, Qwen3], AttentionFactory]:
    """Return the choice of ``attention``, and of the invariant one with ``batch_invariant``.

    For a model that multiplies its scores by a number of its own the choice is ``alone``, which takes a kernel.
    """

    def choose(engine: EngineConfig, model: Qwen3) -> AttentionFactory:
        cfg = model.config
        if not engine.batch_invariant:
            scale = cfg.attention_multiplier
            return attention if scale is None else partial(alone, kernel=sdpa_with(scale))
        query_rows(cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, model.embedding.dtype)  # or raises
        return partial(InvariantAttention, num_attention_heads=cfg.num_attention_heads, scale=cfg.attention_multiplier)

    return choose


def compiled() -> Way:
    """Return the way over loops that Numba compiles, between packed products."""
    from mini_engine.fast.compiled.driver import build_model, choose_attention

    return Way(build_model, choose_attention, places_pages=True)


def triton() -> Way:
    """Return the way over L8's kernels."""
    from mini_engine.kernels.driver import build_model, choose_attention, make_sampler

    return Way(build_model, choose_attention, make_sampler)


WAYS: Mapping[str, Callable[[], Way]] = {
    "reference": lambda: Way(build_plain, unless_invariant(PagedAttention, PagedAttention)),
    "packed": lambda: Way(build_fused, unless_invariant(consecutive, consecutive), places_pages=True),
    "fast": lambda: Way(build_fused, unless_invariant(grouped, consecutive), places_pages=True),
    "compiled": compiled,
    "triton": triton,
}
# library -> its name in words, the extra that installs it
LIBRARIES = {"triton": ("Triton (built for Linux alone)", "kernels"), "numba": ("Numba", "compiled")}


def way_of(engine: EngineConfig) -> Way:
    """Return the way that ``engine`` asks for. Raises ``ValueError`` if its library is not installed."""
    try:
        return WAYS[engine.compute]()
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        title, extra = LIBRARIES[error.name]
        raise ValueError(
            f"compute={engine.compute!r} needs {title}, which is not installed; pip install 'mini-engine[{extra}]', or "
            "choose another way to compute"
        ) from None


def make_allocator(engine: EngineConfig) -> Callable[[int], Allocator]:
    """Return what makes the allocator of a pool of so many pages."""
    if way_of(engine).places_pages:
        return lambda num_pages: PlacedAllocator(num_pages, num_pages // engine.max_running_requests)
    return PageAllocator
