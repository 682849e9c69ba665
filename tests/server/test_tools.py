"""Calls of functions with OpenAI's own client: chosen freely, asked for, several, cut, streamed, with their results.

The embedded model was not trained to call. Where it must, a processor of the tests makes it likely to write a given
text; what the grammar forbids stays forbidden.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import jsonschema
import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel
from torch import Tensor

from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.registry import REGISTRY
from mini_engine.server.chat import Chat
from mini_engine.server.schema import ChatBody
from mini_engine.server.service import Service
from tests.server.conftest import Running, serving

QUESTION = [{"role": "user", "content": "How warm is it in Oslo?"}]
QUICK = {"chat_template_kwargs": {"enable_thinking": False}}
PLACE = {"enum": ["Oslo", "Rome"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/place"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": PLACE},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "How warm.", "parameters": SCHEMA}}
NOTHING = {"type": "function", "function": {"name": "do_nothing"}}
TOOLS = [WEATHER, NOTHING]
NAMED = {"type": "function", "function": {"name": "weather"}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


OSLO, ROME = '{"city": "Oslo", "days": 2}', '{"city": "Rome"}'
BOTH = f"{call('weather', OSLO)}\n{call('weather', ROME)}"
script: list[int] = []  # what the processor makes likely


class Scripted(LogitsProcessor[int]):
    """Adds much to the logit of the next token of the script."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> int | None:
        return len(history.output_ids)

    def apply(self, logits: Tensor) -> None:
        for row, place in self.states.items():
            if place < len(script):
                logits[row, script[place]] += 1e6

    def advance(self, state: int, token_id: int) -> int:
        return state + 1


@pytest.fixture(scope="module")
def scripted() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, "scripted", Scripted)
        with serving(defaults={"temperature": 0.0, "logits_processors": {"scripted": {}}}) as running:
            yield running


class Answer:
    """An answer, plain or put together from a stream."""

    def __init__(self, client: OpenAI, stream: bool, **options: Any) -> None:
        extra = {**QUICK, **options.pop("extra_body", {})}
        asked = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "extra_body": extra, **options}
        made = client.chat.completions.create(**asked, stream=stream)
        if not stream:
            (choice,) = made.choices
            self.reason, self.content = choice.finish_reason, choice.message.content
            self.thought = getattr(choice.message, "reasoning_content", None)
            self.calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
            self.ids = [c.id for c in choice.message.tool_calls or ()]
            return
        self.chunks = [chunk.choices[0] for chunk in made]
        self.reason = self.chunks[-1].finish_reason
        deltas = [chunk.delta for chunk in self.chunks]
        self.content = "".join(delta.content or "" for delta in deltas)
        self.thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) or None
        self.calls, self.ids = [], []
        for part in (part for delta in deltas for part in delta.tool_calls or ()):
            if part.id is not None:
                assert part.index == len(self.calls)
                self.calls.append((part.function.name, part.function.arguments))
                self.ids.append(part.id)
            else:
                assert (part.index, part.function.name) == (len(self.calls) - 1, None)
                name, arguments = self.calls[-1]
                self.calls[-1] = name, arguments + part.function.arguments
        self.content = self.content if self.content or not self.calls else None


def write(server: Running, text: str) -> None:
    """Make the model write a text and end."""
    ids = server.tokenizer.encode(text, add_special_tokens=False)
    script[:] = [*ids, server.tokenizer.eos_token_id]


STREAM = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


@STREAM
def test_calls_that_the_model_chooses(scripted: Running, stream: bool) -> None:
    write(scripted, f"I look.\n{BOTH}")
    answer = Answer(scripted.client(), stream)
    assert answer.calls == [("weather", OSLO), ("weather", ROME)]
    assert (answer.content, answer.reason) == ("I look.", "tool_calls")
    assert len(set(answer.ids)) == 2
    if stream:
        pieces = [chunk.delta.tool_calls for chunk in answer.chunks if chunk.delta.tool_calls]
        assert len(pieces) > 6, "the arguments come in pieces"


@STREAM
def test_text_alone_and_what_only_looks_like_a_call(scripted: Running, stream: bool) -> None:
    for text in ("It is warm.", "<tool_calls> are {not} <tool_call"):
        write(scripted, text)
        answer = Answer(scripted.client(), stream)
        assert (answer.content, answer.calls, answer.reason) == (text, [], "stop")


@STREAM
def test_a_call_that_is_none_of_the_tools_cannot_be_written(scripted: Running, stream: bool) -> None:
    for wrong in (call("rain", "{}"), call("weather", '{"city": "Paris"}'), call("do_nothing", '{"x": 1}')):
        write(scripted, wrong)
        answer = Answer(scripted.client(), stream, max_tokens=150)
        ((name, arguments),) = answer.calls
        assert name in ("weather", "do_nothing")
        if answer.reason != "length":
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"maxProperties": 0})


@STREAM
def test_one_call_at_most_without_parallel_calls(scripted: Running, stream: bool) -> None:
    write(scripted, f"I look.\n{BOTH}")
    answer = Answer(scripted.client(), stream, parallel_tool_calls=False)
    assert (answer.content, answer.calls, answer.reason) == ("I look.", [("weather", OSLO)], "tool_calls")


@STREAM
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_calls_that_are_asked_for_have_the_same_form(scripted: Running, stream: bool, choice: Any, reason: str) -> None:
    """No text may come before them, and a named function is called once."""
    write(scripted, BOTH)
    answer = Answer(scripted.client(), stream, tool_choice=choice)
    wanted = [("weather", OSLO), ("weather", ROME)] if choice == "required" else [("weather", OSLO)]
    assert (answer.content, answer.calls, answer.reason) == (None, wanted, reason)
    write(scripted, "I look.")
    answer = Answer(scripted.client(), stream, tool_choice=choice, max_tokens=100)
    assert answer.content is None
    assert answer.calls


@STREAM
def test_a_call_that_is_cut_says_length_and_shows_what_was_written(scripted: Running, stream: bool) -> None:
    """Its arguments as far as they go. Without a whole name there is no call to show, and what was written is none."""
    text = call("weather", OSLO)
    write(scripted, text)
    lengths = [len(scripted.tokenizer.encode(part, add_special_tokens=False)) for part in text.split("Oslo")]
    answer = Answer(scripted.client(), stream, max_tokens=lengths[0])
    assert (answer.content, answer.calls, answer.reason) == (None, [("weather", '{"city": "')], "length")
    for options in ({}, {"tool_choice": "required"}):
        answer = Answer(scripted.client(), stream, max_tokens=lengths[0] // 2, **options)
        assert (answer.content, answer.calls, answer.reason) == ("", [], "length")
    answer = Answer(scripted.client(), stream, max_tokens=1, tool_choice="required")
    assert (answer.content, answer.calls, answer.reason) == ("", [], "length")
    answer = Answer(scripted.client(), stream, max_tokens=1)
    assert (answer.content, answer.calls, answer.reason) == ("<", [], "length")
    answer = Answer(scripted.client(), stream, stop=["days"])
    assert (answer.calls, answer.reason) == ([("weather", '{"city": "Oslo", "')], "stop")
    answer = Answer(scripted.client(), stream, stop=["</tool_call>"])
    assert (answer.calls, answer.reason) == ([("weather", OSLO)], "tool_calls")


@STREAM
def test_a_call_inside_a_thought_is_none(scripted: Running, stream: bool) -> None:
    may_think = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    write(scripted, f"<think>\nShall I {BOTH}?\n</think>\n\nNo.")
    answer = Answer(scripted.client(), stream, **may_think)
    assert (answer.content, answer.calls, answer.reason) == ("No.", [], "stop")
    assert answer.thought == f"Shall I {BOTH}?"
    write(scripted, f"<think>\nI shall.\n</think>\n\n{call('do_nothing', '{}')}")
    answer = Answer(scripted.client(), stream, **may_think)
    assert (answer.content, answer.calls, answer.reason) == (None, [("do_nothing", "{}")], "tool_calls")
    assert answer.thought == "I shall."


@STREAM
def test_an_answer_of_a_schema_or_calls(scripted: Running, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    for text, content, calls in (("37", "37", []), (call("do_nothing", "{}"), None, [("do_nothing", "{}")])):
        write(scripted, text)
        answer = Answer(scripted.client(), stream, response_format=form)
        assert (answer.content, answer.calls) == (content, calls)
    write(scripted, call("do_nothing", "{}"))
    assert Answer(scripted.client(), stream, response_format=form, tool_choice="required").calls == calls
    with pytest.raises(BadRequestError, match="leave one of them"):
        Answer(scripted.client(), stream, tool_choice="required", extra_body={"regex": "[0-9]+"})


def test_a_round_trip_of_calls_results_and_an_answer(scripted: Running) -> None:
    """The history reaches the template as the model wrote it, so the second prompt goes on where the first ended."""
    client = scripted.client()
    write(scripted, BOTH)
    asked = {"model": "tiny", "tools": TOOLS, "extra_body": QUICK}
    turn = client.chat.completions.create(messages=QUESTION, **asked).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": made.id, "content": f"{json.loads(made.function.arguments)['city']}: 7"}
        for made in turn.tool_calls
    ]
    write(scripted, "7 degrees.")
    last = client.chat.completions.create(messages=[*QUESTION, turn.model_dump(), *results], **asked)
    assert last.choices[0].message.content == "7 degrees."
    assert last.choices[0].finish_reason == "stop"
    prompt = prompt_of(scripted, [*QUESTION, turn.model_dump(), *results])
    assert prompt.endswith(
        f"<|im_start|>assistant\n{BOTH}<|im_end|>\n<|im_start|>user\n<tool_response>\nOslo: 7\n</tool_response>\n"
        "<tool_response>\nRome: 7\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert prompt.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n{json.dumps(NOTHING)}\n</tools>" in prompt


def prompt_of(server: Running, messages: list[dict[str, Any]]) -> str:
    """The prompt of a chat with tools, as the server renders it."""
    sent = json.dumps({"messages": messages, "tools": TOOLS, **QUICK})
    prompt = Chat(server.service, ChatBody.model_validate_json(sent)).prompt
    return str(server.tokenizer.decode(prompt))


@contextmanager
def template(server: Running, text: str) -> Iterator[None]:
    own = server.tokenizer.chat_template
    server.tokenizer.chat_template = text
    try:
        yield
    finally:
        server.tokenizer.chat_template = own


CALLS = "{%- for call in (messages[1].tool_calls or ()) -%}"
OBJECT = CALLS + "<tool_call>{{- call.function.arguments | tojson -}}{%- endfor -%}"  # Qwen2.5
EITHER = CALLS + (  # Qwen3
    "<tool_call>{%- if call.function.arguments is string -%}{{- call.function.arguments -}}{%- else -%}object"
    "{%- endif -%}{%- endfor -%}"
)
JOINED = CALLS + "{{- '<tool_call>' + call['function']['arguments'] + '.' -}}{%- endfor -%}"  # DeepSeek


@pytest.mark.parametrize(
    ("text", "arguments", "shown"),
    [
        (OBJECT, '{"é":1}', '{"é": 1}'),
        (OBJECT, '{"a', '"{\\"a"'),
        (OBJECT, "[1]", '"[1]"'),
        (EITHER, '{"é":1}', '{"é":1}'),
        (EITHER, '{"a', '{"a'),
        (JOINED, '{"é":1}', '{"é":1}.'),
    ],
)
def test_arguments_reach_a_template_as_it_takes_them(scripted: Running, text: str, arguments: str, shown: str) -> None:
    """An object, or the text as it was sent. What is no JSON, as of a call that was cut, stays a text."""
    made = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    with template(scripted, text):
        assert prompt_of(scripted, [*QUESTION, {"role": "assistant", "tool_calls": [made]}]) == f"<tool_call>{shown}"


def test_a_template_that_teaches_no_calls_is_refused_unless_a_parser_is_named(scripted: Running) -> None:
    client = scripted.client()
    write(scripted, BOTH)
    own = scripted.tokenizer.chat_template
    assert own.count("<tool_call>") >= 2
    for text in (own.replace("tool_call>", "call>"), f"{own}{{#- <function= -#}}"):
        with template(scripted, text):
            with pytest.raises(BadRequestError, match="--tool-parser hermes") as caught:
                Answer(client, False)
            assert caught.value.param == "tool_choice"
            assert Answer(client, False, tool_choice="required").calls == [("weather", OSLO), ("weather", ROME)]
            scripted.service.tool_parser = "hermes"
            try:
                assert Answer(client, False).calls == [("weather", OSLO), ("weather", ROME)]
            finally:
                scripted.service.tool_parser = None
    with template(scripted, {"default": "", "tool_use": own}):
        assert Answer(client, False).reason == "tool_calls"


def test_an_unknown_parser_is_refused_when_the_server_starts(scripted: Running) -> None:
    service = scripted.service
    assert Service(service.engine, scripted.tokenizer, "tiny", tool_parser="hermes").tool_parser == "hermes"
    with pytest.raises(ValueError, match=r"tool_parser is 'llama'; .*hermes"):
        Service(service.engine, scripted.tokenizer, "tiny", tool_parser="llama")


class Weather(BaseModel):
    """How warm it is."""

    city: Literal["Oslo", "Rome"]
    days: int


def test_helpers_of_the_client_parse_calls(scripted: Running) -> None:
    """Its strict tools, made from a pydantic model, whole and as a stream of events."""
    write(scripted, call("Weather", OSLO))
    asked = {"model": "tiny", "messages": QUESTION, "tools": [pydantic_function_tool(Weather)], "extra_body": QUICK}
    parsed = scripted.client().chat.completions.parse(**asked).choices[0].message.tool_calls[0].function
    assert parsed.parsed_arguments == Weather(city="Oslo", days=2)
    with scripted.client().chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        (made,) = stream.get_final_completion().choices[0].message.tool_calls
    assert made.function.parsed_arguments == Weather(city="Oslo", days=2)
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1


@STREAM
def test_log_probabilities_of_calls_cover_every_token(scripted: Running, stream: bool) -> None:
    write(scripted, f"I look.\n{BOTH}")
    asked = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "extra_body": QUICK, "logprobs": True}
    made = scripted.client().chat.completions.create(**asked, stream=stream)
    reports = [chunk.choices[0].logprobs for chunk in (made if stream else [made])]
    tokens = [entry.token for report in reports if report is not None for entry in report.content]
    assert "".join(tokens).removesuffix("<|im_end|>") == f"I look.\n{BOTH}"


def test_calls_of_several_choices_are_told_apart(scripted: Running) -> None:
    write(scripted, BOTH)
    asked = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "extra_body": QUICK, "n": 2, "stream": True}
    asked["temperature"] = 1
    names: dict[int, list[str]] = {0: [], 1: []}
    for chunk in scripted.client().chat.completions.create(**asked):
        for part in chunk.choices[0].delta.tool_calls or ():
            names[chunk.choices[0].index] += [part.function.name] if part.function.name else []
    assert names == {0: ["weather", "weather"], 1: ["weather", "weather"]}


def test_a_chat_is_counted_with_its_tools(server, client, http) -> None:
    """What ``/tokenize`` counts is what the chat costs."""
    messages = [{"role": "user", "content": "How is the weather?"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    counted = http.post("/tokenize", json={"messages": messages, "tools": tools}).json()
    template = server.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
    assert counted["tokens"] == template
    asked = client.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=1)
    assert asked.usage.prompt_tokens == counted["count"] > 30
    refused = http.post("/tokenize", json={"prompt": "a", "tools": tools})
    assert refused.status_code == 400
    assert "tools are for a chat" in refused.text
