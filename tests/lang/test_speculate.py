"""Answers that are cut from what an earlier call wrote ahead: the same as without, in fewer calls."""

import random
from collections import Counter

import pytest

from mini_engine import SamplingParams, lang
from mini_engine.lang.run import hub_of

STORY = "Once upon a time there was a fox named"


def calls_of(llm, program, *args, **options):
    """Run a program; return its state and what its calls cost."""
    backend = hub_of(llm).backend
    before = Counter(backend.stats)
    state = program.run(*args, backend=llm, **options)
    return state, backend.stats - before


@lang.program
def written(s, pieces):
    """Append texts, and a gen for every mapping of sampling parameters."""
    s += STORY
    for index, piece in enumerate(pieces):
        s += piece if isinstance(piece, str) else lang.gen(f"gen {index}", **piece)


def draw_pieces(source, llm):
    """Gens, and between them what the model writes there, cut anywhere, or something it does not write."""
    whole = llm.generate([STORY], SamplingParams(max_new_tokens=80))[0].text
    pieces = []
    place = 0
    for _ in range(source.randint(2, 4)):
        length = source.randint(3, 25)
        stop = whole[place + length : place + length + source.randint(1, 6)] if source.random() < 0.7 else ""
        gen = {"max_new_tokens": source.randint(1, 30)}
        if stop and source.random() < 0.8:
            gen |= {"stop": stop, "max_new_tokens": 60}
        pieces.append(gen)
        place += length
        if source.random() < 0.7:
            pieces.append(stop or whole[place : place + 5] if source.random() < 0.8 else " and then")
            place += len(stop or "     ")
    return [piece for piece in pieces if piece]


@pytest.mark.parametrize("seed", range(4))
def test_answers_and_ids_are_the_same_on_and_off(llm, seed):
    source = random.Random(seed)
    pieces = draw_pieces(source, llm)
    off, paid_off = calls_of(llm, written, pieces)
    for ahead in (1, 8, 64):
        on, paid_on = calls_of(llm, written, pieces, num_api_spec_tokens=ahead)
        assert on.ids == off.ids
        assert {name: on[name] for name in on.own} == {name: off[name] for name in off.own}
        reasons = [(s.answer(n).output.finish_reason, s.answer(n).output.matched) for s in (on, off) for n in off.own]
        assert reasons[: len(off.own)] == [(r, m if isinstance(m, str) else None) for r, m in reasons[len(off.own) :]]
        assert paid_on["calls"] + paid_on["saved_calls"] == paid_off["calls"]


def test_speculation_and_canonical_ids_exclude_each_other(llm):
    with pytest.raises(ValueError, match="canonical"):
        written.run([], backend=llm, canonical=True, num_api_spec_tokens=3)


def test_forks_draw_their_own_samples(llm):
    @lang.program
    def forked(s):
        s += STORY + lang.gen("a", max_new_tokens=2)
        forks = s.fork(4)
        for index in range(4):
            forks[index] += lang.gen("b", max_new_tokens=8)
        s.join(forks)

    state, paid = calls_of(llm, forked, num_api_spec_tokens=30, temperature=1.5)
    assert len(set(state["b"])) > 1
    assert paid["calls"] == 5
    state, paid = calls_of(llm, forked, num_api_spec_tokens=30, temperature=1.5, seed=3)
    assert state["b"] == calls_of(llm, forked, temperature=1.5, seed=3)[0]["b"]
    assert paid["calls"] == 1


def test_a_stream_shows_nothing_of_what_was_written_ahead(llm):
    @lang.program
    def tale(s):
        s += STORY + lang.gen("a", max_new_tokens=4) + lang.gen("b", max_new_tokens=8, stop=".")

    state = tale.start(backend=llm, num_api_spec_tokens=30)
    for name in ("a", "b"):
        assert "".join(state.stream(name)) == state[name]
