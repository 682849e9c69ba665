"""The endpoints for those who run the server, and for clients that look before they ask."""

from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from mini_engine import __version__
from mini_engine.server.errors import ApiError
from mini_engine.server.schema import DetokenizeBody, TokenizeBody
from mini_engine.server.service import Service


def add_operation(app: FastAPI, service: Service) -> None:
    """Add the endpoints. Mutates ``app``."""
    add_models(app, service)
    add_tokens(app, service)
    add_inside(app, service)
    engine = service.engine

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while requests are served, 503 otherwise."""
        engine.check_alive()
        if service.is_ending:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down")
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version."""
        return {"version": __version__}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the numbers of the server in Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def add_inside(app: FastAPI, service: Service) -> None:
    """Add the endpoints that look into the engine. Mutates ``app``."""
    engine = service.engine

    @app.post("/flush_cache")
    async def flush_cache() -> dict[str, int]:
        """Empty the prefix cache, but for what running requests use."""
        return {"num_pages_flushed": await engine.call(engine.engine.flush_cache)}

    @app.get("/get_server_info")
    async def get_server_info() -> dict[str, Any]:
        """Return how the engine is set up."""
        config = asdict(service.view.config)
        limits = asdict(service.limits)
        names = {"version": __version__, "model": service.model_name, "weight_bytes": service.view.weight_bytes}
        return names | config | limits | {"max_model_len": service.max_model_len}


def add_models(app: FastAPI, service: Service) -> None:
    """Add the endpoints about models: there is one. Mutates ``app``."""
    card = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "mini_engine",
        "max_model_len": service.max_model_len,
        "default_sampling_params": service.defaults,
    }

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the models."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """Describe a model."""
        service.check_model(model)
        return card


def add_tokens(app: FastAPI, service: Service) -> None:
    """Add the endpoints about the tokenizer. Mutates ``app``."""
    tokenizer = service.tokenizer

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Return the ids of a text, or of a chat as the model would read it."""
        service.check_model(body.model)
        if body.prompt is not None:
            ids = await run_in_threadpool(service.encode, body.prompt, body.add_special_tokens is not False)
        else:
            ids = await run_in_threadpool(service.encode_chat, body.messages or [], body, body.tools)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
        return answer | ({"token_strs": list(map(service.texts.text_of, ids))} if body.return_token_strs else {})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """Return the text of ids."""
        service.check_model(body.model)
        service.texts.check(body.tokens, service.vocab_size, "tokens")
        return {"prompt": str(tokenizer.decode(body.tokens))}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> JSONResponse:
        """Return what a client needs to render prompts itself."""
        return JSONResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": service.vocab_size,
                "chat_template": tokenizer.chat_template,
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "pad_token": tokenizer.pad_token,
            }
        )
