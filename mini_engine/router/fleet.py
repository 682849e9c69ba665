"""The workers of a router: which of them are there, how busy they are, and which one takes a request."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any
from zlib import crc32

from mini_engine.router.policy import NoWorker, PrefixPolicy
from mini_engine.router.reply import whole_events
from mini_engine.router.workers import Asked, Headers, Worker, WorkerBusyError, WorkerGoneError
from mini_engine.server.errors import ApiError

SILENT_S = 5.0  # a worker says every second that it is alive
AGAIN_S = 0.5  # so long after it was lost one looks for it again
FIRST_S = 10.0  # the router begins without workers that have not answered by then
PATIENCE_S = 30.0  # a request that has lost its worker waits so long for another
LOG = logging.getLogger("uvicorn.error")


@dataclass
class Link:
    """A worker from the moment when it is reached until it is lost."""

    running: int = 0
    waiting: int = 0


class Fleet:
    """Workers by name. ``links`` has those that are there; ``lost`` says why another is not."""

    def __init__(self, workers: Iterable[Worker], policy: PrefixPolicy, headers: Headers = ()) -> None:
        """Let ``policy`` choose among ``workers``. ``headers``: of the router's own requests, with a key perhaps."""
        self.workers = {worker.name: worker for worker in workers}
        self.policy = policy
        self.headers = headers
        self.links: dict[str, Link] = {}
        self.lost = dict.fromkeys(self.workers, "not reached yet")
        self.drained = set[str]()
        self.num_requests, self.num_lost = (dict.fromkeys(self.workers, 0) for _ in range(2))  # passed on; of them lost

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Keep in touch with all workers. Begins when each was looked for once."""
        looked = {name: asyncio.Event() for name in self.workers}
        tasks = [asyncio.create_task(self.watch(self.workers[name], own)) for name, own in looked.items()]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    for own in looked.values():
                        await own.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(worker.close() for worker in self.workers.values()), return_exceptions=True)

    async def watch(self, worker: Worker, looked: asyncio.Event) -> None:
        """Listen to a worker, again and again. Mutates."""
        while True:
            try:
                await self.listen(worker, looked)
                reason = "it is about to end"
            except WorkerGoneError as error:
                reason = str(error)
            except Exception as error:  # it hangs, its engine is dead, or it says what no router understands
                silent = f"it has not said for {SILENT_S:g} s that it is alive"
                reason = silent if isinstance(error, TimeoutError) else repr(error)
                await worker.close()
            self.lose(worker.name, reason)
            looked.set()
            await asyncio.sleep(AGAIN_S)

    def lose(self, name: str, reason: str) -> None:
        """Give a worker no request until it says again that it is alive. Mutates."""
        self.policy.remove(name)
        if self.links.pop(name, None) is not None:
            LOG.warning("%s is lost: %s", name, reason)
        self.lost[name] = reason

    async def listen(self, worker: Worker, looked: asyncio.Event) -> None:
        """Take in what a worker says, until it says no more. Raises an error if that is wrong. Mutates."""
        async with worker.answer(Asked("GET", "/worker_events", self.headers)) as answer:
            if answer.status != HTTPStatus.OK:
                body = b"".join([piece async for piece in answer.pieces])
                raise RuntimeError(f"GET /worker_events was answered with {answer.status}: {body[:500]!r}")
            events = whole_events(answer.pieces)
            seconds = link = None
            while True:
                async with asyncio.timeout(seconds):
                    said = await anext(events, b"")
                if not said:
                    return
                if self.links.get(worker.name) is not link:  # a request has lost it: it is to tell all again
                    raise WorkerGoneError(self.lost[worker.name])
                self.hear(worker.name, said)
                link = self.links.get(worker.name)
                looked.set()
                seconds = SILENT_S

    def hear(self, name: str, said: bytes) -> None:
        """Take in one event. Raises ``WorkerGoneError`` for an error. Mutates."""
        if said.startswith(b":"):  # a comment, which says that it is alive
            return
        if not said.startswith(b"data: "):
            raise WorkerGoneError(said.decode(errors="replace"))
        fields = json.loads(said.removeprefix(b"data: "))
        if name not in self.links:
            LOG.info("%s is there", name)
            self.links[name] = Link()
            self.policy.add(name)
            if name in self.drained:
                self.policy.drain(name)
        self.links[name].running = fields["running"]
        self.links[name].waiting = fields["waiting"]
        for each in fields["dropped"]:
            kept = in_tree_of(each["key"], each["tokens"][: each["kept"]])
            self.policy.dropped(name, in_tree_of(each["key"], each["tokens"]), len(kept))
        for each in fields["held"]:
            self.policy.held(name, in_tree_of(each["key"], each["tokens"]))

    async def place(self, tokens: Sequence[int], failed: set[str]) -> str:
        """Return the worker for a prompt. Raises ``ApiError`` if there is none.

        ``failed``: those that were lost with it. If there were any, it waits for another, or for these to come back.
        """
        end = time.monotonic() + (PATIENCE_S if failed else 0)
        without = set(failed)
        while True:
            try:
                return self.policy.choose(tokens, without)
            except NoWorker as error:
                if time.monotonic() >= end:
                    raise self.none_left() from error
            await asyncio.sleep(AGAIN_S)
            without.clear()  # it may be back

    def has_other(self, asked: set[str]) -> bool:
        """Whether a worker takes requests that is none of ``asked``."""
        return any(name not in self.drained for name in self.links.keys() - asked)

    def none_left(self) -> ApiError:
        """Return the error of a request that no worker can take."""
        states = ", ".join(f"{name} {about['state']}" for name, about in self.states().items())
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"no worker can take the request ({states}); start one, or let one that drains go on with POST "
            "/workers/NAME/resume. GET /health says more",
        )

    @contextmanager
    def turn(self, name: str, tokens: Sequence[int]) -> Iterator[None]:
        """Count a request that is with a worker. Mutates."""
        link = self.links[name]
        self.num_requests[name] += 1
        self.policy.begin(name, tokens)
        try:
            yield
        except WorkerGoneError as error:
            self.num_lost[name] += 1
            if self.links.get(name) is link and not isinstance(error, WorkerBusyError):
                self.lose(name, str(error))
            raise
        finally:
            if self.links.get(name) is link:  # or it was lost meanwhile, and its queue was forgotten
                self.policy.end(name, tokens)

    def set_drained(self, name: str, drained: bool) -> dict[str, Any]:
        """Give a worker no new request, or again some; return its state. Raises ``ApiError`` for an unknown one."""
        if name not in self.workers:
            raise ApiError(HTTPStatus.NOT_FOUND, f"there is no worker {name!r}; there are {', '.join(self.workers)}")
        (self.drained.add if drained else self.drained.discard)(name)
        if name in self.links:
            (self.policy.drain if drained else self.policy.resume)(name)
        return self.state(name)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return whether each worker is up, draining or down, with its requests, or why it is lost."""
        return {name: self.state(name) for name in self.workers}

    def state(self, name: str) -> dict[str, Any]:
        """Return the state of one worker."""
        link = self.links.get(name)
        if link is None:
            return {"state": "down", "reason": self.lost[name]}
        return {"state": "draining" if name in self.drained else "up", **asdict(link)}


def in_tree_of(key: str | None, tokens: Sequence[int]) -> Sequence[int]:
    """Return ids as the policy knows them: what a prefix cache keeps under a key of its own begins with a mark."""
    return tokens if key is None else [-1 - (crc32(key.encode()) & 0x7FFFFFFF), *tokens]
