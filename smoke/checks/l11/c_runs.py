"""The checks of whole models with rounded weights (L11.C): transformers with the same weights, and off means off.

Owns: a rounding of all weights of a model in NumPy, apart from the engine's, and transformers with what comes out.
"""

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoke.checks.l11.b_int4 import CENTRE, SIZE
from smoke.framework import peer
from smoke.framework.cases import ModelCase, embedded_case, prompts, random_case, random_ids
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences, remember

REGISTRY = Registry()
NAMES = ("GQA 6:2, tied", "MHA 3:3, untied, theta 1e6", "GQA 4:2, untied, odd sizes")
ROWS = (1, 16, 17, 64, 65)  # the last numbers that torch's kernels take, and the first that are unpacked for
TABLES = ("model.embed_tokens.weight", "lm_head.weight")  # in 8 bits always
WAYS = (("float32", "off"), ("bfloat16", "off"), ("float32", "int8"), ("float32", "int4"))
NEAR = {"int8": 0.02, "int4": 0.05}  # of logits: a weight between two ids may go either way


def models(seed: int) -> list[tuple[ModelCase, list[int]]]:
    """Return the models, and a text for each."""
    drawn = [random_case(name, seed) for name in NAMES]
    own = [*prompts(seed, 2)[0], *prompts(seed, 2)[1], *random_ids(200, ROWS[-1], seed)]
    return [(case, random_ids(case.vocab_size, ROWS[-1], seed)) for case in drawn] + [
        (embedded_case(), own[: ROWS[-1]])
    ]


def computed(case: ModelCase, ids: list[int], dtype: str, quantize: str) -> list[Tensor]:
    """Build the candidate's model and return the logits of texts of every length, the last row of each."""
    from mini_engine.attention.dense import DenseAttention, sdpa_attention
    from mini_engine.config import EngineConfig, ModelConfig
    from mini_engine.ways import build_plain

    engine = EngineConfig(dtype=dtype, quantize=quantize)  # type: ignore[arg-type]
    model: Any = build_plain(ModelConfig.from_hf(case.hf_config), case.weights(dtype), engine)
    attention = DenseAttention(sdpa_attention)
    with torch.inference_mode():
        return [model(torch.tensor(ids[:rows]), torch.arange(rows), attention)[-1].clone() for rows in ROWS]


def models_probe(seed: int) -> Values:
    """Run every model with its weights as they are, in both dtypes, and with 8 and with 4 bits."""
    from mini_engine.fast.quantized import linear_int4, linear_int8, quantize_int4, quantize_int8, unpack_int4

    x = torch.ones(1, SIZE)  # what is not written says so here: the engine would say that it has no kernels
    linear_int8(x, *quantize_int8(x))
    linear_int4(x, *quantize_int4(x))
    unpack_int4(torch.zeros(1, 1, 1, dtype=torch.uint8), True)
    return {
        f"{case.name}, {dtype}, {kind}": computed(case, ids, dtype, kind)
        for case, ids in models(seed)
        for dtype, kind in WAYS
    }


def rounded_weight(name: str, weight: Tensor, kind: str) -> Tensor:
    """Round a matrix in NumPy, with zeros behind rows whose length is no multiple of 32; norms stay."""
    if weight.dim() < 2:
        return weight
    columns = weight.shape[1]
    wide = np.pad(weight.numpy(), ((0, 0), (0, -columns % SIZE)))
    if kind == "int8" or name in TABLES:
        scales = np.abs(wide).max(-1, keepdims=True) / np.float32(127)
        found = np.rint(wide / np.where(scales > 0, scales, 1)).astype(np.float64) * scales
    else:
        groups = wide.reshape(len(wide), -1, SIZE)
        least = groups.min(-1, keepdims=True)
        scales = (groups.max(-1, keepdims=True) - least) / np.float32(15)
        zeros = least + np.float32(CENTRE) * scales
        ids = np.clip(np.rint((groups - zeros) / np.where(scales > 0, scales, 1)), -CENTRE, CENTRE - 1)
        found = (ids.astype(np.float64) * scales + zeros).reshape(len(wide), -1)
    return torch.from_numpy(found[:, :columns]).float()


def off_spec(seed: int) -> Values:
    """Ask transformers, every text whole; the last row of each."""
    return {
        f"{case.name}, {dtype}, {kind}": [peer.logits(case, dtype, "sdpa", ids[:rows])[-1] for rows in ROWS]
        for case, ids in models(seed)
        for dtype, kind in WAYS
        if kind == "off"
    }


def rounded_spec(seed: int) -> dict[str, Values]:
    """Let transformers compute with rounded weights; by kind."""
    found: dict[str, Values] = {kind: {} for kind in NEAR}
    for case, ids in models(seed):
        for kind, values in found.items():
            own = deepcopy(peer.model(case, "float32", "sdpa"))
            state = {name: rounded_weight(name, weight, kind) for name, weight in own.state_dict().items()}
            own.load_state_dict(state)
            with torch.no_grad():
                logits = [own(torch.tensor([ids[:rows]])).logits[0, -1] for rows in ROWS]
            values[f"{case.name}, float32, {kind}"] = logits
    return found


OFF, ROUNDED = remember(off_spec), remember(rounded_spec)


def models_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for bits where nothing is rounded, and for near logits where something is."""
    off = OFF(seed)
    failures = differences(off, {name: got[name] for name in off}, None)
    for kind, values in ROUNDED(seed).items():
        failures += differences(values, {name: got[name] for name in values}, NEAR[kind])
    return failures


REGISTRY.add(
    "L11.C.models",
    "Models with 8 and 4 bits give the logits of transformers with the same rounded weights, for one row and for many, "
    "and with quantize off those of transformers, to the bit: three random ones and the embedded one.",
    models_probe,
    models_verdict,
    needs=("L11.A",),
    seconds=60.0,
)
