"""A request ends with its client, the others are not touched, and the server ends as it is asked to."""

import asyncio
import gc
import json
import random
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from itertools import pairwise

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver, make_engine
from mini_engine.sampler.params import SamplingParams

LONG = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
TEXTS = ["Once upon a time there was a fox named Mila", "A bear went", "Tell me a story about an owl.", "The", "Who?"]


def request_bytes(server, body):
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    return f"{head}\r\n\r\n{text}".encode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server, stream):
    server.wait_until_idle()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request_bytes(server, LONG | {"stream": stream}))
        end = time.monotonic() + 5
        while not server.engine.scheduler.running:
            assert time.monotonic() < end, "the request has not begun"
            time.sleep(0.005)
        if stream:
            assert b"200 OK" in connection.recv(4096)
    server.wait_until_idle(1.0)  # computed to the end it would take longer


def test_a_client_that_leaves_while_its_grammar_compiles_or_it_waits(server):
    bodies = [LONG | {"regex": "[a-z]{1,300}(x|y|[0-9]{1,50}){4}"}, *[LONG] * 12]
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in bodies]
    for connection, body in zip(connections, bodies, strict=True):
        connection.sendall(request_bytes(server, body))
    time.sleep(0.1)
    for connection in connections:
        connection.close()
    server.wait_until_idle(10.0)


def test_a_slow_reader_gets_everything_and_holds_no_other_client_back(server, client):
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.sendall(request_bytes(server, LONG | {"max_tokens": 100, "stream": True}))
        quick = client.completions.create(model="tiny", prompt="The", max_tokens=5)
        assert quick.usage.completion_tokens == 5
        server.wait_until_idle(30)
        received = b""
        while b"[DONE]" not in received:
            received += slow.recv(512)
    pieces = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    options = {name: value for name, value in LONG.items() if name != "ignore_eos"}
    plain = client.completions.create(**options | {"max_tokens": 100}, extra_body={"ignore_eos": True})
    assert text == plain.choices[0].text


def answers_alone(number):
    """What each of ``number`` requests gets from an engine of its own batch: the oracle."""
    tokenizer = load_tokenizer(TINY_MODEL)
    engine = make_engine(load_driver(None, EngineConfig(batch_invariant=True)), tokenizer.backend_tokenizer)
    texts = []
    for index in range(number):
        params = SamplingParams(temperature=0.8 * (index % 2), seed=index, max_new_tokens=10 + index % 7)
        texts.append(engine.generate([tokenizer.encode(TEXTS[index % 5])], params)[0][0].text)
    return texts


async def many(server, number, generator):
    """Stream ``number`` answers at a time and leave a third of them somewhere; return the others by their index."""
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    async def one(index, leaves_after):
        text = ""
        stream = await client.completions.create(
            model="tiny",
            prompt=TEXTS[index % 5],
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=10 + index % 7,
            stream=True,
        )
        async with stream:
            async for number_seen, chunk in aenumerate(stream):
                if number_seen == leaves_after:
                    return index, None
                text += chunk.choices[0].text
        return index, text

    plans = [(index, generator.randrange(8) if generator.random() < 1 / 3 else None) for index in range(number)]
    try:
        return dict(await asyncio.gather(*(one(*plan) for plan in plans)))
    finally:
        await client.close()


async def aenumerate(stream):
    number = 0
    async for item in stream:
        yield number, item
        number += 1


def test_streams_side_by_side_give_the_answers_they_would_give_alone(server):
    number = 24
    texts = asyncio.run(many(server, number, random.Random(number)))
    finished = {index: text for index, text in texts.items() if text is not None}
    assert number / 2 < len(finished) < number
    expected = answers_alone(number)
    assert finished == {index: expected[index] for index in finished}
    server.wait_until_idle(30)


@pytest.mark.slow
def test_memory_stays_flat_over_streams_of_which_a_third_is_left(server, http):
    def held():
        server.wait_until_idle(30)
        http.post("/flush_cache")
        server.engine.log.clear()  # it keeps the newest steps, by design
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        sizes = []
        for seed in range(3):  # the first brings imports, caches and connections of the loop
            asyncio.run(many(server, 80, random.Random(seed)))
            sizes.append(held())
        # A leak grows with every round. A cache of a library grows in one.
        assert min(after - before for before, after in pairwise(sizes)) < 80 * 1024, sizes
    finally:
        tracemalloc.stop()


def test_metrics_count_what_was_done(server, client, http):
    def number(name, **labels):
        wanted = "".join(f',{key}="{value}"' for key, value in labels.items())
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"vllm:{name}{{")]
        (line,) = (line for line in lines if all(part in line for part in wanted.split(",")))
        assert 'model_name="tiny"' in line
        return float(line.rsplit(" ", 1)[1])

    names = ["prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"]
    before = [number(name) for name in names]
    answer = client.completions.create(model="tiny", prompt="The owl", max_tokens=7, n=2, temperature=1)
    added = [number(name) - old for name, old in zip(names, before, strict=True)]
    assert added == [2 * answer.usage.prompt_tokens, 14, 2]
    assert number("request_success_total", finished_reason="length") >= 2
    assert number("num_requests_running") == number("num_requests_waiting") == 0
    assert http.head("/metrics").status_code == 200


def test_what_surrounds_the_answers(server, http):
    tokens = http.post("/tokenize", json={"prompt": "The owl ö", "return_token_strs": True}).json()
    assert tokens["tokens"] == server.tokenizer.encode("The owl ö")
    assert tokens["max_model_len"] == 2048
    assert http.get("/get_server_info").json()["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "The owl ö"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    text = server.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat["tokens"] == server.tokenizer.encode(text)
    assert http.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"
    assert http.get("/get_server_info").json()["max_running_requests"] == 8
    assert http.get("/version").json().keys() == {"version"}
    assert http.get("/health").status_code == 200
    preflight = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options("/v1/completions", headers=preflight).headers


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


@pytest.fixture
def process():
    """``mini-engine serve`` in a process of its own, ready to answer."""
    port = free_port()
    command = [sys.executable, "-m", "mini_engine", "serve", "--port", str(port), "--drain", "1.5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
            yield running, port
        finally:
            running.kill()


@pytest.mark.slow
def test_sigterm_lets_short_answers_end_and_aborts_long_ones(process):
    running, port = process
    other = {"Host": "evil.example"}  # no --host was given
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=other).status_code == 421
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    options = {"model": "tiny", "prompt": "secret words", "temperature": 0, "stream": True}
    endless = [
        client.completions.create(**options, max_tokens=2000, extra_body={"ignore_eos": True}) for _ in range(24)
    ]
    short = client.completions.create(**options, max_tokens=10)
    for stream in (*endless, short):
        next(stream)
    running.send_signal(signal.SIGTERM)
    assert len(list(short)) <= 9
    for stream in endless:
        with pytest.raises(Exception, match="shutting down"):
            list(stream)
    running.wait(20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    log = running.stdout.read() + running.stderr.read()
    assert "POST /v1/completions" in log
    assert "secret" not in log
    assert "Traceback" not in log
