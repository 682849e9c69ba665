"""/v1/chat/completions with OpenAI's own client: thoughts, streams, log-probabilities, forms and calls of functions."""

import json

import jsonschema
import pytest
import torch
from openai import BadRequestError
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from mini_engine.checkpoint import TINY_MODEL

QUESTION = [{"role": "user", "content": "Who is Ida?"}]
RECORD = [{"role": "user", "content": "Record: name Mila, age 7, city Oslo."}]
QUICK = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "do_nothing"}}


class Person(BaseModel):
    """What the model is trained to write."""

    name: str
    age: int
    city: str


@pytest.fixture(scope="module")
def expected(request):
    """The answer to the question by transformers: the thought, and what follows it."""
    server = request.getfixturevalue("server")
    peer = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    text = server.tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([server.tokenizer.encode(text)])
    out = peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=100)
    answer = server.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    thought, _, rest = answer.partition("</think>")
    return thought.removeprefix("<think>").strip("\n"), rest.lstrip("\n")


def test_the_thought_comes_apart_from_the_answer(client, expected):
    (choice,) = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0).choices
    assert (choice.message.reasoning_content, choice.message.content) == expected
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.stop_reason is None


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client, expected):
    stream = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == expected[0]
    assert "".join(delta.content or "" for delta in deltas) == expected[1]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(deltas) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens > 0) == ([], True)


def test_parts_a_developer_and_max_completion_tokens(client):
    plain = [{"role": "system", "content": "Be brief."}, *QUESTION]
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who is "}, {"type": "text", "text": "Ida?"}]},
    ]
    answers = [
        client.chat.completions.create(model="tiny", messages=messages, temperature=0, extra_body=QUICK)
        for messages in (plain, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    short = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, max_tokens=9, max_completion_tokens=3
    )
    assert short.usage.completion_tokens == 3
    assert short.choices[0].finish_reason == "length"


@pytest.mark.parametrize("annotations", [None, []])
def test_an_answer_with_all_its_fields_is_taken_as_a_turn(client, annotations):
    def follow_up(turn):
        messages = [*QUESTION, turn, {"role": "user", "content": "Thanks!"}]
        answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, extra_body=QUICK)
        return answer.choices[0].message

    answer = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, extra_body=QUICK)
    dumped = answer.choices[0].message.model_dump()
    assert {"annotations", "audio", "function_call"} <= dumped.keys()
    short = {"role": "assistant", "content": dumped["content"]}
    assert follow_up({**dumped, "annotations": annotations}).content == follow_up(short).content
    with pytest.raises(BadRequestError, match="annotations"):
        follow_up({**short, "annotations": [{"type": "url_citation"}]})


def test_log_probabilities_cover_every_token_in_streams_too(server, client):
    options = {"model": "tiny", "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    plain = client.chat.completions.create(**options)
    entries = plain.choices[0].logprobs.content
    assert len(entries) == plain.usage.completion_tokens
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        assert len(entry.top_logprobs) == 2
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


@pytest.mark.parametrize("extra", [{}, QUICK])
def test_a_pydantic_model_is_parsed_and_a_json_object_is_one(client, extra):
    options = {"model": "tiny", "messages": RECORD, "temperature": 0, "extra_body": extra}
    answer = client.chat.completions.parse(response_format=Person, **options)
    assert answer.choices[0].message.parsed == Person(name="Mila", age=7, city="Oslo")
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **options)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"guided_regex": "[0-9]{3}"},
        {"regex": "[0-9]{3}"},
        {"structured_outputs": {"grammar": "root ::= [0-9] [0-9] [0-9]"}},
        {"ebnf": "root ::= [0-9] [0-9] [0-9]"},
        {"structured_outputs": {"choice": ["123", "987"]}},
        {"guided_choice": ["123", "987"]},
        {"guided_json": {"type": "integer", "minimum": 100, "maximum": 999}},
        {"json_schema": '{"type": "integer", "minimum": 100, "maximum": 999}'},
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "123"}}},
    ],
    ids=lambda form: json.dumps(form)[:40],
)
def test_every_way_to_ask_for_a_form_is_kept_to(client, form):
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=1, seed=1, max_tokens=50, extra_body=form | QUICK
    )
    text = answer.choices[0].message.content
    assert text.isdecimal()
    assert len(text) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{}, QUICK])
def test_required_and_named_tools_are_called(client, stream, extra):
    options = {"model": "tiny", "messages": QUESTION, "temperature": 1, "seed": 4, "tools": [WEATHER, NOTHING]}
    options |= {"extra_body": extra, "parallel_tool_calls": False, "stream": stream}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(**options, tool_choice=choice)
        if stream:
            chunks = list(answer)
            parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
            calls = [part for part in parts if part.id is not None]
            calls[0].function.arguments = "".join(part.function.arguments for part in parts)
            reason = chunks[-1].choices[0].finish_reason
        else:
            calls = answer.choices[0].message.tool_calls
            reason = answer.choices[0].finish_reason
            assert answer.choices[0].message.content is None
        assert reason == ("tool_calls" if choice == "required" else "stop")
        (call,) = calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            jsonschema.validate(arguments, WEATHER["function"]["parameters"])
        else:
            assert (choice, call.function.name, arguments) == ("required", "do_nothing", {})


def test_no_tool_is_called_if_none_may(client):
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, tools=[WEATHER], tool_choice="none", max_tokens=40
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")
