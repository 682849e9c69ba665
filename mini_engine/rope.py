"""L1: rotary embeddings that a checkpoint stretches, so that the model reads longer texts than it was trained on.

Given to students. Each function makes the frequencies of one ``rope_type``, with the bits of transformers'
``modeling_rope_utils``. ``model.rotary_frequencies`` makes those that are not scaled.
"""

import math

import torch
from torch import Tensor

from mini_engine.config import ModelConfig, RopeScaling


def scaled_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, [D / 2] float32, and the factor of every cosine and sine.

    ``config.rope_scaling`` says how; it is not ``None``.
    """
    scaling, dim, theta = config.rope_scaling, config.head_dim, config.rope_theta
    assert scaling is not None, "frequencies that are not scaled are those of model.rotary_frequencies"
    match scaling.rope_type:
        case "linear":
            return 1.0 / powers(dim, theta) / scaling.factor, 1.0
        case "yarn":
            return yarn_frequencies(dim, theta, scaling), scaling.attention_factor
        case "llama3":
            return llama3_frequencies(1.0 / powers(dim, theta), scaling), 1.0


def powers(head_dim: int, theta: float) -> Tensor:
    """Return ``theta ** (2i / D)`` -> [D / 2]: the positions in which pair i turns by one radian."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def yarn_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Keep the fast pairs, divide the slow ones by the factor, and blend those between -> [D / 2].

    Source: YaRN (Peng et al., 2023), section 3.2.
    """
    low, high = (
        head_dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )  # the pair that turns so often within the positions of the training
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)  # [D / 2], 1: slow
    kept = 1 - divided
    slowest = powers(head_dim, theta)
    return 1.0 / (scaling.factor * slowest) * (1 - kept) + 1.0 / slowest * kept


def llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and blend those between. [D / 2] -> [D / 2].

    Source: Llama 3.1's ``apply_scaling``.
    """
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / scaling.factor, frequencies)
    kept = (length / wavelengths - low) / (high - low)
    blended = (1 - kept) * scaled / scaling.factor + kept * scaled
    between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
    return torch.where(between, blended, scaled)
