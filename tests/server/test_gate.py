"""Who is let in: names of this machine, bodies of JSON, pages of this server, connections that send a request."""

import asyncio
import socket
import time

import httpx
import pytest
from starlette.testclient import TestClient

from mini_engine.server import life, stream
from mini_engine.server.app import create_app
from mini_engine.server.build import LOCAL_NAMES, checked_origins
from tests.server.conftest import serving

BODY = b'{"model": "tiny", "prompt": "The", "max_tokens": 1}'


@pytest.fixture
def guarded(server):
    """The application of a server that was started without ``--host``; nothing here reaches its engine."""
    return TestClient(create_app(server.service, hosts=LOCAL_NAMES), raise_server_exceptions=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:8000", "[::1]:8000", "127.0.0.1:80"])
def test_a_name_of_this_machine_is_answered(guarded, host):
    assert guarded.get("/version", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "localhost@evil.example", "", "[::2]"])
def test_another_name_that_leads_here_is_refused(guarded, server, host):
    answer = guarded.get("/version", headers={"Host": host})
    assert answer.status_code == 421
    assert repr(host) in answer.json()["error"]["message"]
    assert "--host" in answer.json()["error"]["message"]
    open_app = TestClient(create_app(server.service))
    assert open_app.get("/version", headers={"Host": host}).status_code == 200


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "https://a.example", None),
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("https://a.example",), "https://a.example.b.example", None),
        (("*",), "https://b.example", "*"),
    ],
)
def test_pages_of_the_origins_that_are_named_may_call(server, origins, origin, allowed):
    key = None if "*" in origins else "secret"
    app = TestClient(create_app(server.service, key, origins=checked_origins(origins, key)))
    asked = app.options("/v1/chat/completions", headers={"Origin": origin} | PREFLIGHT)
    refused = app.get("/v1/models", headers={"Origin": origin, "Authorization": "Bearer wrong"})
    assert refused.status_code == (401 if key else 200)
    assert [each.headers.get("Access-Control-Allow-Origin") for each in (asked, refused)] == [allowed] * 2
    assert (asked.status_code == 200) == (allowed is not None)
    assert "Access-Control-Allow-Credentials" not in asked.headers


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://*.example.org", "", "null"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ValueError, match="without a path"):
        checked_origins([origin], None)


def test_every_page_and_a_key_exclude_each_other():
    assert checked_origins(["*"], None) == ["*"]
    with pytest.raises(ValueError, match="name the pages"):
        checked_origins(["*"], "secret")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_a_body_of_json_is_read(http, kind):
    assert http.post("/v1/completions", content=BODY, headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_body_of_another_type_says_which_and_what_to_send(http, kind):
    answer = http.post("/v1/completions", content=BODY, headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 415
    message = answer.json()["error"]["message"]
    assert message.startswith(f"Content-Type is {kind!r}" if kind else "Content-Type is missing")
    assert "application/json" in message


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1"])
def test_a_page_of_another_server_cannot_empty_the_cache(http, origin):
    answer = http.post("/flush_cache", headers={"Origin": origin})
    assert (answer.status_code, origin in answer.json()["error"]["message"]) == (403, True)


def test_the_servers_own_page_and_programs_and_the_key_can_empty_the_cache(http, server):
    assert http.post("/flush_cache").status_code == 200
    assert http.post("/flush_cache", headers={"Origin": server.url}).status_code == 200
    with serving(api_key="secret") as locked:
        own = {"Origin": "http://else.example"}
        assert httpx.post(f"{locked.url}/flush_cache", headers=own).status_code == 401
        keyed = own | {"Authorization": "Bearer secret"}
        assert httpx.post(f"{locked.url}/flush_cache", headers=keyed).status_code == 200


def test_a_connection_without_a_request_is_closed_and_one_that_works_is_not(monkeypatch, server):
    monkeypatch.setattr(life, "IDLE_S", 1.0)
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    idle, half, slow = (socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3))
    with idle, half, slow:
        half.sendall(b"GET /version HTTP/1.1\r\n")
        slow.sendall(request + b"Content-Length: %d\r\n\r\n" % len(BODY))
        assert (idle.recv(1), half.recv(1)) == (b"", b"")
        slow.sendall(BODY)
        assert b"200 OK" in slow.recv(4096)


def test_a_long_silence_is_filled_with_comments_before_the_first_event_and_after(monkeypatch, server):
    body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        quick = [line for line in answer.iter_lines() if line]
    monkeypatch.setattr(stream, "SILENCE_S", 0.1)
    step = server.engine.step

    def slow_step(*args, **kwargs):
        time.sleep(0.35)
        return step(*args, **kwargs)

    monkeypatch.setattr(server.engine, "step", slow_step)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"max_tokens": 4}, timeout=60) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    comment = stream.COMMENT.decode().strip()
    assert comment not in quick
    assert quick[-1] == lines[-1] == "data: [DONE]"
    assert lines[0] == comment, "nothing was sent before the first event"
    first = next(i for i, line in enumerate(lines) if line.startswith("data"))
    assert lines[first:].count(comment) >= 3, lines


def test_a_stream_that_fails_after_a_silence_ends_with_an_error_event(monkeypatch, server):
    monkeypatch.setattr(stream, "SILENCE_S", 0.1)

    async def late(events):
        await asyncio.sleep(0.3)
        raise ValueError("the engine is tired")

    monkeypatch.setattr(stream, "anext_of", late)
    with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "Once", "stream": True}) as answer:
        text = "".join(answer.iter_text())
    assert answer.status_code == 200
    assert text.startswith(stream.COMMENT.decode())
    assert "event: error" in text
    assert "the engine is tired" in text
    server.wait_until_idle()
