"""A constraint holds for every finished answer, whether the model thinks, may think, never does, or has begun to."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from mini_engine.llm import LLM
from mini_engine.sampler.params import SamplingParams
from tests.server.conftest import CONFIG, Running, serving

OPENING = "{{- '<|im_start|>assistant\\n' -}}"
PROMPTS = ("Who is Ida?", "Hello", "Tell me a story.", "What is your name?")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}


def template(kind: str, own: str) -> str:
    """The embedded template as it is (a model that may think), one that opens the thought, and one that closes it."""
    assert own.count(OPENING) == 1
    end = {"thinks": "<think>\\n", "never thinks": "<think>\\n\\n</think>\\n\\n"}.get(kind)
    return own if end is None else own.replace(OPENING, OPENING.replace("assistant\\n", f"assistant\\n{end}"))


@pytest.fixture(scope="module", params=["may think", "thinks", "never thinks"])
def thinker(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving() as running:
        running.tokenizer.chat_template = template(request.param, running.tokenizer.chat_template)
        yield running


def is_valid_json(message: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(message["content"]))


def calls_the_tool(message: dict[str, Any]) -> bool:
    return [json.loads(call["function"]["arguments"]).keys() for call in message["tool_calls"]] == [{"a"}]


STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
FORMS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = {
    "json_schema": ({"response_format": STRICT}, is_valid_json),
    "json_object": (
        {"response_format": {"type": "json_object"}},
        lambda message: isinstance(json.loads(message["content"]), dict),
    ),
    "regex": ({"regex": "[0-9]{3}"}, lambda message: re.fullmatch("[0-9]{3}", message["content"]) is not None),
    "choice": ({"guided_choice": ["yes", "no"]}, lambda message: message["content"] in ("yes", "no")),
    "ebnf": ({"ebnf": 'root ::= "a" | "b" root'}, lambda message: re.fullmatch("b*a", message["content"]) is not None),
    "required": ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, calls_the_tool),
    "named": ({"tools": [TOOL], "tool_choice": NAMED}, calls_the_tool),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_finished_answer_keeps_to_its_constraint(thinker: Running, form: str) -> None:
    fields, keeps = FORMS[form]
    finished = 0
    with thinker.http() as http:
        for prompt in PROMPTS:
            asked = {"messages": [{"role": "user", "content": prompt}], "n": 3, "seed": 1, "max_tokens": 150, **fields}
            for choice in http.post("/v1/chat/completions", json=asked).json()["choices"]:
                message = choice["message"]
                assert choice["grammar_backend"] in ("fsm", "llguidance", "xgrammar")
                if choice["finish_reason"] != "length":
                    assert keeps(message), message
                    assert choice["is_grammar_complete"]
                    finished += 1
                assert "think>" not in (message["content"] or "")
    assert finished >= 3


def test_a_thought_that_the_prompt_has_opened_comes_apart_from_the_answer(thinker: Running) -> None:
    """Plain and as a stream: what the model writes, cut at the end of the thought."""
    messages = [{"role": "user", "content": "Who is Ida?"}]
    prompt = thinker.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with thinker.http() as http:
        whole = {"prompt": prompt, "max_tokens": 100, "temperature": 0}
        text = http.post("/v1/completions", json=whole).json()["choices"][0]["text"]
        asked = {"messages": messages, "max_tokens": 100, "temperature": 0}
        message = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
        lines = http.post("/v1/chat/completions", json={**asked, "stream": True}).text.splitlines()
    thought, mark, answer = text.removeprefix("<think>").partition("</think>")
    wanted = (thought.strip("\n"), answer.lstrip("\n")) if mark else ("", text)
    assert bool(mark) == (thinker.tokenizer.decode(prompt[-2:]) != "</think>\n\n")
    assert (message.get("reasoning_content", ""), message["content"]) == wanted
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    parts = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")]
    assert tuple(parts) == wanted


@pytest.mark.parametrize("kind", ["may think", "thinks", "never thinks"])
@pytest.mark.parametrize("think", [True, False])
def test_so_it_does_in_python(kind: str, think: bool) -> None:
    """With ``think=False`` a template writes an empty thought, and the grammar begins at once."""
    with LLM(**{name: getattr(CONFIG, name) for name in ("grammar_backend", "max_running_requests")}) as llm:
        llm.tokenizer.chat_template = template(kind, llm.tokenizer.chat_template)
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        params = SamplingParams(regex="[0-9]{3}", reasoning=True, temperature=1.0, seed=1, max_new_tokens=150)
        answers = llm.generate(chats, params, think=think)
    finished = [answer.text.rpartition("</think>") for answer in answers if answer.finish_reason == "stop"]
    assert finished
    assert all(re.fullmatch("[0-9]{3}", answer) for _, _, answer in finished)
    thoughts = [bool(mark) for _, mark, _ in finished]
    if not think or kind == "never thinks":
        assert not any(thoughts)
    if think and kind == "thinks":
        assert all(thoughts)
