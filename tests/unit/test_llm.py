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


def test_a_mapping_of_transformers_is_its_prompts(llm):
    (answer,) = llm.generate(TOKENIZER("Once there was"), PARAMS)
    assert answer.prompt_ids == TOKENIZER("Once there was").input_ids
    assert "".join(delta.text for delta in llm.stream(TOKENIZER("Once there was"), PARAMS)) == answer.text
    batch = TOKENIZER(["Once there was", "The"], padding=True, return_tensors="pt")
    assert [each.prompt_ids for each in llm.generate(batch, PARAMS)] == [answer.prompt_ids, ids_of("The")]


def test_a_refused_prompt_has_as_many_answers_as_another(llm):
    """Refused when it is encoded, and refused by the engine."""
    several = SamplingParams(max_new_tokens=2, n=3, best_of=4, temperature=1.0, seed=1)
    answers = llm.generate(["a", None, "b", [], [99_999], "c"], [several, several, PARAMS, several, several, several])
    is_wrong = [answer.finish_reason == "error" for answer in answers]
    assert is_wrong == [False] * 3 + [True] * 3 + [False] + [True] * 6 + [False] * 3
    assert all(answer.error for answer in answers[3:6] + answers[7:13])
    assert [answer.text for answer in answers[13:]] == [answer.text for answer in llm.generate("c", several)]


@pytest.mark.parametrize(
    "prompt", [None, float("nan"), 5, b"a", (each for each in "ab"), {"role": "user"}, {5, 6}], ids=type
)
def test_what_is_not_a_prompt_is_an_error_in_its_place(llm, prompt):
    for given, reasons in (["a", prompt, "b"], ["length", "error", "length"]), (prompt, ["error"]):
        assert [answer.finish_reason for answer in llm.generate(given, PARAMS)] == reasons
    with pytest.raises(ValueError, match="the prompt"):
        llm.stream(prompt, PARAMS)


@pytest.mark.parametrize("params", [{}, {"temperature": 1}, 0, "greedy", [5, PARAMS], [PARAMS, {}]], ids=type)
def test_other_parameters_are_refused_before_anything_runs(llm, params):
    with pytest.raises(ValueError, match=r"the parameters of prompt [01] are .*; give SamplingParams"):
        llm.generate(["a", "b"], params)
    with pytest.raises(ValueError, match="param"):
        llm.stream("a", params)


@pytest.mark.parametrize("late", [False, True])
def test_the_name_of_a_special_token_stops_an_answer(llm, late):
    """With ``min_new_tokens`` it may end later, with the next one."""
    (free,) = llm.generate(CHAT, SamplingParams(max_new_tokens=60, ignore_eos=True))
    ends = [place for place, token in enumerate(free.token_ids, 1) if token == TOKENIZER.eos_token_id]
    least = ends[0] if late else 0
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, stop=["<|im_end|>"], min_new_tokens=least)
    (answer,) = llm.generate(CHAT, params)
    assert "".join(delta.text for delta in llm.stream(CHAT, params)) == answer.text
    taken = [*ends, 60][late]
    assert answer.token_ids == free.token_ids[:taken]
    assert answer.text == TOKENIZER.decode(answer.token_ids, skip_special_tokens=True)
    assert answer.matched == ("<|im_end|>" if ends[late:] else None)


def test_a_stop_string_with_a_special_token_in_it_is_refused_by_name(llm):
    refused, good = llm.generate(["a", "b"], [SamplingParams(stop=["\n<|im_end|>"]), PARAMS])
    assert refused.finish_reason == "error"
    assert "'<|im_end|>' is a special token" in refused.error
    assert f"stop_token_ids=[{TOKENIZER.eos_token_id}]" in refused.error
    assert good.finish_reason == "length"
    assert not llm.engine.has_work
    assert not llm.engine.entries
