"""Programs against an endpoint: the same ids and scores as in the process, and errors that say what was wrong."""

import pytest

from mini_engine import lang
from mini_engine.config import EngineConfig
from mini_engine.llm import LLM

STORY = "Once upon a time there was a fox named"


@lang.program
def essay(s, word):
    s += lang.system("Be brief.") + lang.user(f"Tell me about the {word}.")
    forks = s.fork(2)
    for index, aspect in enumerate(("color", "name")):
        forks[index] += lang.assistant(f"The {aspect}: " + lang.gen("fact", max_new_tokens=6, stop="."))
    s.join(forks)
    s += lang.assistant(
        lang.select("kind", [" big", " very small", " red"])
        + lang.gen("age", type=int, max_new_tokens=40)
        + lang.gen("why", max_new_tokens=5, temperature=0.8, seed=4)
    )


@pytest.fixture(scope="module")
def local():
    return LLM(config=EngineConfig(batch_invariant=True, max_running_requests=8, grammar_backend="auto"))


@pytest.fixture
def endpoint(server):
    return lang.Endpoint(f"{server.url}/v1", "tiny")


def test_an_endpoint_gives_the_ids_and_scores_of_the_engine(local, endpoint):
    words = [{"word": word} for word in ("fox", "dog", "owl")]
    here, there = (essay.run_batch(words, backend=backend) for backend in (local, endpoint))
    for one, other in zip(here, there, strict=True):
        assert one.error is None
        assert other.error is None
        assert one.ids == other.ids
        assert [one[name] for name in ("fact", "kind", "age", "why")] == [
            other[n] for n in ("fact", "kind", "age", "why")
        ]
        assert one.answer("kind").scores == other.answer("kind").scores
        assert one.answer("kind").logprobs == other.answer("kind").logprobs


def test_fewer_calls_are_paid_with_the_same_answers(local, endpoint, server):
    @lang.program
    def record(s):
        s += STORY + lang.gen("a", max_new_tokens=4) + lang.gen("b", max_new_tokens=4) + lang.gen("c", max_new_tokens=4)

    off = record.run(backend=lang.Endpoint(f"{server.url}/v1", "tiny"))
    on = record.run(backend=endpoint, num_api_spec_tokens=32)
    assert on.ids == off.ids == record.run(backend=local).ids
    assert dict(endpoint.stats) == {
        "calls": 1,
        "saved_calls": 2,
        "prompt_tokens": len(local.tokenizer.encode(STORY)),
        "new_tokens": 32,
        "cached_tokens": endpoint.stats["cached_tokens"],
    }


def test_what_the_server_refuses_is_the_error_of_the_call(endpoint):
    @lang.program
    def much(s):
        s += STORY + lang.gen("a", max_new_tokens=10**6)

    @lang.program
    def biased(s):
        s += STORY + lang.gen("a", max_new_tokens=1, bad_words=[[5]])

    with pytest.raises(ValueError, match=r"the endpoint answered 400: .*maximum context length"):
        much.run(backend=endpoint)
    with pytest.raises(ValueError, match="bad_words"):
        biased.run(backend=endpoint)  # an endpoint cannot take them


def test_an_endpoint_that_is_not_there_is_the_error_of_the_call():
    @lang.program
    def little(s):
        s += STORY + lang.gen("a", max_new_tokens=1)

    with pytest.raises(Exception, match="connection"):
        little.run(backend=lang.Endpoint("http://127.0.0.1:9/v1"))
