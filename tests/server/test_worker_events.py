"""What a server tells a router: that it is alive, and exactly what its prefix cache holds."""

import json
import random
import threading

import pytest

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver, make_engine
from mini_engine.router.tree import TokenTree
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import RequestOptions
from mini_engine.server import worker_events
from mini_engine.server.worker_events import CacheChanges

PAGE = 4
SMALL = EngineConfig(
    max_running_requests=4, max_tokens_per_step=64, preemption=True, prefix_cache="radix", page_size=PAGE, num_pages=40
)
IDENTITY = {"X-Answer-Identity": "1700000000.25-0123456789abcdef0123456789abcdef"}
TOOL = {"type": "function", "function": {"name": "call", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"messages": [{"role": "user", "content": "Call it."}], "max_tokens": 30, "temperature": 0}
ASKED = {
    "/v1/completions": {"prompt": "The owl", "max_tokens": 5, "n": 2, "seed": 3},
    "/v1/chat/completions": CHAT | {"tools": [TOOL], "tool_choice": "required"},
    "/v1/responses": {"input": "Who is Ida?", "max_output_tokens": 20, "temperature": 0},
}


def held(cache, tokens, key):
    """How many of the first tokens are in the tree: all paths from the root, token by token."""
    longest, paths = 0, [(cache.roots[key], 0)] if key in cache.roots else []
    while paths:
        node, place = paths.pop()
        agreeing = next((n for n, own in enumerate(node.tokens) if tokens[place + n : place + n + 1] != [own]), None)
        if agreeing is None:
            place += len(node.tokens)
            paths += [(child, place) for child in node.children.values()]
        else:
            place += agreeing
        longest = max(longest, place // PAGE * PAGE)
    return longest


def test_what_was_told_is_what_the_cache_holds():
    engine = make_engine(load_driver(None, SMALL), load_tokenizer(TINY_MODEL).backend_tokenizer)
    watcher = CacheChanges(engine, lambda _: None)
    watcher.attach()
    chance = random.Random(3)
    cache = engine.scheduler.cache
    believed = {None: TokenTree(10**6), "a": TokenTree(10**6)}
    computed = list[tuple[str | None, list[int]]]()
    keys: dict[str, str | None] = {}
    num_dropped = 0
    for number in range(80):
        keys[str(number)] = key = chance.choice([None, "a"])
        prompt = chance.choice([[7] * 20, [8] * 12, [7] * 8 + [9] * 16]) + chance.choices(range(20, 60), k=8)
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        engine.add_request(prompt, params, str(number), RequestOptions(cache_key=key))
        if number % 3:
            continue
        while engine.has_work:
            for delta in engine.step().deltas:
                if delta.finish_reason is not None:
                    output = engine.take_output(delta.request_id)
                    tokens = output.prompt_ids + output.token_ids
                    computed.append((keys[output.request_id], tokens))
        if chance.random() < 0.1:
            engine.flush_cache()
        changes = watcher.take()
        num_dropped += len(changes["dropped"])
        for each in changes["dropped"]:
            believed[each["key"]].forget(each["tokens"], each["kept"])
        for each in changes["held"]:
            believed[each["key"]].insert(each["tokens"])
        for key, tokens in computed:
            assert believed[key].match(tokens) // PAGE * PAGE == held(cache, tokens, key), (number, key, tokens)
    assert num_dropped > 20
    engine.close()


def test_it_says_every_second_that_it_is_alive_and_how_busy(server, http):
    http.post("/flush_cache")
    with http.stream("GET", "/worker_events") as response:
        events = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
        assert next(events) == {"running": 0, "waiting": 0, "dropped": [], "held": []}
        ids = server.tokenizer.encode(
            "Once upon a time there was a fox named Mila, and she met an owl who lived alone."
        )
        http.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})
        (held,) = next(events)["held"]
        assert held == {"key": None, "tokens": ids[: len(held["tokens"])]}
        http.post("/flush_cache")
        dropped = next(events)["dropped"]
        assert [each["kept"] for each in dropped] == [0]
        assert dropped[0]["tokens"] == ids[: len(dropped[0]["tokens"])] != []
    server.wait_until_idle()


def test_a_server_is_alive_while_a_step_takes_long(server, http, monkeypatch):
    """A router ends a replica that is silent for five seconds; on a CPU the step of a long prompt takes longer."""
    monkeypatch.setattr(worker_events, "PERIOD_S", 0.1)

    def block():
        released = threading.Event()
        server.service.engine.post(lambda: released.wait(10))
        return released

    http.get("/health")
    before = block()
    with http.stream("GET", "/worker_events") as response:
        lines = filter(None, response.iter_lines())
        assert next(lines).startswith(":")
        before.set()
        assert next(line for line in lines if line.startswith("data: "))
        during = block()
        assert next(line for line in lines if line.startswith(":"))
        during.set()
        assert next(line for line in lines if line.startswith("data: "))
    server.wait_until_idle()


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_an_identity_fixes_every_byte(http, path, stream):
    """All ids and the time; without one they differ."""
    body = ASKED[path] | {"stream": stream}
    http.post(path, json=body)  # from now on the prompt is cached
    first, again = (http.post(path, json=body, headers=IDENTITY).content for _ in range(2))
    assert first == again
    assert b"1700000000" in first
    other = http.post(path, json=body).content
    assert other != first
    assert len(other) - len(first) in range(-20, 20)


def test_an_identity_of_another_form_is_refused(http):
    answer = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Answer-Identity": "7"})
    assert answer.status_code == 400
    assert "x-answer-identity" in answer.json()["error"]["message"]
