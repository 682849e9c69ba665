"""``mini-engine route --replicas 2``: processes that the router starts, that are killed, and that end with it."""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache

import httpx
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver, make_engine
from mini_engine.sampler.params import SamplingParams

STORY = "Once upon a time there was a fox named Mila"
TEXTS = [STORY, "A bear went", "Tell me a story about an owl.", f"{STORY}, and she met an owl", "Who?"]
SOAK_S = float(os.environ.get("SOAK_S", "40"))  # a longer one: SOAK_S=600
KILL_EVERY_S = 20.0
CLIENTS = 6


class Route:
    """A router with its replicas."""

    def __init__(self, process, url):
        self.process = process
        self.url = url
        self.ports = {}

    def health(self):
        return httpx.get(f"{self.url}/health").json()["workers"]

    def wait_until_up(self, seconds=120.0):
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, "the router has ended"
            try:
                if all(about["state"] == "up" for about in self.health().values()):
                    break
            except httpx.HTTPError:
                pass
            assert time.monotonic() < end, "the workers are not there"
            time.sleep(0.1)
        if not self.ports:
            started = sorted(self.replicas(), key=lambda each: each.create_time())
            self.ports = {f"replica-{number}": port_of(each) for number, each in enumerate(started)}

    def replicas(self):
        return psutil.Process(self.process.pid).children()

    def kill(self, name):
        for each in self.replicas():
            if port_of(each) == self.ports[name]:
                each.kill()


def port_of(process):
    return int(re.search(r"--port (\d+)", " ".join(process.cmdline()))[1])


@contextmanager
def routing(*options):
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    command = [sys.executable, "-m", "mini_engine", "route", "--replicas", "2", "--batch-invariant"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--port", str(port), *options], env=environment) as process:
        route = Route(process, f"http://127.0.0.1:{port}")
        try:
            route.wait_until_up()
            yield route
        finally:
            process.terminate()
            process.wait(60)


@cache
def engine():
    config = EngineConfig.serving(batch_invariant=True)
    return make_engine(load_driver(None, config), load_tokenizer(TINY_MODEL).backend_tokenizer)


def asked(number, **changes):
    """One of many requests."""
    kind = {"temperature": 0.8 * (number % 2), "seed": number, "max_tokens": 20 + 60 * (number % 7)}
    more = {"ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "prompt": TEXTS[number % 5], **kind, **changes, "extra_body": more}


@cache
def alone(number):
    """The ids of the same request in an engine that has no other: the oracle."""
    body = asked(number)
    params = SamplingParams(
        temperature=body["temperature"], seed=body["seed"], max_new_tokens=body["max_tokens"], ignore_eos=True
    )
    return engine().generate([load_tokenizer(TINY_MODEL).encode(body["prompt"])], params)[0][0].token_ids


@pytest.mark.slow
def test_a_killed_replica_loses_no_answer_and_comes_back():
    with routing() as route:
        client = OpenAI(base_url=f"{route.url}/v1", api_key="none", max_retries=0)
        number = 6  # the longest kind
        httpx.post(f"{route.url}/workers/replica-1/drain").raise_for_status()
        stream = client.completions.create(**asked(number), stream=True)
        chunks = [next(stream) for _ in range(20)]
        httpx.post(f"{route.url}/workers/replica-1/resume").raise_for_status()
        first = {each.pid for each in route.replicas()}
        route.kill("replica-0")
        chunks += stream
        assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == alone(number)
        assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
        assert 'router_requests_lost_total{worker="replica-0"} 1.0' in httpx.get(f"{route.url}/metrics").text
        route.wait_until_up()
        replicas = route.replicas()
        assert len(replicas) == 2
        assert len(first & {each.pid for each in replicas}) == 1, "one of them was started again"
    psutil.wait_procs(replicas, 5)
    assert not any(each.is_running() for each in replicas)


@pytest.mark.slow
def test_a_router_and_servers_of_two_ranks_give_the_ids_of_one_process():
    with routing("--tensor-parallel", "2") as route:
        ranks = psutil.Process(route.process.pid).children(recursive=True)
        assert len(ranks) == 4
        for port in (route.url.rpartition(":")[2], *route.ports.values()):
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            for number in range(2):
                assert client.completions.create(**asked(number)).choices[0].token_ids == alone(number)
    assert not psutil.wait_procs(ranks, 5)[1]


@pytest.mark.slow
def test_ctrl_c_ends_the_replicas_too():
    with routing("--drain", "1") as route:
        replicas = route.replicas()
        client = OpenAI(base_url=f"{route.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(**asked(6, max_tokens=2000), stream=True)
        next(stream)
        route.process.send_signal(signal.SIGINT)
        with pytest.raises(Exception, match=r"shutting down|incomplete"):
            list(stream)
        route.process.wait(30)
    assert not psutil.wait_procs(replicas, 5)[1]


async def soak(route, ends_at, generator):
    """Ask until the time is up, many at once; return the requests and what came."""
    client = AsyncOpenAI(base_url=f"{route.url}/v1", api_key="none", max_retries=0, timeout=300)
    came, killed = list[tuple[int, list[int]]](), list[str]()
    num_asked = 0

    async def ask_on():
        nonlocal num_asked
        while time.monotonic() < ends_at:
            number = generator.randrange(70)
            num_asked += 1
            if generator.random() < 0.7:
                ids = []
                async for chunk in await client.completions.create(**asked(number), stream=True):
                    ids += chunk.choices[0].token_ids
            else:
                ids = (await client.completions.create(**asked(number))).choices[0].token_ids
            came.append((number, ids))

    async def kill_on():
        names = list(route.ports)
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            await asyncio.to_thread(route.wait_until_up)  # on a busy machine a start takes longer
            route.kill(names[0])
            killed.append(names[0])
            names.reverse()

    killing = asyncio.create_task(kill_on())
    await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))
    killing.cancel()
    await client.close()
    return num_asked, came, killed


@pytest.mark.slow
def test_soak():
    """Kills all the time: nothing is lost, nothing is doubled, every answer is that of the request alone."""
    with routing() as route:
        num_asked, came, killed = asyncio.run(soak(route, time.monotonic() + SOAK_S, random.Random(1)))
        text = httpx.get(f"{route.url}/metrics").text
    lost = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("router_requests_lost_total"))
    print(f"{num_asked} answers in {SOAK_S:g} s, {len(killed)} kills, by which {lost:g} answers lost their worker")
    assert len(came) == num_asked > 20
    assert killed
    assert lost
    for number, ids in came:
        assert ids == alone(number), number
