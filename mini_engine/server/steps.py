"""What the engine does, as events: every step of it, and for single requests the distribution after every stage.

An event is made only while a reader is connected, and it is made of numbers that the engine has anyway.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from mini_engine.engine import Engine
from mini_engine.outputs import Delta, StepOutput
from mini_engine.radix_cache import Node
from mini_engine.sampler.filters import largest
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.rows import SampledRows
from mini_engine.sampler.trace import SamplingTrace, Stage
from mini_engine.scheduler.request import Request
from mini_engine.server.errors import ApiError
from mini_engine.server.stream import event
from mini_engine.texts import AfterText
from mini_engine.view import EngineView

Event = tuple[str, dict[str, Any]]  # its name and its fields
MOST_UNREAD = 4096  # events that a slow reader may be behind
KEEP_ALIVE_S = 1.0  # after so long without an event a comment is sent, so that no proxy closes the stream


class EventQueue:
    """Hands events from the thread that steps the engine to a coroutine, which writes them as server-sent events."""

    def __init__(self) -> None:
        """Belong to the running event loop."""
        self.loop = asyncio.get_running_loop()
        self.queue = asyncio.Queue[Event | None](MOST_UNREAD)
        self.is_full = False

    def put(self, event: Event | None) -> None:
        """Add an event, from any thread; ``None`` ends the stream. Mutates."""
        with suppress(RuntimeError):  # the loop may be closed
            self.loop.call_soon_threadsafe(self.put_now, event)

    def put_now(self, event: Event | None) -> None:
        """Add an event on the loop's own thread. A reader that is too slow loses the stream, not single events."""
        self.is_full = self.is_full or self.queue.full()
        if not self.is_full:
            self.queue.put_nowait(event)

    async def written(self) -> AsyncIterator[bytes]:
        """Yield server-sent events, and a comment now and then, until the stream ends.

        Raises ``ApiError`` for a reader that was too slow.
        """
        while not (self.is_full and self.queue.empty()):
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):  # ``wait_for`` of Python 3.11 can lose a cancellation
                    item = await self.queue.get()
            except TimeoutError:
                yield b": no step\n\n"
                continue
            if item is None:
                return
            name, fields = item
            yield event(fields, name)
        raise ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"the reader was more than {MOST_UNREAD} events behind; read faster, or connect again",
        )


def engine_fields(engine: Engine) -> dict[str, Any]:
    """Return the first event of the stream of steps: how the engine is set up, and the number of the next step."""
    view = EngineView(engine)
    config, model = view.config, view.model
    names = "compute dtype page_size max_running_requests max_tokens_per_step policy preemption prefix_cache eviction"
    fields = {name: getattr(config, name) for name in [*names.split(), "grammar_backend", "jump_forward", "drafts"]}
    sizes = {"num_pages": view.num_pages, "max_positions": config.positions(model)}
    sizes |= {"num_layers": model.num_hidden_layers, "vocab_size": model.vocab_size}
    return fields | sizes | {"step": view.num_steps}


class Watcher:
    """Describes steps of an engine as events. ``attach`` and ``detach`` between two steps, on the engine's thread."""

    def __init__(self, engine: Engine, put: Callable[[Event], None]) -> None:
        """Describe the steps of ``engine``; ``put`` takes the events."""
        self.engine = engine
        self.view = EngineView(engine)
        self.put = put

    def attach(self) -> None:
        """Be called after every step. Mutates the engine's log."""
        self.engine.log.listeners.append(self.listen)

    def detach(self) -> None:
        """Be called no more. Does nothing if it is not attached. Mutates the engine's log."""
        if self.listen in self.engine.log.listeners:
            self.engine.log.listeners.remove(self.listen)

    def listen(self, output: StepOutput) -> None:
        """Describe a step that has just ended."""
        raise NotImplementedError


class StepEvents(Watcher):
    """Describes every step to one reader. It keeps what the reader knows of the tree, and only changes are sent."""

    def __init__(self, engine: Engine, put: Callable[[Event], None]) -> None:
        """Describe the steps of ``engine`` to a reader that knows nothing yet."""
        super().__init__(engine, put)
        self.known: dict[int, tuple[Any, ...]] = {}

    def listen(self, output: StepOutput) -> None:
        """Describe a step that has just ended. Mutates what is known."""
        self.put(self.event(output))

    def event(self, output: StepOutput) -> Event:
        """Describe a step: what was computed, what came out, and who holds which pages afterwards. Mutates."""
        view = self.view
        tokens = [
            {"request": d.request_id, "id": d.token_id, "text": d.text} for d in output.deltas if d.token_id is not None
        ]
        return "step", {
            "step": output.number,
            "began": output.began,
            "seconds": output.seconds,
            "chunks": [self.chunk(*chunk) for chunk in output.chunks],
            "copied": output.copied,
            "preempted": output.preempted,
            "forced": output.forced,
            "drafted": output.drafted,
            "accepted": output.accepted,
            "refused": {name: [text_of(self.engine, [token]) for token in ids] for name, ids in output.refused.items()},
            "tokens": tokens,
            "finished": {d.request_id: d.finish_reason for d in output.deltas if d.finish_reason is not None},
            "running": [running(request) for request in view.running],
            "waiting": [request.request_id for request in view.waiting],
            "compiling": output.num_compiling,
            "pages": {
                "total": view.num_pages,
                "used": output.num_pages_used,
                "cached": view.num_pages_cached,
                "evictable": view.num_pages_evictable,
            },
            "tree": self.tree(),
        }

    def chunk(self, request_id: str, start: int, num_tokens: int) -> dict[str, Any]:
        """Describe what was computed of one request."""
        prompt = len(self.view.output(request_id).prompt_ids)
        return {"request": request_id, "start": start, "tokens": num_tokens, "prompt": prompt}

    def tree(self) -> dict[str, Any] | None:
        """Return what has changed in the radix tree since the last call; ``None`` without one. Mutates."""
        cache = self.view.tree
        if cache is None:
            return None
        now = {node.number: outline(node) for _, node in cache.descend()}
        changed = [self.node(cache.nodes[number]) for number, own in now.items() if self.known.get(number) != own]
        removed = [number for number in self.known if number not in now]
        self.known = now
        return {"changed": changed, "removed": removed}

    def node(self, node: Node) -> dict[str, Any]:
        """Describe a node of the tree."""
        parent = node.parent
        assert parent is not None, "roots are not described"
        return {
            "node": node.number,
            "parent": None if parent.parent is None else parent.number,
            "key": parent.cache_key,
            "tokens": list(node.tokens),
            "text": text_of(self.engine, node.tokens),
            "pages": list(node.pages),
            "uses": node.num_uses,
            "locks": node.lock_count,
            "last_used": node.last_used,
        }


def running(request: Request) -> dict[str, Any]:
    """Describe a running request; its ``pages`` are those that the cache does not own."""
    num_cached = len(request.hit.pages)
    return {
        "request": request.request_id,
        "computed": request.num_computed_tokens,
        "tokens": request.num_tokens,
        "cached_pages": num_cached,
        "pages": request.pages[num_cached:],
    }


def outline(node: Node) -> tuple[Any, ...]:
    """Return numbers of which one changes whenever the node does. A node's tokens change only with its pages."""
    parent = node.parent
    return parent and parent.number, len(node.pages), node.lock_count, node.num_uses, node.last_used


def text_of(engine: Engine, token_ids: Sequence[int]) -> str:
    """Return the text of ``token_ids``, or their numbers if the engine has no tokenizer."""
    if engine.tokenizer is None:
        return " ".join(map(str, token_ids))
    return AfterText(engine.tokenizer).decode(token_ids, skip_special_tokens=False)


class WatchedRows(SamplingTrace):
    """A trace that copies only the rows of watched requests. Their tokens are the same with and without it."""

    keeps_calls = True

    def __init__(self, rows: SampledRows[Request]) -> None:
        """Trace the rows that ``rows`` holds at the time of a call."""
        super().__init__()
        self.rows = rows
        self.watched = set[str]()
        self.places = dict[int, tuple[str, int]]()  # of a row: its request, and how many tokens that has
        self.calls = dict[tuple[str, int], tuple[int, list[Any]]]()  # of a place: its row, and the records of the call

    def start(self, logits: Tensor) -> Callable[[str, Tensor], None]:
        """Find the watched requests among the rows, and begin the records of a call. Mutates."""
        places = [(request.request_id, request.num_output_tokens) for request in self.rows.requests]
        self.places = {row: place for row, place in enumerate(places) if place[0] in self.watched}
        note = super().start(logits)
        self.calls |= {place: (row, self.records) for row, place in self.places.items()}
        return note

    def note(self, name: str, logits: Tensor, rows: Sequence[int] | None = None) -> None:
        """Copy the watched rows of ``logits`` [R, V]. Mutates."""
        own = range(len(logits)) if rows is None else rows
        places = [place for place, row in enumerate(own) if row in self.places]
        if places:
            super().note(name, logits[places], [own[place] for place in places])

    def take(self, request_id: str, index: int) -> list[Stage]:
        """Return the stages that token ``index`` of a request went through, and forget them. Mutates."""
        row, self.records = self.calls.pop((request_id, index), (0, []))
        return self.stages(row)

    def forget(self, request_id: str) -> None:
        """Watch a request no longer, and forget the tokens of which nobody heard. Mutates."""
        self.watched.discard(request_id)
        self.calls = {place: call for place, call in self.calls.items() if place[0] != request_id}


class StageEvents(Watcher):
    """Describes every token of one request: the distribution before and after every stage, and what was chosen."""

    def __init__(
        self, engine: Engine, put: Callable[[Event], None], request_id: str, params: SamplingParams, top: int
    ) -> None:
        """Describe the tokens of a request with these ``params``. ``top``: so many tokens of a distribution."""
        super().__init__(engine, put)
        self.request_id = request_id
        self.params = params
        self.top = top
        self.index = 0

    def attach(self) -> None:
        """Have the sampler keep what it does to the request's row. Mutates the log and the sampler."""
        super().attach()
        sampler = self.engine.driver.sampler
        if not isinstance(sampler.trace, WatchedRows):
            sampler.trace = WatchedRows(self.engine.rows)
        sampler.trace.watched.add(self.request_id)

    def detach(self) -> None:
        """Leave the sampler as it was when the last watched request has gone. Mutates the log and the sampler."""
        super().detach()
        sampler = self.engine.driver.sampler
        if isinstance(sampler.trace, WatchedRows):
            sampler.trace.forget(self.request_id)
            sampler.trace = sampler.trace if sampler.trace.watched else None

    def listen(self, output: StepOutput) -> None:
        """Describe the tokens that a step gave the request. Mutates."""
        for delta in output.deltas:
            if delta.request_id == self.request_id and delta.token_id is not None:
                self.put(self.token(delta, output.number))
                self.index += 1

    def token(self, delta: Delta, step: int) -> Event:
        """Describe a token. One that the grammar forced went through no stages."""
        assert delta.token_id is not None, "a delta without a token is not described"
        trace = self.engine.driver.sampler.trace
        token = delta.token_id
        stages = list[Stage]()
        if delta.logits is not None and isinstance(trace, WatchedRows):
            stages = self.asked(trace.take(self.request_id, self.index))
        ids = shown_ids(stages, token, self.top)
        return "token", {
            "request": self.request_id,
            "step": step,
            "index": self.index,
            "id": token,
            "text": delta.text,
            "piece": text_of(self.engine, [token]),
            "tokens": [{"id": each, "piece": text_of(self.engine, [each])} for each in ids],
            "stages": [described(stage, ids, token) for stage in stages],
        }

    def asked(self, stages: Sequence[Stage]) -> list[Stage]:
        """Return the stages without those that ran for other rows of the batch and changed nothing here."""
        own = asked_stages(self.params)
        kept = list(stages[:1])
        for stage in stages[1:]:
            if stage.name in own or not torch.equal(stage.probs, kept[-1].probs):
                kept.append(stage)
        return kept


def asked_stages(params: SamplingParams) -> set[str]:
    """Return the names of the stages that ``params`` ask for."""
    penalties = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    filters = {"temperature": True, "top-k": params.top_k > 0, "top-p": params.top_p < 1, "min-p": params.min_p > 0}
    processors = {"penalties": penalties, "grammar": params.grammar is not None}
    return {name for name, is_on in (processors | (filters if not params.is_greedy else {})).items() if is_on}


def shown_ids(stages: Sequence[Stage], chosen: int, top: int) -> list[int]:
    """Return at most ``top`` ids: the chosen one, the likeliest after all stages and those before, likeliest first."""
    if not stages:
        return [chosen]
    first = stages[0].probs
    last = stages[-1].probs
    after, before = likeliest(last, top), likeliest(first, top)
    ids = list(dict.fromkeys([chosen, *after[: top // 2], *before, *after]))[:top]
    return sorted(ids, key=lambda token: (-float(first[token]), token))


def likeliest(probs: Tensor, count: int) -> list[int]:
    """Return the ids of the ``count`` largest of ``probs`` [V] that are above 0, largest first."""
    return [token for token in largest(probs[None], count)[1][0].tolist() if probs[token] > 0]


def described(stage: Stage, ids: Sequence[int], chosen: int) -> dict[str, Any]:
    """Describe one stage: the probabilities of ``ids``, of the chosen token and of all others, and what was removed."""
    probs = stage.probs[list(ids)].tolist()
    return {
        "name": stage.name,
        "kept": min(1.0, stage.kept),
        "removed": max(0.0, 1 - stage.kept),
        "support": stage.support,
        "entropy": stage.entropy,
        "chosen": float(stage.probs[chosen]),
        "probs": probs,
        "others": max(0.0, float(stage.probs.sum()) - sum(probs)),
    }
