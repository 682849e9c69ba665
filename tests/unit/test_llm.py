"""The first five lines: ``LLM`` gives what the engine gives for the ids of a text or a chat."""

import subprocess
import sys

import pytest

import mini_engine
from mini_engine import LLM, Engine, EngineConfig, SamplingParams
from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.llm import load_driver

TOKENIZER = load_tokenizer(TINY_MODEL)
CHAT = [{"role": "user", "content": "Who is Ida?"}]
PARAMS = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def llm():
    with LLM(config=EngineConfig(max_running_requests=4)) as made:
        yield made


def ids_of(prompt, think=True):
    if isinstance(prompt, str):
        return TOKENIZER.encode(prompt, add_special_tokens=False)
    text = TOKENIZER.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, enable_thinking=think)
    return TOKENIZER.encode(text, add_special_tokens=False)


def greedy(ids, count=12):
    return load_driver().generate(ids, count).token_ids


def test_texts_chats_and_ids_are_answered_in_their_order(llm):
    prompts = ["Once upon a time", CHAT, [5, 6, 7]]
    answers = llm.generate(prompts, PARAMS)
    assert [answer.prompt_ids for answer in answers] == [ids_of(prompts[0]), ids_of(CHAT), [5, 6, 7]]
    assert [answer.token_ids for answer in answers] == [greedy(answer.prompt_ids) for answer in answers]
    assert answers[0].text == TOKENIZER.decode(answers[0].token_ids)


@pytest.mark.parametrize("prompt", ["Once upon a time", CHAT, [5, 6, 7], (5, 6, 7)], ids=str)
def test_a_single_prompt_needs_no_list(llm, prompt):
    (answer,), (in_list,) = llm.generate(prompt, PARAMS), llm.generate([prompt], PARAMS)
    assert answer.token_ids == in_list.token_ids
    deltas = list(llm.stream(prompt, PARAMS))
    assert [delta.token_id for delta in deltas] == answer.token_ids
    assert "".join(delta.text for delta in deltas) == answer.text


def test_whether_a_model_thinks_is_asked_of_the_template(llm):
    for think in (True, False):
        (answer,) = llm.generate(CHAT, PARAMS, think=think)
        assert answer.prompt_ids == ids_of(CHAT, think)
    assert ids_of(CHAT, True) != ids_of(CHAT, False)


def test_parameters_for_each_prompt_and_several_answers(llm):
    several = SamplingParams(max_new_tokens=3, n=2, temperature=1.0, seed=1)
    answers = llm.generate(["a", "b"], [several, SamplingParams(max_new_tokens=5)])
    assert [len(answer.token_ids) for answer in answers] == [3, 3, 5]
    with pytest.raises(ValueError, match="2 prompts and 1 parameters"):
        llm.generate(["a", "b"], [several])
    assert llm.generate([]) == []


def test_a_prompt_that_cannot_be_run_stops_no_other(llm):
    answers = llm.generate(["a", "\ud800", [], [{"role": "user"}, "b"], "c"], PARAMS)
    assert [answer.finish_reason for answer in answers] == ["length", "error", "error", "error", "length"]
    assert "not a character" in answers[1].error
    assert "0 tokens" in answers[2].error


def test_options_are_those_of_the_engine_set_up_for_many():
    with LLM(page_size=4) as made:
        assert made.engine.driver.config == EngineConfig.serving(page_size=4)
        (answer,) = made.generate("How many?", SamplingParams(max_new_tokens=40, json_schema={"type": "integer"}))
        assert int(answer.text) is not None
    with pytest.raises(ValueError, match="page_siez is not an option of EngineConfig"):
        LLM(page_siez=4)
    with pytest.raises(ValueError, match="both config and page_size"):
        LLM(config=EngineConfig(), page_size=4)


def test_the_package_exports_four_names_and_imports_nothing_before_they_are_used():
    assert (mini_engine.Engine, mini_engine.EngineConfig) == (Engine, EngineConfig)
    assert mini_engine.__all__ == ["LLM", "Engine", "EngineConfig", "SamplingParams", "__version__"]
    with pytest.raises(AttributeError, match="no attribute 'Elephant'"):
        mini_engine.Elephant  # noqa: B018
    code = "import sys, mini_engine; mini_engine.__version__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
