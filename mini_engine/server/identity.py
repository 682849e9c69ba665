"""The ids and the time that an answer carries.

A router fixes them with a header, so that the same request, sent again to another server, is answered with the same
bytes. Without it they are new in every answer.
"""

import random
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from uuid import uuid4

from mini_engine.server.errors import ApiError

HEADER = b"x-answer-identity"
FORM = re.compile(rb"(\d{1,12}\.\d{1,6})-([0-9a-f]{32})")


@dataclass(frozen=True)
class Identity:
    """Of one answer: ``created`` in seconds since 1970, and what its ids are drawn from."""

    created: float
    ids: random.Random


IDENTITY: ContextVar[Identity | None] = ContextVar("identity", default=None)  # of the request that is answered


def make_header() -> bytes:
    """Return the header's value for a new answer: seconds since 1970, and 32 hexadecimal digits."""
    return f"{time.time():.6f}-{uuid4().hex}".encode()


def read_header(value: bytes) -> Identity:
    """Return what a header fixes. Raises ``ApiError``."""
    found = FORM.fullmatch(value)
    if found is None:
        name = HEADER.decode()
        raise ApiError(HTTPStatus.BAD_REQUEST, f"{name} is {value!r}; send SECONDS.FRACTION-32HEXDIGITS, or leave it")
    return Identity(float(found[1]), random.Random(found[2]))


def new_id() -> str:
    """Return the next id of the answer, 32 hexadecimal digits."""
    identity = IDENTITY.get()
    return uuid4().hex if identity is None else f"{identity.ids.getrandbits(128):032x}"


def created() -> float:
    """Return when the answer was begun, in seconds since 1970."""
    identity = IDENTITY.get()
    return time.time() if identity is None else identity.created
