"""The driver of L4 over compiled loops.

Owns: putting model and attention together. Must not know: prompts, checkpoints.
"""

from torch import Tensor

from mini_engine.attention.metadata import BatchInputs
from mini_engine.attention.pool import KVPool
from mini_engine.compiled.attention import CompiledAttention
from mini_engine.compiled.model import CompiledQwen3
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.linear import make_projections
from mini_engine.model import Attention
from mini_engine.sampler.driver import SamplingDriver


class KernelDriver(SamplingDriver):
    """``SamplingDriver`` whose steps are computed by loops; everything that is decided is decided as there."""

    def attention(self, batch: BatchInputs, pool: KVPool) -> Attention:
        """Return the loops' attention for one step; with ``batch_invariant`` it is all theirs."""
        kernel = None if self.config.batch_invariant else self.kernel
        return CompiledAttention(pool, batch.metadata, self.model.config.num_attention_heads, kernel)


def build_kernel_model(config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig) -> CompiledQwen3:
    """Build the model with the projections that ``engine`` asks for. Consumes the dictionary."""
    return CompiledQwen3(config, weights, make_projections(engine))
