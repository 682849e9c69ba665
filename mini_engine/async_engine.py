"""L5: the engine for servers: many coroutines wait for their own tokens while one thread steps the engine.

Nothing touches the engine while it steps.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from mini_engine.engine import Engine
from mini_engine.outputs import Delta
from mini_engine.sampler.params import SamplingParams


class AsyncEngine:
    """Serves ``stream`` to any number of coroutines of one event loop.

    A step runs in a thread of its own, so the loop stays free; a lock keeps additions and aborts between two steps.
    The stepping task lives as long as there is work and is started again by the next request.
    """

    def __init__(self, engine: Engine) -> None:
        """Take over ``engine``: only this object may step it from now on."""
        self.engine = engine
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.lock = asyncio.Lock()
        self.queues: dict[str, asyncio.Queue[Delta | BaseException]] = {}
        self.stepping: asyncio.Task[None] | None = None

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Delta]:
        """Yield the deltas of one request. Closing the iterator, or cancelling its task, aborts the request.

        Raises ``ValueError`` for a request that cannot be run, and whatever made a step fail.
        """
        async with self.lock:
            name = self.engine.add_request(prompt_ids, params)
            queue = self.queues[name] = asyncio.Queue()
        if self.stepping is None or self.stepping.done():
            self.stepping = asyncio.create_task(self.step_while_there_is_work())
        try:
            while True:
                delta = await queue.get()
                if isinstance(delta, BaseException):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            async with self.lock:
                self.queues.pop(name, None)
                self.engine.abort(name)
                self.engine.entries.pop(name, None)

    async def step_while_there_is_work(self) -> None:
        """Step and hand out deltas until no request waits or runs. A failed step ends every stream with its error."""
        loop = asyncio.get_running_loop()
        try:
            while self.engine.has_work:
                async with self.lock:
                    output = await loop.run_in_executor(self.thread, self.engine.step)
                for delta in output.deltas:
                    if delta.request_id in self.queues:
                        self.queues[delta.request_id].put_nowait(delta)
                await asyncio.sleep(0)  # a coroutine that waits for the lock goes first
        except Exception as error:  # every request has a stream, and every stream raises it
            for queue in self.queues.values():
                queue.put_nowait(error)

    async def close(self) -> None:
        """Stop stepping, end the thread and close the engine. Streams that are still open get no more deltas."""
        if self.stepping is not None:
            self.stepping.cancel()
            await asyncio.gather(self.stepping, return_exceptions=True)
        self.thread.shutdown(wait=True)
        self.engine.close()
