"""Messages as clients keep them, and how much a model is to think: what the chat template gets to read."""

import pytest

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer

SHOWS_ALL = (
    "{%- for m in messages -%}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|{{ m | length }}]{%- endfor -%}"
    "{{ reasoning_effort }};{{ enable_thinking }}"
)
ASKED = {"role": "user", "content": "Who is Ida?"}


def rendered(server, monkeypatch, template, **body):
    """What the template makes of a chat, read back from the ids that the server's tokenizer gives."""
    monkeypatch.setattr(server.service.tokenizer, "chat_template", template)
    with server.http() as http:
        return http.post("/tokenize", json=body)


def text_of(server, answer):
    assert answer.status_code == 200, answer.text
    return server.tokenizer.decode(answer.json()["tokens"])


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_of_a_history_reaches_the_template_under_either_name(server, monkeypatch, name):
    said = {
        "role": "assistant",
        "content": "A fox.",
        name: "Hmm",
        "refusal": None,
        "id": "msg_1",
        "status": "completed",
    }
    kept = {"role": "assistant", "content": "A fox.", "reasoning_content": "Hmm"}
    part = {"type": "text", "text": "Sure?", "cache_control": {"type": "ephemeral"}}
    chat = [ASKED, {**said, "cache_control": {}, "provider_specific_fields": {}}, {"role": "user", "content": [part]}]
    plain = [ASKED, kept, {"role": "user", "content": "Sure?"}]
    shown = text_of(server, rendered(server, monkeypatch, SHOWS_ALL, messages=chat))
    peer = load_tokenizer(TINY_MODEL)
    peer.chat_template = SHOWS_ALL
    assert shown == peer.decode(peer.apply_chat_template(plain, tokenize=True, enable_thinking=True)["input_ids"])


def test_a_field_that_nobody_knows_is_refused(server, monkeypatch):
    answer = rendered(server, monkeypatch, SHOWS_ALL, messages=[{**ASKED, "cach_control": {}}])
    assert (answer.status_code, "cach_control" in answer.json()["error"]["message"]) == (400, True)


def test_effort_none_turns_thinking_off(server, monkeypatch, client):
    off = rendered(server, monkeypatch, SHOWS_ALL, messages=[ASKED], reasoning_effort="none")
    assert text_of(server, off).endswith(";False")
    monkeypatch.undo()
    (choice,) = client.chat.completions.create(
        model="tiny", messages=[ASKED], temperature=0, reasoning_effort="none"
    ).choices
    assert not hasattr(choice.message, "reasoning_content")


def test_another_effort_is_what_the_template_reads_or_it_is_refused(server, monkeypatch):
    answer = rendered(server, monkeypatch, SHOWS_ALL, messages=[ASKED], reasoning_effort="low")
    assert text_of(server, answer).endswith("low;True")
    deaf = rendered(server, monkeypatch, "{{ messages[0].content }}", messages=[ASKED], reasoning_effort="low")
    assert (deaf.status_code, deaf.json()["error"]["param"]) == (400, "reasoning_effort")
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert rendered(server, monkeypatch, SHOWS_ALL, messages=[ASKED], **both).status_code == 400


@pytest.mark.parametrize(("verbosity", "status"), [("medium", 200), (None, 200), ("low", 400)])
def test_verbosity_is_taken_where_it_changes_nothing(http, verbosity, status):
    body = {"messages": [ASKED], "max_tokens": 1, "verbosity": verbosity}
    assert http.post("/v1/chat/completions", json=body).status_code == status
