"""The client that the router asks servers with: what it reads, when it waits, which connections it uses again."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from mini_engine.router import servers
from mini_engine.router.servers import HttpWorker
from mini_engine.router.workers import Asked, WorkerGoneError

from .test_front import run

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@asynccontextmanager
async def listening(answer):
    """A server that lets ``answer(reader, writer)`` do what it wants for each connection; yields a worker."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    worker = HttpWorker("w", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        yield worker
        await worker.close()


async def body_of(worker, method="GET"):
    async with worker.answer(Asked(method, "/")) as answer:
        return b"".join([piece async for piece in answer.pieces])


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_a_long_answer_is_whole_and_a_slow_reader_holds_it_back():
    piece = bytes(range(256)) * 256
    number = 400
    num_written = 0

    async def answer(reader, writer):
        nonlocal num_written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for _ in range(number):
            writer.write(chunk(piece))
            await writer.drain()
            num_written += 1
        writer.write(chunk(b""))

    async def test():
        async with listening(answer) as worker, worker.answer(Asked("GET", "/")) as answered:
            await asyncio.sleep(0.5)
            assert num_written * len(piece) < 16 * 2**20 < number * len(piece)
            assert b"".join([each async for each in answered.pieces]) == piece * number

    run(test())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        HEAD + chunk(b"half"),
        b"SSH-2.0-OpenSSH_9.6\r\n",
        HEAD + b"zz\r\n",
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(said):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    async def test():
        async with listening(answer) as worker:
            with pytest.raises(WorkerGoneError):
                await body_of(worker)
        with pytest.raises(WorkerGoneError, match="cannot be reached"):
            await body_of(worker)

    run(test())


def test_connections_stay_open_for_a_while(monkeypatch):
    asked = []

    async def answer(reader, writer):
        number = len(set(asked))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                asked.append(number)
                writer.write(SHORT)

    async def test():
        async with listening(answer) as worker:
            assert [await body_of(worker) for _ in range(3)] == [b"hi"] * 3
            monkeypatch.setattr(servers, "IDLE_S", 0.0)
            assert await body_of(worker) == b"hi"
            assert asked == [0, 0, 0, 1]
            monkeypatch.setattr(servers, "IDLE_S", 60.0)
            async with worker.answer(Asked("GET", "/")):  # left without reading
                pass
            assert not worker.busy

    run(test())


def test_a_server_that_wants_no_more_is_asked_over_a_new_connection():
    number = 0

    async def answer(reader, writer):
        nonlocal number
        number += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SHORT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        writer.close()

    async def test():
        async with listening(answer) as worker:
            assert [await body_of(worker) for _ in range(3)] == [b"hi"] * 3
            assert number == 3

    run(test())


def test_an_answer_that_nobody_read_does_not_stop_the_connection():
    long = bytes(300_000)

    async def answer(reader, writer):
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(long), long))

    async def test():
        async with listening(answer) as worker:
            for _ in range(3):
                async with worker.answer(Asked("GET", "/")):
                    (connection,) = worker.busy
                    await until(lambda: connection.is_whole)  # noqa: B023
                assert len(worker.idle) == 1
            assert await body_of(worker) == long

    run(test())


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_connection_that_is_closing_is_asked_nothing():
    async def answer(reader, writer):
        await reader.read()

    async def test():
        async with listening(answer) as worker:
            connection = await worker.connect()
            connection.transport.abort()
            await asyncio.sleep(0)
            connection.ask(Asked("GET", "/"), b"w")
            with pytest.raises(WorkerGoneError):
                await asyncio.wait_for(connection.start(), 2)

    run(test())


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_what_comes_before_the_answer_is_left_out(pause):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for status in (b"100 Continue", b"103 Early Hints\r\nLink: </a>"):
            writer.write(b"HTTP/1.1 %b\r\n\r\n" % status)
            await asyncio.sleep(pause)
        writer.write(SHORT)

    async def test():
        async with listening(answer) as worker, worker.answer(Asked("GET", "/")) as answered:
            assert (answered.status, answered.headers) == (200, [(b"content-length", b"2")])
            assert b"".join([piece async for piece in answered.pieces]) == b"hi"

    run(test())


def test_a_target_passes_byte_for_byte():
    seen = []

    async def answer(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(SHORT)

    async def test():
        async with listening(answer) as worker, worker.answer(Asked("GET", "/a?b=\xe9")):
            assert seen[0].startswith(b"GET /a?b=\xe9 HTTP/1.1\r\n")

    run(test())
