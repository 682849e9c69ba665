"""The events of steps and of stages against what the engine did: plain loops over its logits, its tree, its pages."""

import asyncio
import json
import math
import re
from dataclasses import replace

import pytest
import torch

from mini_engine import llm
from mini_engine.config import EngineConfig
from mini_engine.sampler.params import SamplingParams
from mini_engine.server.errors import ApiError
from mini_engine.server.steps import MOST_UNREAD, EventQueue, StageEvents, StepEvents, WatchedRows
from tests.support.engines import TOKENIZER, _one_thread, encode, make_driver, make_engine  # noqa: F401

SERVING = EngineConfig(
    max_running_requests=3,
    max_tokens_per_step=16,
    preemption=True,
    num_pages=9,
    page_size=8,
    prefix_cache="radix",
    grammar_backend="auto",
)
ROOMY = replace(SERVING, num_pages=40)  # all requests run side by side
STORY = "Once upon a time there was a fox named Mila who lived in a small house"
WATCHED = SamplingParams(
    temperature=1.4,
    top_k=30,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    seed=3,
    max_new_tokens=24,
)
OTHERS = [
    SamplingParams(max_new_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, top_k=20, max_new_tokens=40, ignore_eos=True, frequency_penalty=1.0),
]


def run(watch: bool, params: SamplingParams = WATCHED, config: EngineConfig = ROOMY, top: int = 12):
    """Run a watched request among others; return the events of both kinds, all deltas, and the engine."""
    engine = make_engine("embedded", config)
    steps, stages, deltas = [], [], []
    watchers = [StepEvents(engine, steps.append), StageEvents(engine, stages.append, "watched", params, top)]
    for watcher in watchers if watch else ():
        watcher.attach()
    engine.add_request(encode("There was an owl named"), OTHERS[0], "greedy")
    engine.add_request(encode(STORY), params, "watched")
    engine.add_request(encode("One day a bear"), OTHERS[1], "late")
    while engine.has_work:
        deltas += engine.step().deltas
    for watcher in watchers if watch else ():
        watcher.detach()
    return [fields for _, fields in steps], [fields for _, fields in stages], deltas, engine


def after_each_stage(logits: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> dict[str, list]:
    """The distributions after every stage, token by token in float64."""
    seen = set(prompt) | set(output)
    came = set(output)
    stages = {"logits": list(logits)}
    work = [
        x if i not in seen else x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        for i, x in enumerate(logits)
    ]
    stages["penalties"] = work = [x - p.presence_penalty * (i in came) for i, x in enumerate(work)]
    stages["temperature"] = work = [x / p.temperature for x in work]
    order = sorted(range(len(work)), key=lambda i: (-work[i], i))
    kept = set(order[: p.top_k])
    stages["top-k"] = work = [x if i in kept else -math.inf for i, x in enumerate(work)]
    probs = softmax(work)
    mass = 0.0
    kept = set()
    for i in order:
        if mass < p.top_p:
            kept.add(i)
        mass += probs[i]
    stages["top-p"] = work = [x if i in kept else -math.inf for i, x in enumerate(work)]
    probs = softmax(work)
    stages["min-p"] = [x if probs[i] >= p.min_p * max(probs) else -math.inf for i, x in enumerate(work)]
    return {name: softmax(row) for name, row in stages.items()}


def softmax(row: list[float]) -> list[float]:
    peak = max(row)
    masses = [math.exp(x - peak) for x in row]
    return [mass / sum(masses) for mass in masses]


def test_stages_are_those_of_plain_loops_over_the_logits():
    steps, stages, deltas, _ = run(watch=True)
    own = [delta for delta in deltas if delta.request_id == "watched"]
    assert [event["id"] for event in stages] == [delta.token_id for delta in own]
    assert max(len(step["chunks"]) for step in steps) == 3
    assert [event["index"] for event in stages] == list(range(24))
    for event, delta in zip(stages, own, strict=True):
        expected = after_each_stage(
            delta.logits.tolist(), encode(STORY), [d.token_id for d in own[: event["index"]]], WATCHED
        )
        assert [stage["name"] for stage in event["stages"]] == list(expected)
        ids = [token["id"] for token in event["tokens"]]
        assert delta.token_id in ids
        assert len(ids) == len(set(ids)) == 12
        before = expected["logits"]
        for stage, probs in zip(event["stages"], expected.values(), strict=True):
            assert stage["probs"] == pytest.approx([probs[i] for i in ids], abs=2e-6)
            assert stage["chosen"] == pytest.approx(probs[delta.token_id], abs=2e-6)
            assert sum(stage["probs"]) + stage["others"] == pytest.approx(1)
            assert stage["support"] == sum(x > 0 for x in probs)
            assert stage["kept"] == pytest.approx(sum(x for x, y in zip(before, probs, strict=True) if y > 0), abs=2e-6)
            assert stage["kept"] + stage["removed"] == pytest.approx(1)
            before = probs
        assert set(sorted(range(1024), key=lambda i: -before[i])[:3]) & {
            i for i in range(1024) if before[i] > 0
        } <= set(ids)


def test_watching_changes_no_bit():
    watched, plain = (run(watch)[2] for watch in (True, False))
    assert [(d.request_id, d.token_id, d.text, d.finish_reason) for d in watched] == [
        (d.request_id, d.token_id, d.text, d.finish_reason) for d in plain
    ]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(watched, plain, strict=True) if a.logits is not None)


def test_a_stage_that_only_others_ask_for_is_left_out():
    _, stages, _, _ = run(watch=True, params=SamplingParams(temperature=1.0, seed=2, max_new_tokens=5))
    assert [[stage["name"] for stage in event["stages"]] for event in stages] == [["logits", "temperature"]] * 5
    _, stages, _, _ = run(watch=True, params=SamplingParams(max_new_tokens=5))
    assert [[stage["name"] for stage in event["stages"]] for event in stages] == [["logits"]] * 5


def test_a_grammar_is_a_stage_and_forced_tokens_have_none():
    params = SamplingParams(regex=r" (red|blue) balloons in the morning (ran|sat)", max_new_tokens=40)
    _, stages, _, engine = run(watch=True, params=params, config=EngineConfig(grammar_backend="fsm", jump_forward=True))
    assert re.fullmatch(params.regex, "".join(event["text"] for event in stages))
    sampled = [event for event in stages if event["stages"]]
    assert 0 < len(sampled) < len(stages)
    assert all([stage["name"] for stage in event["stages"]] == ["logits", "grammar"] for event in sampled)
    assert all(event["stages"][1]["chosen"] > 0 for event in sampled)
    assert engine.driver.sampler.trace is None


def test_a_step_with_a_draft_tells_the_stages_of_every_token_and_what_was_refused():
    """Without drafts the stages are the same; each fifth token is guessed wrong."""

    def told(guesses: list[int]):
        class Knowing:
            def propose(self, tokens, most):
                return guesses[len(tokens) :][:most]

        config = replace(ROOMY, batch_invariant=True, drafts="own")
        engine = llm.make_engine(make_driver("embedded", config), TOKENIZER, drafter=Knowing)
        steps, stages = [], []
        for watcher in (StepEvents(engine, steps.append), StageEvents(engine, stages.append, "watched", WATCHED, 12)):
            watcher.attach()
        engine.add_request(encode("One day a bear"), OTHERS[0], "other")
        engine.add_request(encode(STORY), WATCHED, "watched")
        while engine.has_work:
            engine.step()
        own = engine.entries["watched"].output
        return [fields for _, fields in steps], [fields for _, fields in stages], [*own.prompt_ids, *own.token_ids]

    _, plain, text = told([])
    guesses = [token if place % 5 else token + 1 for place, token in enumerate(text)]
    steps, stages, _ = told(guesses)
    assert [event | {"step": 0} for event in stages] == [event | {"step": 0} for event in plain]
    known = len(encode(STORY))
    refused = 0
    for step in steps:
        drafted, accepted = (step[name].get("watched", 0) for name in ("drafted", "accepted"))
        drafts = [TOKENIZER.decode([token], skip_special_tokens=False) for token in guesses[known : known + drafted]]
        assert step["refused"].get("watched", []) == drafts[accepted:]
        known += sum(token["request"] == "watched" for token in step["tokens"])
        refused += drafted - accepted
    assert refused > 3
    assert stages[-1]["step"] - stages[0]["step"] < len(stages) - 3


def test_a_request_that_is_watched_no_longer_leaves_no_stages_behind():
    engine = make_engine("embedded", ROOMY)
    trace = WatchedRows(engine.rows)
    trace.watched |= {"a", "b"}
    trace.calls = {("a", 0): (0, []), ("b", 0): (1, []), ("a", 1): (0, [])}
    trace.forget("a")
    assert (trace.watched, [*trace.calls]) == ({"b"}, [("b", 0)])


def test_steps_tell_every_token_page_and_preemption():
    engine = make_engine("embedded", SERVING)
    steps, deltas = [], []
    StepEvents(engine, lambda event: steps.append(event[1])).attach()
    for prompt in ("One day a bear", "Record: x", "There was an owl named"):
        engine.add_request(encode(prompt), SamplingParams(max_new_tokens=40, ignore_eos=True))
    while engine.has_work:
        deltas += engine.step().deltas
    told = [(token["request"], token["id"]) for step in steps for token in step["tokens"]]
    assert told == [(delta.request_id, delta.token_id) for delta in deltas]
    assert {name: reason for step in steps for name, reason in step["finished"].items()} == {
        name: entry.output.finish_reason for name, entry in engine.entries.items()
    }
    preempted = [name for step in steps for name in step["preempted"]]
    assert len(preempted) > 0
    assert {name: preempted.count(name) for name in engine.entries} == {
        name: entry.output.num_preemptions for name, entry in engine.entries.items()
    }
    for step, logged in zip(steps, engine.log, strict=True):
        assert [tuple(chunk.values())[:3] for chunk in step["chunks"]] == logged.chunks
        assert all(
            chunk["prompt"] == len(engine.entries[chunk["request"]].output.prompt_ids) for chunk in step["chunks"]
        )
    assert json.loads(json.dumps(steps)) == steps


def facts_of(node) -> tuple:
    parent = node.parent.number if node.parent.parent else None
    return parent, node.pages, node.lock_count, node.num_uses


def test_the_tree_and_the_pages_can_be_kept_up_from_the_changes():
    engine = make_engine("embedded", SERVING)
    nodes = {}
    evicted = 0
    checked = 0

    def take(event) -> None:
        nonlocal evicted, checked
        fields = event[1]
        for number in fields["tree"]["removed"]:
            del nodes[number]
            evicted += 1
        nodes.update({node["node"]: node for node in fields["tree"]["changed"]})
        cache = engine.scheduler.cache
        scheduler = engine.scheduler
        told = {n: (each["parent"], each["pages"], each["locks"], each["uses"]) for n, each in nodes.items()}
        assert told == {number: facts_of(node) for number, node in cache.nodes.items()}
        texts = {
            number: engine.tokenizer.decode(n.tokens, skip_special_tokens=False) for number, n in cache.nodes.items()
        }
        assert {number: each["text"] for number, each in nodes.items()} == texts
        held = [page for node in nodes.values() for page in node["pages"]]
        held += [page for request in fields["running"] for page in request["pages"]]
        assert sorted(held) == [page for page in range(9) if not scheduler.allocator.is_free(page)]
        assert fields["pages"]["used"] == len(held)
        checked += 1

    StepEvents(engine, take).attach()
    for index in range(9):
        engine.add_request(encode(STORY[: 20 + 6 * index]), SamplingParams(max_new_tokens=8 + 4 * index))
    while engine.has_work:
        engine.step()
    assert evicted > 0
    assert checked == len(engine.log)


def test_a_slow_reader_gets_an_error_and_a_closed_loop_none():
    read = []

    async def overflow() -> None:
        queue = EventQueue()
        for number in range(MOST_UNREAD + 2):
            queue.put_now(("step", {"step": number}))
        async for data in queue.written():
            read.append(data)

    with pytest.raises(ApiError, match=f"more than {MOST_UNREAD} events behind"):
        asyncio.run(overflow())
    assert len(read) == MOST_UNREAD
    assert read[0] == b'event: step\ndata: {"step":0}\n\n'

    async def make() -> EventQueue:
        return EventQueue()

    asyncio.run(make()).put(("step", {}))


@pytest.mark.parametrize("turns", range(5))
def test_a_reader_that_leaves_as_an_event_comes_is_let_go(turns):
    """If the cancellation is lost, the stream goes on without a reader, and the server never ends."""

    async def leave() -> None:
        queue = EventQueue()
        reader = asyncio.create_task(anext(queue.written()))
        await asyncio.sleep(0.01)
        queue.put_now(("step", {}))
        for _ in range(turns):
            await asyncio.sleep(0)
        if reader.cancel():  # it had not ended
            with pytest.raises(asyncio.CancelledError):
                await reader

    asyncio.run(leave())
