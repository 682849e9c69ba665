"""What a router is told of a server: once a second how busy it is, and how the content of its prefix cache changed."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from mini_engine.outputs import StepOutput
from mini_engine.radix_cache import Node
from mini_engine.server.service import Service
from mini_engine.server.steps import Watcher
from mini_engine.server.stream import event, respond_with_events
from mini_engine.server.watch import attached

PERIOD_S = 1.0


class CacheChanges(Watcher):
    """Finds what the prefix cache holds and has dropped: it knows the tokens of every leaf that it saw after a step."""

    known: dict[int, tuple[str | None, list[int]]]  # by the number of a node: the key of its tree, tokens from the root
    new: set[int]  # the nodes of ``known`` that were not told yet

    def attach(self) -> None:
        """Know what is held now, and look after every step. Mutates the engine's log."""
        self.known = {}
        self.new = set()
        self.learn()
        super().attach()

    def listen(self, output: StepOutput) -> None:
        """Know the new leaves. Mutates."""
        self.learn()

    def learn(self) -> None:
        """Know the leaves that are there. Mutates."""
        cache = self.view.tree
        if cache is not None:
            for number in cache.leaves.keys() - self.known.keys():
                self.known[number] = path_to(cache.leaves[number])
                self.new.add(number)

    def take(self) -> dict[str, list[dict[str, Any]]]:
        """Return what has changed since the last call, which is everything at first. Mutates.

        ``dropped``: of ``tokens`` the first ``kept`` are still held. ``held``, which is to be read after it: ``tokens``
        are held. Call it between two steps.
        """
        cache = self.view.tree
        dropped = list[dict[str, Any]]()
        for number, (key, tokens) in list(self.known.items()):
            kept = self.num_held(key, tokens)
            if kept < len(tokens):
                dropped.append({"key": key, "tokens": tokens, "kept": kept})
                self.known[number] = (key, tokens[:kept])
            if cache is None or number not in cache.nodes:
                del self.known[number]
        new = [self.known[number] for number in sorted(self.new & self.known.keys())]
        self.new.clear()
        return {"dropped": dropped, "held": [{"key": key, "tokens": tokens} for key, tokens in new]}

    def num_held(self, key: str | None, tokens: list[int]) -> int:
        """Return how many of the first ``tokens`` the cache holds, in whole nodes; ``match`` would change ranks."""
        cache = self.view.tree
        node = cache.roots.get(key) if cache else None
        held = 0
        while cache and node:
            child = node.children.get(tuple(tokens[held : held + cache.page_size]))
            if child is None or child.tokens != tokens[held : held + len(child.tokens)]:
                break
            node = child
            held += len(child.tokens)
        return held


def path_to(node: Node) -> tuple[str | None, list[int]]:
    """Return the key of a node's tree and the tokens from the root to the end of the node."""
    edges = list[list[int]]()
    while node.parent is not None:
        edges.append(node.tokens)
        node = node.parent
    return node.cache_key, [token for edge in reversed(edges) for token in edge]


def add_worker_events(app: FastAPI, service: Service, shows_tokens: bool) -> None:
    """Add the endpoint. ``shows_tokens``: it may tell what the requests of others were. Mutates ``app``."""

    @app.get("/worker_events")
    async def worker_events(request: Request) -> Response:
        """Stream how many requests run and wait, and what the prefix cache holds and has dropped, once a second.

        While a step takes longer, comments say that the server is alive.
        """
        return await respond_with_events(request.receive, events(service, shows_tokens), 2 * PERIOD_S)


async def events(service: Service, shows_tokens: bool) -> AsyncGenerator[bytes, None]:
    """Yield an event each second until the server is to end. Raises ``EngineDeadError``."""
    engine = service.engine
    watcher = CacheChanges(engine.engine, lambda _: None)
    async with attached(engine, watcher):
        while not service.is_ending:
            changes = await engine.call(watcher.take)
            counts = {"running": len(service.view.running), "waiting": service.view.num_waiting}
            yield event(counts | (changes if shows_tokens else {"dropped": [], "held": []}))
            await asyncio.sleep(PERIOD_S)
