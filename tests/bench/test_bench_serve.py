"""The benchmark of the server: how it reads a stream, and its arithmetic on a system made by hand."""

import asyncio
import time

import pytest

from mini_engine.bench.serve import Ask, Received, make_asks, serve_load
from mini_engine.checkpoint import TINY_MODEL, load_tokenizer


def test_events_have_the_moments_at_which_they_were_whole():
    async def read():
        received = Received()
        for data in (
            b'HTTP/1.1 200 OK\r\n\r\n21\r\ndata: {"a":1}\n\n',
            b'data: {"a"',
            b':2}\n\ndata: {"a":3}\n\n',
            b"0",
        ):
            received.data_received(data)
        received.moments = [1.0, 2.0, 3.0, 4.0]
        return list(received.events())

    assert asyncio.run(read()) == [(1.0, {"a": 1}), (3.0, {"a": 2}), (3.0, {"a": 3})]


def test_a_load_waits_for_arrivals_and_is_reduced_to_figures():
    class Clock:
        async def ask(self, ask):
            now = time.perf_counter()
            return [now + 0.5, now + 0.51, now + 0.53]

    figures = asyncio.run(serve_load(Clock(), [Ask("", 30, 0.0), Ask("", 30, 0.05)]))
    assert figures.ttft_p50 == pytest.approx(500, abs=25)
    assert (figures.itl_p50, figures.itl_p99) == pytest.approx((15, 20), abs=0.5)
    assert figures.tokens_per_s == pytest.approx(60 / 0.58, rel=0.1)


def test_prompts_are_stories_of_the_asked_length():
    tokenizer = load_tokenizer(TINY_MODEL)
    asks = make_asks("equal", 3, tokenizer, 2.0, 0)
    assert [len(tokenizer.encode(ask.prompt)) for ask in asks] == pytest.approx([128] * 3, abs=4)
    assert len({ask.prompt for ask in asks}) == 3
    assert [ask.new_tokens for ask in asks] == [64] * 3
    assert asks[0].arrival_s == 0 < asks[1].arrival_s < asks[2].arrival_s
    assert asks != make_asks("equal", 3, tokenizer, 2.0, 1)
