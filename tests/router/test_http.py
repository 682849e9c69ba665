"""Workers that are servers: processes that are killed, and two engines behind one router."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import httpcore
import httpx
import pytest
from openai import OpenAI

from mini_engine.router import fleet as fleets
from mini_engine.router.fleet import Fleet
from mini_engine.router.front import create_front
from mini_engine.router.policy import PrefixPolicy
from mini_engine.router.servers import HttpWorker
from mini_engine.server.life import make_server
from tests.server.conftest import serving

from .conftest import Router
from .test_front import BODY, PATH, alone, identity_in, run, without_counts

STORY = "Once upon a time there was a fox named Mila, and she met an owl who lived alone in the old barn."


@contextmanager
def fake_server():
    """A worker without an engine, in a process of its own; yields the process and its URL."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{own.getsockname()[1]}"
    command = [sys.executable, "-m", "uvicorn", "tests.router.fake:app", "--port", url.rpartition(":")[2]]
    with subprocess.Popen([*command, "--log-level", "critical", "--http", "httptools"]) as process:
        try:
            while True:
                assert process.poll() is None
                try:
                    httpcore.request("POST", f"{url}/flush_cache")
                    break
                except httpcore.NetworkError:
                    time.sleep(0.05)
            yield process, url
        finally:
            process.kill()


@pytest.fixture
def fake_servers():
    with ExitStack() as stack:
        yield [stack.enter_context(fake_server()) for _ in range(2)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("stream", [True, False])
def test_a_process_that_ends_or_hangs_loses_no_answer(fake_servers, reader, monkeypatch, how, stream):
    async def test():
        monkeypatch.setattr(fleets, "SILENT_S", 0.5)
        router = Router([HttpWorker(f"w{n}", url) for n, (_, url) in enumerate(fake_servers)], reader)
        async with router.fleet.watched():
            body = BODY | {"stream": stream, "max_tokens": 60}
            asking = [asyncio.create_task(router.ask("POST", PATH, body)) for _ in range(6)]
            await router.until(lambda: router.fleet.num_requests["w0"] > 2)
            await asyncio.sleep(0.2)
            os.kill(fake_servers[0][0].pid, how)
            for answer in await asyncio.gather(*asking):
                _, _, got = answer
                assert without_counts(got) == without_counts(await alone(body, identity_in(got)))
            assert router.fleet.state("w0")["state"] == "down"
            assert router.fleet.num_lost["w0"] >= 3
            os.kill(fake_servers[0][0].pid, signal.SIGCONT)
            if how == signal.SIGSTOP:
                await router.until(lambda: "w0" in router.fleet.links)

    run(test())


class Routed:
    """A router that listens, in a thread, before servers."""

    def __init__(self, urls, reader):
        fleet = Fleet([HttpWorker(f"w{n}", url) for n, url in enumerate(urls)], PrefixPolicy())
        self.server = make_server(create_front(fleet, reader), "127.0.0.1", 0, log_level="critical")
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def engines():
    with serving() as one, serving() as two:
        yield one, two


@pytest.fixture(scope="module")
def routed(engines, reader):
    with Routed([each.url for each in engines], reader) as router:
        yield router


def answers(url):
    """What the openai client makes of some requests, without ids and times."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    more = {"return_token_ids": True}
    plain = client.completions.create(model="tiny", prompt=STORY, max_tokens=12, n=2, seed=5, extra_body=more)
    stream = client.completions.create(model="tiny", prompt=STORY, max_tokens=12, seed=5, stream=True, extra_body=more)
    messages = [{"role": "user", "content": "Who is Ida?"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0, logprobs=True)
    response = client.responses.create(model="tiny", input="Who is Ida?", max_output_tokens=12, temperature=0)
    events = client.responses.create(model="tiny", input="Who?", max_output_tokens=5, temperature=0, stream=True)
    return [
        [(choice.token_ids, choice.text) for choice in plain.choices],
        [(choice.token_ids, choice.text) for chunk in stream for choice in chunk.choices],
        [token.model_dump() for token in chat.choices[0].logprobs.content],
        response.output_text,
        [(event.type, event.sequence_number) for event in events],
        [model.id for model in client.models.list()],
    ]


def test_a_client_that_asks_for_a_websocket_gets_a_plain_answer(routed):
    key = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"} | key
    answer = httpx.get(f"{routed.url}/v1/models", headers=headers)
    assert (answer.status_code, answer.json()["object"]) == (200, "list")


def test_the_openai_client_gets_the_same_ids(engines, routed):
    expected = answers(engines[0].url)
    assert len(expected[0][0][0]) == 12
    assert answers(routed.url) == expected


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("HEAD", "/v1/models", None),
        ("GET", "/v1/models/none?a=1", None),
        ("GET", "/nowhere", None),
        ("PUT", "/v1/completions", {"prompt": "a"}),
        ("GET", "/version", None),
        ("GET", "/openapi.json", None),
        ("GET", "/get_server_info", None),
        ("GET", "/tokenizer_info", None),
        ("POST", "/tokenize", {"prompt": STORY, "return_token_strs": True}),
        ("POST", "/detokenize", {"tokens": [70, 71]}),
        ("POST", "/v1/completions", {"prompt": STORY, "max_tokens": 5000}),
        ("POST", "/v1/completions", {"prompt": STORY, "model": "other"}),
        ("POST", "/v1/chat/completions", {"messages": []}),
        ("POST", "/v1/responses", {"input": 3}),
    ],
)
def test_all_endpoints_answer_as_the_server_does(engines, routed, method, path, body):
    own, other = (httpx.request(method, url + path, json=body) for url in (engines[0].url, routed.url))
    kept = re.compile(rb'"created":\d+')
    assert (other.status_code, kept.sub(b"", other.content)) == (own.status_code, kept.sub(b"", own.content))
    assert other.headers.get("content-type") == own.headers.get("content-type")


def test_every_route_of_the_server_is_one_of_the_router(engines, routed):
    described = httpx.get(f"{engines[0].url}/openapi.json").json()["paths"]
    refused = {"/v1/steps", "/v1/stages", "/v1/attention", "/worker_events"}
    for path in described.keys() - refused - {"/v1/models/{model}", "/flush_cache"}:
        assert httpx.options(routed.url + path).status_code in (405, 404), path
        status = httpx.get(routed.url + path).status_code
        assert status == (405 if "get" not in described[path] else 200), path
    for path in refused:
        assert httpx.get(routed.url + path).status_code == 404


def test_prompts_are_read_as_the_server_reads_them(engines, routed):
    """What goes to a worker again is found there, for each kind of request, with its template and its key."""
    front = routed.server.config.app.state.service
    chat = {"messages": [{"role": "user", "content": STORY}], "tools": None, "truncate_prompt_tokens": 40}
    for path, body in (
        ("/v1/completions", {"prompt": [STORY, "other"], "cache_salt": "a"}),
        ("/v1/completions", {"prompt": list(range(50, 90)), "truncate_prompt_tokens": 32}),
        ("/v1/chat/completions", chat | {"reasoning_effort": "none"}),
        ("/v1/responses", {"input": STORY, "instructions": "Be brief."}),
    ):
        limit = {"max_output_tokens": 2} if path.endswith("responses") else {"max_tokens": 2}
        usage = httpx.post(routed.url + path, json=body | limit).json()["usage"]
        ids = front.tokens_of(fleets.Asked("POST", path, (), json.dumps(body | limit).encode()))
        salted = "cache_salt" in body
        number = usage.get("input_tokens", usage.get("prompt_tokens"))
        assert len(ids) - salted == number - (len(engines[0].tokenizer.encode("other")) if salted else 0)
        asked = {"prompt": list(ids[salted:]), "max_tokens": 1}
        cached = [
            httpx.post(each.url + "/v1/completions", json=asked | ({"cache_salt": "a"} if salted else {})).json()
            for each in engines
        ]
        hits = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in cached]
        assert max(hits) >= (len(ids) - 1) // 16 * 16 - 16, path


def test_a_client_that_leaves_ends_its_request(engines, routed):
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    for stream in (True, False):
        text = json.dumps(body | {"stream": stream})
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", routed.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            end = time.monotonic() + 5
            while not any(each.engine.scheduler.running for each in engines):
                assert time.monotonic() < end, "the request has not begun"
                time.sleep(0.005)
        for each in engines:
            each.wait_until_idle(2.0)
