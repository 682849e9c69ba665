"""What a token looked at: the attention of one layer, from a forward pass of its own.

The engine's thread computes it between two steps, because nothing else may run the model. It touches no page and no
request, so that answers keep their bits and only wait, as they would for a prompt of as many tokens.
"""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Request
from pydantic import Field
from torch import Tensor

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.llama import sdpa_with
from mini_engine.model import Qwen3
from mini_engine.server.errors import ApiError
from mini_engine.server.schema import Body
from mini_engine.server.service import Service
from mini_engine.server.stream import race

MOST_TOKENS = 1024


class AttentionBody(Body):
    """``POST /v1/attention``: what the token at ``position`` of ``prompt`` looked at; by default its last one."""

    model: str | None = None
    prompt: Annotated[str | list[int], Field(min_length=1)]
    layer: Annotated[int, Field(ge=0)]
    position: Annotated[int | None, Field(ge=0)] = None


class Recorder(DenseAttention):
    """Attends as ``DenseAttention``, and keeps the weights of the last token in one layer."""

    def __init__(self, layer: int, scale: float | None = None) -> None:
        """Keep those of ``layer``. ``scale``: the factor of scores, ``None`` for 1 / sqrt(D)."""
        super().__init__(sdpa_attention if scale is None else sdpa_with(scale))
        self.layer, self.scale = layer, scale
        self.weights: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Mutates ``weights``."""
        if layer == self.layer:
            self.weights = mean_weights(q[-1], k, self.scale)
        return super().__call__(layer, q, k, v)


def mean_weights(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Return the softmax weights of one query, averaged over heads. ``q`` [Hq, D], ``k`` [T, Hkv, D] -> [T] float32.

    ``scale``: the factor of scores, ``None`` for 1 / sqrt(D).
    """
    grouped = q.float().view(k.shape[1], -1, q.shape[1])  # [Hkv, Hq / Hkv, D]
    scores: Tensor = grouped @ k.float().permute(1, 2, 0) * (scale or q.shape[1] ** -0.5)  # [Hkv, Hq / Hkv, T]
    return scores.softmax(-1).mean((0, 1))


@torch.inference_mode()
def attention_of_last(model: Qwen3, token_ids: Sequence[int], layer: int) -> list[float]:
    """Return how much the last of T tokens looks at each of them in ``layer``, averaged over heads: T shares of 1.

    Raises ``ApiError`` if the model, a student's perhaps, never asks for the attention of that layer, or gives NaN.
    """
    ids = torch.tensor(token_ids, device=model.embedding.device)
    recorder = Recorder(layer, model.config.attention_multiplier)
    model.hidden_states(ids, torch.arange(len(ids), device=ids.device), recorder)
    weights = recorder.weights
    if weights is None or not weights.isfinite().all():
        fault = "is never asked for by its hidden_states" if weights is None else "is not finite"
        message = f"the model of this engine is at fault: the attention of layer {layer} {fault}"
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "layer")
    return weights.tolist()


def add_attention(app: FastAPI, service: Service) -> None:
    """Add the endpoint. Mutates ``app``."""
    engine = service.engine
    turn = asyncio.Lock()  # the engine steps between two of these passes

    @app.post("/v1/attention")
    async def attention(body: AttentionBody, request: Request) -> dict[str, Any]:
        """Return what a token looked at in one layer, averaged over heads."""
        ids = sequence_of(service, body)

        async def weights() -> list[float]:
            async with turn:
                return await engine.call(lambda: attention_of_last(engine.engine.driver.model, ids, body.layer))

        return {"layer": body.layer, "position": len(ids) - 1, "weights": await race(request.receive, weights())}


def sequence_of(service: Service, body: AttentionBody) -> list[int]:
    """Return the ids up to the token that is asked for. Raises ``ApiError``."""
    service.check_model(body.model)
    if (ranks := service.view.config.tensor_parallel) > 1:
        raise refused(f"tensor_parallel is {ranks}, and attention is shown by one process; serve without it", "layer")
    num_layers = service.view.model.num_hidden_layers
    if body.layer >= num_layers:
        raise refused(f"layer is {body.layer}; the model has the layers 0 to {num_layers - 1}", "layer")
    ids = service.encode(body.prompt)
    position = len(ids) - 1 if body.position is None else body.position
    if not 0 <= position < len(ids):
        raise refused(f"position is {position}; the prompt has the tokens 0 to {len(ids) - 1}", "position")
    most = min(MOST_TOKENS, service.max_model_len)
    if position >= most:
        raise refused(
            f"position is {position}, and attention is computed for the first {most} tokens alone; choose one of 0 to "
            f"{most - 1}",
            "position",
        )
    return ids[: position + 1]


def refused(message: str, param: str) -> ApiError:
    """Return the error of a request that asks for what is not there."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param)
