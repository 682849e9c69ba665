"""What goes wrong, as clients of OpenAI's interface understand it: a status and an ``error`` object."""

import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mini_engine.async_engine import EngineDeadError, QueueFullError, RequestRefusedError

RETRY_AFTER_S = 1
API_NAMES = {  # parameter of the engine -> of the interface
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}


class ApiError(Exception):
    """An answer that is an error. ``param`` names the field of the request that is at fault, if one is."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """Say what is wrong; ``status`` is that of HTTP."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.message = message.encode(errors="replace").decode()  # it may quote half a surrogate pair

    @property
    def body(self) -> dict[str, Any]:
        """The ``error`` object."""
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}.get(self.status, kind)
        code = self.code or (None if self.status == HTTPStatus.BAD_REQUEST else HTTPStatus(self.status).name.lower())
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    @property
    def response(self) -> JSONResponse:
        """The answer."""
        headers = {}
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def bad_request(error: ValueError, names: dict[str, str] | None = None) -> ApiError:
    """Return what the engine refused as the client's fault; ``names``: parameters of the engine as fields.

    The message speaks of the fields too.
    """
    message = str(error)
    names = (names or {}) | API_NAMES
    param = error.param if isinstance(error, RequestRefusedError) else None
    if param is None:  # a message begins with its parameter, or names it
        param = next((word for word in re.findall(r"\w+", message) if word in names), None)
    for ours, theirs in API_NAMES.items():
        message = message.replace(ours, theirs)
    return ApiError(HTTPStatus.BAD_REQUEST, message, names.get(param or "", param))


def as_api_error(error: BaseException) -> ApiError:
    """Return any error as an answer: the client's fault, a full queue, a dead engine, or a fault of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefusedError):
        return bad_request(error)
    if isinstance(error, QueueFullError):
        return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"the server failed: {error!r}")


def validation_error(error: RequestValidationError) -> ApiError:
    """Return what a body lacks or has too much, in one sentence that names the first field at fault."""
    # The innermost fault says most; of several, one about a value, then an unknown field, which may be a misspelt one.
    order = {"literal_error": 0, "extra_forbidden": 1}
    first, *others = sorted(error.errors(), key=lambda each: (-len(each["loc"]), order.get(each["type"], 2)))
    if first["type"] == "json_invalid":
        return ApiError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    name = field_of(first)
    said = [str(first["msg"]).removeprefix("Value error, ")]
    said += [str(other["msg"]) for other in others if field_of(other) == name]  # of a field that can be many things
    about = re.match(r"(\w+) (is|are) ", said[0])
    if first["type"] == "extra_forbidden":
        message = f"{name} is not a field that this server knows; leave it out"
    elif name is None and about:  # a rule of ours, which begins with the field
        name, message = about[1], said[0]
    else:
        message = f"{name or 'the body'}: {', or '.join(dict.fromkeys(said))}"
    return ApiError(HTTPStatus.BAD_REQUEST, message, name)


def field_of(error: dict[str, Any]) -> str | None:
    """Return the field that a fault is in, as a path, without pydantic's names of the alternatives of a union."""
    parts = [str(part) for part in error["loc"] if part not in ("body", "query", "path")]
    return ".".join(part for part in parts if not re.search(r"^(str|int|dict)$|\[|^[A-Z]", part)) or None


def add_handlers(app: FastAPI) -> None:
    """Answer every error with an ``error`` object. Mutates ``app``."""

    async def known(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return validation_error(error).response

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if message == HTTPStatus(error.status_code).phrase:
            message = f"{request.method} {request.url.path}: {message.lower()}"
        response = ApiError(error.status_code, message).response
        response.headers.update(error.headers or {})
        return response

    for kind in (ApiError, RequestRefusedError, QueueFullError, EngineDeadError, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
