"""/v1/responses with OpenAI's own client: items and their events, forms, calls of functions, and what is refused.

The oracle of a text is the same question as a chat; that of a stream's order is the client's own accumulator.
"""

import json

import pytest
from openai import BadRequestError
from pydantic import BaseModel

from tests.server.test_messages import SHOWS_ALL
from tests.server.test_tools import BOTH, OSLO, ROME, SCHEMA, scripted, write

__all__ = ["scripted"]  # a fixture

WHO = "Who is Ida?"
TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
QUICK = {"effort": "none"}


class Person(BaseModel):
    """What the model is trained to write."""

    name: str
    age: int
    city: str


@pytest.fixture(scope="module")
def expected(server):
    """The thought and the answer of a chat."""
    asked = [{"role": "user", "content": WHO}]
    (choice,) = server.client().chat.completions.create(model="tiny", messages=asked, temperature=0).choices
    return choice.message.reasoning_content, choice.message.content


def test_a_text_has_the_thought_and_the_answer_of_a_chat(client, expected):
    response = client.responses.create(model="tiny", input=WHO, temperature=0)
    thought, message = response.output
    assert (thought.content[0].text, response.output_text) == expected
    assert (thought.type, message.role, message.status, response.status) == (
        "reasoning",
        "assistant",
        *["completed"] * 2,
    )
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert response.store is False


def test_a_stream_builds_the_same_response_event_by_event(client):
    whole = client.responses.create(model="tiny", input=WHO, temperature=0)
    with client.responses.stream(model="tiny", input=WHO, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole.output_text
    assert final.output[0].content == whole.output[0].content
    assert final.usage == whole.usage.model_copy(update={"input_tokens_details": final.usage.input_tokens_details})
    kinds = [event.type.removeprefix("response.") for event in events]
    text = list(dict.fromkeys(kinds))
    assert text == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done"),
        "completed",
    ]
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text


def test_a_cut_answer_is_incomplete(client):
    response = client.responses.create(model="tiny", input=WHO, max_output_tokens=2, temperature=0)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    stream = client.responses.create(model="tiny", input=WHO, max_output_tokens=2, temperature=0, stream=True)
    assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_form_is_kept_to(client):
    asked = {"model": "tiny", "input": "Record: name Mila, age 7, city Oslo.", "reasoning": QUICK, "temperature": 0}
    assert client.responses.parse(**asked, text_format=Person).output_parsed == Person(name="Mila", age=7, city="Oslo")
    loose = client.responses.create(**asked, text={"format": {"type": "json_object"}, "verbosity": "medium"})
    assert isinstance(json.loads(loose.output_text), dict)


def test_calls_in_a_whole_answer_and_in_a_stream_and_back(scripted):
    client = scripted.client()
    asked = {"model": "tiny", "input": "How warm is it?", "tools": TOOLS, "reasoning": QUICK}
    write(scripted, f"I look.\n{BOTH}")
    response = client.responses.create(**asked)
    message, *calls = response.output
    assert (message.content[0].text, [each.arguments for each in calls]) == ("I look.", [OSLO, ROME])
    assert {(each.type, each.name, each.status) for each in calls} == {("function_call", "weather", "completed")}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [each.arguments for each in final.output[1:]] == [OSLO, ROME]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [OSLO, ROME]
    assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 4
    write(scripted, "Warm.")
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "21"} for call in calls]
    history = [{"role": "user", "content": asked["input"]}, *response.output, *results]
    assert client.responses.create(**{**asked, "input": history}).output_text == "Warm."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_can_be_asked_for(scripted, choice):
    write(scripted, BOTH)
    response = scripted.client().responses.create(
        model="tiny", input=WHO, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, reasoning=QUICK
    )
    assert [(each.type, each.arguments) for each in response.output] == [("function_call", OSLO)]


def test_items_become_the_messages_of_the_same_chat(server, monkeypatch, http):
    template = SHOWS_ALL.replace("{{ m | length }}", "{{ m.tool_call_id }}{{ m.tool_calls | tojson if m.tool_calls }}")
    monkeypatch.setattr(server.service.tokenizer, "chat_template", template)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hmm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
        {"role": "assistant", "content": "Warm."},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How "}, {"type": "input_text", "text": "warm?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hmm"}]},
        {"type": "message", "role": "assistant", "content": "I look.", "id": "m", "status": "completed"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": OSLO, "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "21"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Warm.", "annotations": []}]},
    ]
    seen = []
    encode = server.service.encode_chat

    def spy(messages, *args):
        seen.append(encode(messages, *args))
        return seen[-1]

    monkeypatch.setattr(server.service, "encode_chat", spy)
    body = {"instructions": "Be brief.", "input": items, "max_output_tokens": 1}
    assert http.post("/v1/responses", json=body).status_code == 200
    assert http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).status_code == 200
    assert seen[0] == seen[1]


REFUSED = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp-1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"tool_choice": "required"}, "tools"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}, "text.format"),
    ({"inptu": "x"}, "inptu"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=[json.dumps(change)[:50] for change, _ in REFUSED])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_done_is_refused_by_field(client, change, param, stream):
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": WHO, "stream": stream}, extra_body=change)
    assert str(caught.value.param).startswith(param), caught.value


NEUTRAL = {
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "truncation": "disabled",
    "prompt_cache_key": "x",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "reasoning": {"effort": None, "summary": "auto"},
    "parallel_tool_calls": True,
    "stream_options": {"include_obfuscation": False},
}


def test_fields_that_change_nothing_are_taken(client, expected):
    response = client.responses.create(model="tiny", input=WHO, temperature=0, extra_body=NEUTRAL)
    assert response.output_text == expected[1]
