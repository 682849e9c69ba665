"""L5: the engine for servers: a thread steps the engine, and any number of coroutines wait for their own answers.

Nothing but this thread touches the engine. Coroutines hand it commands, which it carries out between two steps, and it
hands back what each step gave.

    coroutine ──submit, abort──► commands ──► thread: command, command, step, command, step …
    coroutine ◄──deltas, answers── event loop ◄──────────────────────────────┘ once for each step
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from mini_engine.device import give_threads_back
from mini_engine.engine import Engine, check_stream
from mini_engine.outputs import Delta, RequestOutput, StepOutput, best, without_logits
from mini_engine.sampler.driver import WorkerLostError, sample_params
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import NO_OPTIONS, Request, RequestOptions

FAILED_STEPS = 3  # so many steps that fail in a row, and the engine is given up

T = TypeVar("T")


class RequestRefusedError(ValueError):
    """A request that cannot be run because of what it asks; ``param`` names the parameter at fault, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """Say why."""
        super().__init__(message)
        self.param = param


class QueueFullError(RuntimeError):
    """As many requests wait as may; a later one may find room."""


class EngineDeadError(RuntimeError):
    """The engine was closed, or has failed and serves no request any more."""


def parameter_in(message: str) -> str | None:
    """Return the parameter that an error is about: messages of the engine begin with it."""
    first = message.split(" ", maxsplit=1)[0]
    if first in {each.name for each in fields(SamplingParams)}:
        return first
    return "prompt" if message.startswith(("the prompt", "a prompt")) else None


@dataclass
class Command:
    """What the engine's thread is to do between two steps."""

    action: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


class Handle:
    """A request while an ``AsyncEngine`` has it. Its answers are requests of the engine, with the ids ``names``.

    ``outputs`` has the answers that have ended. ``growing`` has all answers, to which the engine's thread adds: only
    the report about the prompt may be read there, once a delta has come.
    """

    def __init__(self, handle_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Wait for the answers that ``params`` ask for."""
        self.id = handle_id
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.names = [f"{handle_id}-{index}" for index in range(params.num_samples)]
        self.outputs: dict[str, RequestOutput] = {}
        self.growing: dict[str, RequestOutput] = {}
        self.unread: list[Delta] = []
        self.news = asyncio.Event()
        self.error: BaseException | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or len(self.outputs) == len(self.names)

    def take(self) -> list[Delta]:
        """Return what is new, without waiting. Raises ``EngineDeadError`` if the engine has failed. Mutates."""
        deltas = self.unread
        self.unread = []
        if not deltas and self.error is not None:
            raise self.error
        return deltas

    async def steps(self) -> AsyncIterator[list[Delta]]:
        """Yield all that is new, as often as there is something: as a rule one delta for each answer and step.

        Raises ``EngineDeadError`` if the engine fails. Leaving the loop does not abort the request.
        """
        while True:
            if deltas := self.take():
                yield deltas
            elif self.is_finished:
                return
            else:
                self.news.clear()
                await self.news.wait()

    async def results(self) -> list[RequestOutput]:
        """Wait for the end and return the ``n`` answers, the likeliest if more were generated.

        An answer that failed has ``finish_reason`` "error". Raises ``EngineDeadError`` if the engine fails.
        """
        async for _ in self.steps():
            pass
        return best([self.outputs[name] for name in self.names], self.params.n)

    async def result(self) -> RequestOutput:
        """Wait for the end of a request with one answer and return it."""
        return (await self.results())[0]


class AsyncEngine:
    """Serves requests to any number of coroutines of one event loop. ``engine`` steps in a thread of its own.

    A step that raises ends the requests that were running with ``finish_reason`` "error"; the engine goes on. If
    ``FAILED_STEPS`` fail in a row, or the engine cannot be mended, ``error`` says why and nothing is served any more.
    """

    def __init__(self, engine: Engine, max_waiting: int | None = None) -> None:
        """Take over ``engine``: only this object may use it from now on.

        ``max_waiting``: how many answers may wait for their first step, besides those that can run; ``None`` is no
        limit.
        """
        self.engine = engine
        self.max_waiting = max_waiting
        self.commands: SimpleQueue[Command | None] = SimpleQueue()  # None: end
        self.handles: dict[str, Handle] = {}
        self.owners: dict[str, Handle] = {}  # request of the engine -> handle
        # Called in the event loop after every step, with the answers that ended in it.
        self.watchers: list[Callable[[StepOutput, list[RequestOutput]], None]] = []
        self.error: BaseException | None = None
        self.thread: Thread | None = None
        self.numbers = count()

    # ---- in the event loop ----

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        handle_id: str | None = None,
    ) -> Handle:
        """Compile what the request needs, queue it and return its handle. The caller aborts it if it gives it up.

        Raises ``RequestRefusedError`` for a request that cannot be run, ``QueueFullError`` and ``EngineDeadError``.
        """
        self.check_alive()
        self.check_room(params.num_samples)
        handle = Handle(handle_id or f"request-{next(self.numbers)}", prompt_ids, params)
        if handle.id in self.handles:
            raise RequestRefusedError(f"there is a request {handle.id!r} already; give another id", "request_id")
        self.handles[handle.id] = handle
        self.owners |= dict.fromkeys(handle.names, handle)
        try:
            await self.prepare(params)
            await self.call(lambda: self.add(handle, prompt_ids, options))
        except BaseException as error:
            self.abort(handle.id)  # it may have been added while its caller was cancelled
            self.forget(handle)
            if isinstance(error, ValueError) and not isinstance(error, RequestRefusedError):
                raise RequestRefusedError(str(error), parameter_in(str(error))) from error
            raise
        return handle

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` if the engine serves nothing any more."""
        if fault := self.error or self.engine.worker.fault:
            raise EngineDeadError(f"the engine has ended: {fault}") from self.error

    def check_room(self, num_answers: int) -> None:
        """Raise ``QueueFullError`` if so many more answers would wait beyond the limit.

        Raises ``RequestRefusedError`` if there will never be room for them.
        """
        if self.max_waiting is None:
            return
        held = sum(len(handle.names) for handle in self.handles.values())
        limit = self.max_waiting + self.engine.scheduler.limits.max_running_requests
        if num_answers > limit:
            raise RequestRefusedError(f"{num_answers} answers are asked for at once, and at most {limit} run or wait")
        if held + num_answers > limit:
            raise QueueFullError(
                f"{held} answers run or wait and {num_answers} more would exceed the limit of {limit}; try again later"
            )

    async def prepare(self, params: SamplingParams) -> None:
        """Wait until the grammar of ``params`` is compiled. Raises ``RequestRefusedError`` if it is not."""
        if params.grammar is None:
            return
        kind = params.grammar[0]
        seconds = self.engine.driver.config.grammar_timeout_s
        try:
            compiled = await self.call(lambda: self.engine.constraints.prepare(params))
            if compiled is not None:  # others may wait for the same compile, so this one does not cancel it
                async with asyncio.timeout(seconds):
                    await asyncio.shield(asyncio.wrap_future(compiled))
        except TimeoutError:
            raise RequestRefusedError(
                f"the {kind} was not compiled within {seconds:g} s; simplify it, or raise grammar_timeout_s", kind
            ) from None
        except ValueError as error:
            raise RequestRefusedError(str(error), kind) from error

    def abort(self, handle_id: str) -> None:
        """End a request with ``finish_reason`` "abort" before the next step. Does nothing for one that has ended."""
        handle = self.handles.get(handle_id)
        if handle is not None and not handle.is_finished and self.error is None:
            for name in handle.names:
                self.post(partial(self.engine.abort, name))

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, options: RequestOptions = NO_OPTIONS
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of one request. Closing the iterator, or cancelling its task, aborts the request.

        Raises what ``submit`` does.
        """
        check_stream(params)
        handle = await self.submit(prompt_ids, params, options)
        try:
            async for deltas in handle.steps():
                for delta in deltas:
                    yield delta
        finally:
            self.abort(handle.id)

    async def call(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the engine's thread between two steps. Returns and raises what it does."""
        self.check_alive()
        return await asyncio.wrap_future(self.post(action))

    def post(self, action: Callable[[], T]) -> Future[T]:
        """Let the engine's thread run ``action`` between two steps. Starts the thread if it is not running. Mutates."""
        if self.thread is None:
            self.loop = asyncio.get_running_loop()
            give_threads_back()  # this thread has loaded the model, or will compute no more
            self.thread = Thread(target=self.run, name="engine", daemon=True)
            self.thread.start()
        command = Command(action)
        self.commands.put(command)
        return command.done

    def deliver(self, output: StepOutput, ended: list[RequestOutput]) -> None:
        """Hand out what a step gave, and the answers that ended with it. Mutates the handles."""
        touched: dict[str, Handle] = {}
        for delta in output.deltas:
            if delta.request_id in self.owners:  # its caller may have been cancelled
                handle = self.owners[delta.request_id]
                handle.unread.append(delta if delta.logits is None else without_logits(delta))
                touched[handle.id] = handle
        for answer in ended:
            if answer.request_id in self.owners:
                handle = self.owners[answer.request_id]
                handle.outputs[answer.request_id] = answer
                if handle.is_finished:
                    self.forget(handle)
        for handle in touched.values():
            handle.news.set()
        for watcher in self.watchers:
            watcher(output, ended)

    def forget(self, handle: Handle) -> None:
        """Hand out nothing to ``handle`` any more. Mutates."""
        self.handles.pop(handle.id, None)
        for name in handle.names:
            self.owners.pop(name, None)

    def give_up(self, error: BaseException) -> None:
        """Serve nothing any more, and let everything that waits raise an error. The thread has ended. Mutates."""
        self.error = self.error or error
        ended = EngineDeadError(f"the engine has ended: {error}")
        for handle in list(self.handles.values()):
            handle.error = ended
            handle.news.set()
            self.forget(handle)
        while not self.commands.empty():
            command = self.commands.get()
            if command is not None and command.done.set_running_or_notify_cancel():
                command.done.set_exception(ended)

    async def close(self) -> None:
        """End the thread, the engine and its ranks. Requests that have not ended raise ``EngineDeadError``."""
        if self.thread is not None:
            self.commands.put(None)
            await asyncio.get_running_loop().run_in_executor(None, self.thread.join)
        self.give_up(EngineDeadError("the engine was closed"))
        self.engine.close()
        self.engine.driver.close()

    # ---- in the engine's thread ----

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something, or report how a request has ended."""
        return self.engine.has_work or bool(self.engine.deltas)

    def run(self) -> None:
        """Carry out commands and step, until the end is commanded or the engine cannot go on."""
        failed = 0
        try:
            while self.carry_out_commands():
                if self.has_work:
                    failed = self.step(failed)
        except BaseException as error:
            with suppress(RuntimeError):  # the loop may be closed
                self.loop.call_soon_threadsafe(self.give_up, error)

    def carry_out_commands(self) -> bool:
        """Carry out all commands, waiting for one if there is no work; return whether to go on. Mutates."""
        wait = not self.has_work
        while wait or not self.commands.empty():
            wait = False
            command = self.commands.get()
            if command is None:
                return False
            if command.done.set_running_or_notify_cancel():
                try:
                    command.done.set_result(command.action())
                except Exception as error:
                    command.done.set_exception(error)
        return True

    def add(self, handle: Handle, prompt_ids: Sequence[int], options: RequestOptions) -> None:
        """Queue every answer of a request; they compute the prompt once. Raises ``ValueError``. Mutates."""
        siblings: list[Request] = []
        for name, params in zip(handle.names, sample_params(handle.params), strict=True):
            self.engine.add_request(prompt_ids, params, name, options, siblings)
            siblings.append(self.engine.entries[name].request)
            handle.growing[name] = self.engine.entries[name].output

    def step(self, failed: int) -> int:
        """Step once and hand out what came. Return how many steps have failed in a row, ``failed`` before this one.

        Raises what the step raised if it is the last that may fail. Mutates.
        """
        try:
            output = self.engine.step()
        except WorkerLostError:
            raise
        except Exception as error:
            if failed + 1 >= FAILED_STEPS:
                raise
            self.engine.end_running(f"a step of the engine failed: {error!r}")
            return failed + 1
        ended = [self.engine.take_output(d.request_id) for d in output.deltas if d.finish_reason is not None]
        self.loop.call_soon_threadsafe(self.deliver, output, ended)
        return 0
