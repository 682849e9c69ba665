"""A router to workers without engines: where requests go, what comes back, and what is done about workers that end."""

import asyncio
import json
import re

import pytest

from mini_engine.router import fleet as fleets
from mini_engine.router.front import MOST_TRIES
from mini_engine.router.workers import AppWorker, Asked

from .fake import Fake

BODY = {"prompt": "Once upon a time there was a fox named Mila, and", "max_tokens": 6, "stream": True}
PATH = "/v1/completions"


def run(test):
    """Run a coroutine; a test that hangs fails."""
    return asyncio.run(asyncio.wait_for(test, 30))


async def alone(body, identity, **changes):
    """What a worker of its own answers to a request: the oracle."""
    fake = Fake()
    for name, value in changes.items():
        setattr(fake, name, value)
    headers = [(b"x-answer-identity", identity)]
    async with AppWorker("alone", fake).answer(Asked("POST", PATH, headers, json.dumps(body).encode())) as answer:
        return b"".join([piece async for piece in answer.pieces])


def identity_in(stream):
    return re.search(rb"cmpl-([0-9a-f.-]*)", stream)[1]


def without_counts(stream):
    return re.sub(rb'"cached_tokens":\d+', b"", stream)


def test_the_longest_beginning_decides_and_then_the_shortest_queue(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            stories = ["Once upon a time there was a fox named Mila.", "Tell me all about the owl who lives alone."]
            for story in stories * 3:
                for end in ("", " She", " She went home."):
                    await router.ask("POST", PATH, {**BODY, "prompt": story + end})
            by_worker = [{json.loads(body)["prompt"][:4] for *_, body in fake.asked} for fake in fakes]
            assert sorted(map(sorted, by_worker)) == [["Once"], ["Tell"]]
            salted = [router.fleet.policy.matched(name, [1, 2, 3]) for name in router.fleet.workers]
            assert salted == [0, 0]
            router.fleet.policy.check()

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_bytes_pass_unchanged(routing, fakes, stream):
    async def test():
        async with routing(*fakes) as router:
            status, headers, got = await router.ask("POST", PATH, BODY | {"stream": stream})
            assert status == 200
            assert got == await alone(BODY | {"stream": stream}, identity_in(got))
            assert headers[b"content-type"] == (b"text/event-stream" if stream else b"application/json")
            ((_, _, passed, body),) = [asked for fake in fakes for asked in fake.asked]
            assert body == json.dumps(BODY | {"stream": stream}).encode()
            assert "x-answer-identity" in passed

    run(test())


@pytest.mark.parametrize("dies_after", [0, 1, 60, 150, 151, 152, 153, 154, 155, 156, 157, 158, 500, 900])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_goes_on_elsewhere(routing, fakes, dies_after, stream):
    async def test():
        async with routing(*fakes) as router:
            fakes[0].dies_after = dies_after  # the first of equal workers
            status, _, got = await router.ask("POST", PATH, BODY | {"stream": stream})
            assert status == 200
            assert without_counts(got) == without_counts(await alone(BODY | {"stream": stream}, identity_in(got)))
            assert [len(fake.asked) for fake in fakes] == [1, 1]
            assert sum(fake.whole for fake in fakes) == 1
            await router.until(lambda: "w0" not in router.fleet.links)
            assert router.fleet.num_lost == {"w0": 1, "w1": 0}

    run(test())


def test_choices_that_alternate_otherwise_go_on_too(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            body = BODY | {"n": 2}
            fakes[0].dies_after = 700
            fakes[1].order = (1, 0)
            _, _, got = await router.ask("POST", PATH, body)
            assert fakes[0].is_dead
            whole = await alone(body, identity_in(got))
            assert sorted(without_counts(got).split(b"\n\n")) == sorted(without_counts(whole).split(b"\n\n"))
            for index in (0, 1):
                own = [event for event in whole.split(b"\n\n") if b'"index":%d' % index in event]
                assert [event for event in got.split(b"\n\n") if b'"index":%d' % index in event] == own

    run(test())


def test_counts_of_cached_tokens_may_differ(routing, fakes):
    """The worker ends after the counts and before the last event."""

    async def test():
        async with routing(*fakes) as router:
            fakes[1].asked += [None] * 3  # so it counts on from there
            whole = await alone(BODY, b"1700000000.000000-" + b"0" * 32)
            fakes[0].dies_after = len(whole) - 4
            _, _, got = await router.ask("POST", PATH, BODY)
            assert got == await alone(BODY, identity_in(got))
            assert [fake.whole for fake in fakes] == [0, 1]

    run(test())


def test_other_requests_of_a_worker_that_lost_one_go_on(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            await router.ask("POST", "/workers/w1/drain")
            fakes[0].pace = 0.05
            first = asyncio.create_task(router.ask("POST", PATH, BODY | {"max_tokens": 20}))
            await router.until(lambda: fakes[0].asked)
            await router.ask("POST", "/workers/w1/resume")
            fakes[0].is_hurt, fakes[0].dies_after = True, 10
            _, _, got = await router.ask("POST", PATH, BODY)
            assert without_counts(got) == without_counts(await alone(BODY, identity_in(got)))
            await router.until(lambda: "w0" in router.fleet.links)  # it says that it is alive
            fakes[0].dies_after = None
            await router.ask("POST", "/workers/w1/drain")
            last = asyncio.create_task(router.ask("POST", PATH, BODY | {"max_tokens": 20}))
            await router.until(lambda: router.fleet.policy.workers["w0"].queue)
            _, _, got = await first
            assert router.fleet.policy.workers["w0"].queue == 1
            await last
            assert without_counts(got) == without_counts(await alone(BODY | {"max_tokens": 20}, identity_in(got)))
            assert [router.fleet.policy.workers[name].queue for name in ("w0", "w1")] == [0, 0]

    run(test())


def test_a_worker_that_lost_one_request_tells_all_that_it_holds_again(routing, monkeypatch):
    """The router has forgotten it, and a worker says each thing once to those who listen."""
    ids = list(range(5, 45))

    class Holding(Fake):
        async def events(self, write):
            self.held = [{"key": None, "tokens": ids}]
            await super().events(write)

    async def test():
        monkeypatch.setattr(fleets, "AGAIN_S", 0.05)
        first = Holding()
        async with routing(first, Fake()) as router:
            first.is_hurt, first.dies_after = True, 10
            await router.ask("POST", PATH, BODY | {"prompt": ids})
            await router.until(lambda: router.fleet.num_lost["w0"] == 1 and "w0" in router.fleet.links)
            await router.until(lambda: router.fleet.policy.matched("w0", ids) == len(ids))
            assert not first.is_dead

    run(test())


def test_a_drained_worker_that_is_lost_comes_back_drained(routing, fakes, monkeypatch):
    async def test():
        monkeypatch.setattr(fleets, "AGAIN_S", 0.02)
        async with routing(*fakes) as router:
            await router.ask("POST", "/workers/w0/drain")
            fakes[0].is_dead = True
            await router.until(lambda: "w0" not in router.fleet.links)
            fakes[0].is_dead = False
            await router.until(lambda: "w0" in router.fleet.links)
            await router.ask("POST", PATH, BODY)
            assert [len(fake.asked) for fake in fakes] == [0, 1]
            assert router.fleet.state("w0")["state"] == "draining"

    run(test())


def test_another_answer_is_never_mixed_in(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            fakes[0].dies_after = 900
            fakes[1].accent = " indeed"  # from the fourth word on
            _, _, got = await router.ask("POST", PATH, BODY)
            begun, _, rest = got.partition(b"event: error\n")
            assert (await alone(BODY, identity_in(got))).startswith(begun)
            assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "begun_again"
            assert b"indeed" not in got

    run(test())


def test_a_server_that_ends_in_order_is_left_with_its_last_words(routing, fakes):
    async def test():
        said = b'event: error\ndata: {"error":{"message":"shutting down","code":"service_unavailable"}}\n\n'

        async def ending(scope, receive, send):
            if scope["path"] == "/worker_events":
                await fakes[0](scope, receive, send)
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            await send({"type": "http.response.body", "body": said})

        async with routing(ending, fakes[1]) as router:
            _, _, got = await router.ask("POST", PATH, BODY)
            assert without_counts(got) == without_counts(await alone(BODY, identity_in(got)))
        fakes[1].refuses = (503, b"{}")
        async with routing(fakes[1], Fake()) as router:
            assert (await router.ask("POST", PATH, BODY))[0] == 200

    run(test())


def test_what_a_worker_refuses_passes_unchanged(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            for status in (400, 404, 422, 500, 504):
                said = b'{"error": {"message": "no \\u00e4"}}'
                for fake in fakes:
                    fake.refuses = (status, said)
                    fake.asked.clear()
                assert (await router.ask("POST", PATH, BODY))[::2] == (status, said)
                assert sum(len(fake.asked) for fake in fakes) == 1
            for fake in fakes:
                fake.refuses = None
            for body in (b"{", b"[]", b'{"prompt": 3}', b"\xff", b'{"prompt": ' + b"[" * 9000):
                for fake in fakes:
                    fake.refuses = (400, b"bad")
                assert (await router.ask("POST", PATH, body))[::2] == (400, b"bad")

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_a_worker_whose_queue_is_full_is_passed_over(routing, fakes, stream):
    async def test():
        third = Fake()
        async with routing(*fakes, third) as router:
            await router.ask("POST", "/workers/w2/drain")
            fakes[0].refuses = (429, b"w0 is full")  # the first of equal workers
            status, _, got = await router.ask("POST", PATH, BODY | {"stream": stream})
            assert (status, got) == (200, await alone(BODY | {"stream": stream}, identity_in(got)))
            fakes[1].refuses = (429, b"w1 is full")
            assert (await router.ask("POST", PATH, BODY))[::2] == (429, b"w1 is full"), "the client hears it at once"
            assert [len(fake.asked) for fake in (*fakes, third)] == [2, 2, 0]
            assert all(router.fleet.state(name)["state"] == "up" for name in ("w0", "w1")), "none of them is lost"

    run(test())


def test_without_a_worker_it_says_what_to_do(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            for name in ("w0", "w1"):
                status, _, said = await router.ask("POST", f"/workers/{name}/drain")
                assert (status, json.loads(said)["state"]) == (200, "draining")
            status, _, said = await router.ask("POST", PATH, BODY)
            assert status == 503
            assert "w0 draining, w1 draining" in json.loads(said)["error"]["message"]
            assert "/workers/NAME/resume" in json.loads(said)["error"]["message"]
            assert (await router.ask("GET", "/health"))[0] == 503
            await router.ask("POST", "/workers/w1/resume")
            assert (await router.ask("POST", PATH, BODY))[0] == (await router.ask("GET", "/health"))[0] == 200
            assert [len(fake.asked) for fake in fakes] == [0, 1]
            status, _, said = await router.ask("POST", "/workers/nobody/drain")
            assert status == 404
            assert "w0, w1" in json.loads(said)["error"]["message"]

    run(test())


def test_a_drained_worker_ends_what_it_has(routing, fakes):
    async def test():
        fakes[0].pace = 0.02
        async with routing(*fakes) as router:
            first = asyncio.create_task(router.ask("POST", PATH, BODY))
            await router.until(lambda: fakes[0].asked)
            await router.ask("POST", "/workers/w0/drain")
            await router.ask("POST", PATH, BODY)
            _, _, got = await first
            assert got == await alone(BODY, identity_in(got))
            assert [len(fake.asked) for fake in fakes] == [1, 1]

    run(test())


def test_a_request_that_ends_every_worker_is_given_up(routing, monkeypatch):
    async def test():
        monkeypatch.setattr(fleets, "AGAIN_S", 0.01)
        apps = [Fake() for _ in range(MOST_TRIES + 2)]
        for fake in apps:
            fake.dies_after = 200
        async with routing(*apps) as router:
            _, _, got = await router.ask("POST", PATH, BODY)
            assert b"it may be the reason" in got
            assert sum(fake.is_dead for fake in apps) == MOST_TRIES
            for fake in apps:
                fake.dies_after = None
            _, _, got = await router.ask("POST", PATH, BODY)
            assert without_counts(got) == without_counts(await alone(BODY, identity_in(got)))

    run(test())


def test_a_request_waits_for_a_worker_that_comes_back(routing, monkeypatch):
    async def test():
        monkeypatch.setattr(fleets, "AGAIN_S", 0.05)
        fake = Fake()
        async with routing(fake) as router:
            fake.dies_after = 300
            asking = asyncio.create_task(router.ask("POST", PATH, BODY))
            await router.until(lambda: fake.is_dead)
            await asyncio.sleep(0.2)
            fake.dies_after, fake.is_dead = None, False
            _, _, got = await asking
            assert without_counts(got) == without_counts(await alone(BODY, identity_in(got)))
            assert (await router.ask("POST", PATH, BODY))[0] == 200

    run(test())


def test_a_worker_that_says_nothing_any_more_is_lost(routing, fakes, monkeypatch):
    async def test():
        monkeypatch.setattr(fleets, "SILENT_S", 0.2)
        async with routing(*fakes) as router:
            fakes[0].pace = 0.05
            asking = asyncio.create_task(router.ask("POST", PATH, BODY))
            await router.until(lambda: fakes[0].asked)
            fakes[0].is_silent, fakes[0].pace = True, 30.0
            _, _, got = await asking
            assert without_counts(got) == without_counts(await alone(BODY, identity_in(got)))
            assert router.fleet.state("w0")["state"] == "down"
            assert "alive" in router.fleet.state("w0")["reason"]
            assert fakes[0].left == 1

    run(test())


@pytest.mark.parametrize(
    "dropped",
    [
        [3],
        [{"key": None, "tokens": [2**40], "kept": 0}],
        [{"key": None, "tokens": "abc", "kept": 0}],
        [{"key": 7, "tokens": [1], "kept": 0}],
        [{"key": None, "tokens": [1]}],
    ],
)
def test_a_worker_that_says_what_no_router_understands_is_lost_and_comes_back(routing, fakes, monkeypatch, dropped):
    async def test():
        monkeypatch.setattr(fleets, "AGAIN_S", 0.05)
        async with routing(*fakes) as router:
            fakes[0].dropped = dropped
            await router.until(lambda: router.fleet.lost["w0"] != "not reached yet")
            await router.until(lambda: "w0" in router.fleet.links)

    run(test())


def test_a_worker_whose_engine_is_dead_is_ended_so_that_it_can_be_started_again(routing, fakes, monkeypatch):
    async def test():
        monkeypatch.setattr(fleets, "AGAIN_S", 0.05)
        async with routing(*fakes) as router:
            closed = []

            async def close():
                closed.append("w0")
                fakes[0].engine_is_dead = False

            router.fleet.workers["w0"].close = close
            fakes[0].engine_is_dead = True
            await router.until(lambda: closed)
            await router.until(lambda: "w0" in router.fleet.links)
            assert closed == ["w0"]

    run(test())


def test_a_client_that_leaves_ends_the_request_at_the_worker(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            fakes[0].pace = 0.05
            async with router.opened("POST", PATH, BODY | {"max_tokens": 1000}) as answer:
                await anext(answer.pieces)
            await router.until(lambda: fakes[0].left == 1)
            assert router.fleet.policy.workers["w0"].queue == 0

    run(test())


def test_the_next_turn_goes_where_a_long_answer_was_computed(routing, fakes):
    """The prompt alone would be a tenth of it, and w0 comes first of equal workers."""

    async def test():
        async with routing(*fakes) as router:
            ids = list(range(5, 45))
            policy = router.fleet.policy
            fakes[1].held = [{"key": None, "tokens": ids[:30]}]
            await router.until(lambda: policy.matched("w1", ids) == 30)
            assert policy.workers["w1"].queue == 0
            await router.ask("POST", PATH, {"prompt": ids, "max_tokens": 1})
            assert [len(fake.asked) for fake in fakes] == [0, 1]
            fakes[1].dropped, fakes[1].held = [{"key": None, "tokens": ids, "kept": 8}], [{"key": "a", "tokens": ids}]
            await router.until(lambda: policy.matched("w1", fleets.in_tree_of("a", ids)) == len(ids) + 1)
            assert policy.matched("w1", ids) == 8

    run(test())


def test_what_a_worker_dropped_is_forgotten(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            ids = list(range(5, 45))
            await router.ask("POST", "/workers/w1/drain")
            for salt in (None, "a"):
                await router.ask("POST", PATH, {"prompt": ids, "max_tokens": 1, "cache_salt": salt})
            policy = router.fleet.policy
            assert policy.matched("w0", ids) == len(ids)
            fakes[0].dropped = [{"key": None, "tokens": ids, "kept": 16}]
            await router.until(lambda: policy.matched("w0", ids) == 16)
            mark = fleets.in_tree_of("a", ids)
            assert policy.matched("w0", mark) == len(ids) + 1
            fakes[0].dropped = [{"key": "a", "tokens": ids, "kept": 8}]
            await router.until(lambda: policy.matched("w0", mark) == 9)
            status, _, said = await router.ask("POST", "/flush_cache")
            assert (status, json.loads(said)) == (200, {"num_pages_flushed": 4})
            assert policy.matched("w0", ids) == 0

    run(test())


def test_health_and_metrics_are_of_all_workers(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            await router.ask("POST", PATH, BODY)
            status, _, said = await router.ask("GET", "/health")
            assert (status, json.loads(said)["workers"].keys()) == (200, {"w0", "w1"})
            assert json.loads(said)["workers"]["w1"] == {"state": "up", "running": 1, "waiting": 0}
            _, _, text = await router.ask("GET", "/metrics")
            for line in (
                b'vllm:things_total{model_name="tiny",worker="w0"} 3.0',
                b'vllm:things_total{model_name="tiny",worker="w1"} 3.0',
                b'router_worker_up{worker="w1"} 1.0',
                b'router_requests_total{worker="w0"} 1.0',
            ):
                assert line in text.splitlines()
            assert text.count(b"# TYPE vllm:things_total counter") == 1
            fakes[1].is_dead = True
            await router.until(lambda: "w1" not in router.fleet.links)
            _, _, text = await router.ask("GET", "/metrics")
            assert b'router_worker_up{worker="w1"} 0.0' in text
            assert json.loads((await router.ask("GET", "/health"))[2])["workers"]["w1"]["state"] == "down"

    run(test())


def test_what_shows_one_engine_is_not_the_routers(routing, fakes):
    async def test():
        async with routing(*fakes) as router:
            for path in ("/", "/page/main.js", "/v1/steps", "/worker_events"):
                status, _, said = await router.ask("GET", path)
                assert (status, b"ask a worker" in said) == (404, True)
            assert not any(fake.asked for fake in fakes)

    run(test())


def test_a_key_guards_the_router_and_opens_the_workers(routing, fakes):
    async def test():
        key = (b"authorization", b"Bearer secret")
        async with routing(*fakes, api_key="secret", headers=[key]) as router:
            for target in (PATH, "/workers/w0/drain", "/flush_cache"):
                assert (await router.ask("POST", target, BODY))[0] == 401
            assert (await router.ask("POST", PATH, BODY, [key]))[0] == 200
            ((_, _, headers, _),) = fakes[0].asked
            assert headers["authorization"] == "Bearer secret"
            assert (await router.ask("POST", "/workers/w0/drain", None, [key]))[0] == 200
        async with routing(*fakes) as router:  # a page of another server
            origin = (b"origin", b"http://evil.example")
            assert (await router.ask("POST", "/workers/w0/drain", None, [origin]))[0] == 403

    run(test())
