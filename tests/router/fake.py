"""A worker without an engine: its answers are a function of the request, and it ends when a test wants it to.

``python -m uvicorn tests.router.fake:app`` runs it in a process of its own.
"""

import asyncio
import json


class EndedError(Exception):
    """What ends an application in the middle of an answer."""


class Fake:
    """An application. ``dies_after``: so many bytes of an answer. ``accent``: other workers write another text."""

    def __init__(self, accent="", pace=0.0):
        self.accent = accent
        self.pace = pace
        self.dies_after = None
        self.is_dead = self.is_silent = False
        self.engine_is_dead = False  # and the server says so
        self.is_hurt = False  # only the answer ends, and the worker lives on
        self.refuses = None  # a status and a body
        self.order = (0, 1)
        self.asked = []
        self.left = 0
        self.dropped, self.held = [], []
        self.whole = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return
        if self.is_dead:
            raise EndedError
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        try:
            await self.answer(scope["method"], scope["path"], headers, body, Writer(self, scope["path"], send))
        except asyncio.CancelledError:
            self.left += scope["path"] != "/worker_events"
            raise

    async def answer(self, method, path, headers, body, write):
        if path == "/worker_events":
            await self.events(write)
            return
        self.asked.append((method, path, headers, body))
        if path == "/metrics":
            await write.plain(200, b'# TYPE vllm:things counter\nvllm:things_total{model_name="tiny"} 3.0\n')
        elif path == "/flush_cache":
            await write.plain(200, b'{"num_pages_flushed": 2}')
        elif self.refuses is not None:
            await write.plain(*self.refuses)
        else:
            asked = json.loads(body)
            chunks = self.chunks(asked, headers.get("x-answer-identity", ""))
            if not asked.get("stream"):
                body = list(chunks)
                await asyncio.sleep(self.pace * len(body))
                await write.plain(200, b"".join(body))
            else:
                await write.start(200, b"text/event-stream")
                for chunk in chunks:
                    await asyncio.sleep(self.pace)
                    await write(chunk)
                await write(b"", more=False)
            self.whole += 1

    async def events(self, write):
        if self.engine_is_dead:
            await write.plain(503, b"the engine is dead")
            return
        await write.start(200, b"text/event-stream")
        while not self.engine_is_dead:
            if not self.is_silent:
                fields = {"running": 1, "waiting": 0, "dropped": self.dropped, "held": self.held}
                self.dropped, self.held = [], []
                await write(b"data: " + json.dumps(fields).encode() + b"\n\n")
            await asyncio.sleep(0.02)
            if self.is_dead:
                raise EndedError
        await write(b"", more=False)

    def chunks(self, asked, identity):
        """The events of an answer: words that depend on the prompt, for each choice."""
        head = f'{{"id":"cmpl-{identity}","object":"text_completion"'
        for word in range(asked.get("max_tokens", 16)):
            for index in self.order[: asked.get("n", 1)]:
                text = f"{asked['prompt']}-{index}-{word}{self.accent if word > 2 else ''}"
                yield f'data: {head},"choices":[{{"index":{index},"text":{json.dumps(text)}}}]}}\n\n'.encode()
        yield f'data: {head},"choices":[],"usage":{{"cached_tokens":{len(self.asked)}}}}}\n\ndata: [DONE]\n\n'.encode()


class Writer:
    """Writes an answer, and ends the application where it is told to."""

    def __init__(self, fake, path, send):
        self.fake = fake
        self.send = send
        self.left = None if path == "/worker_events" else fake.dies_after

    async def start(self, status, kind, *more):
        await self.send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]})

    async def plain(self, status, body):
        await self.start(status, b"application/json", (b"content-length", b"%d" % len(body)))
        await self(body, more=False)

    async def __call__(self, data, more=True):
        if self.left is not None and len(data) >= self.left:
            if self.left:
                await self.send({"type": "http.response.body", "body": data[: self.left], "more_body": True})
                await asyncio.sleep(0)
            self.fake.is_dead = not self.fake.is_hurt
            raise EndedError
        if self.left is not None:
            self.left -= len(data)
        await self.send({"type": "http.response.body", "body": data, "more_body": more})


app = Fake(pace=0.01)
