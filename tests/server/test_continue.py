"""``continue_final_message`` over HTTP, with the fields of vLLM."""

from typing import Any

import pytest

from mini_engine.llm import load_driver
from tests.server.conftest import CONFIG, Running

MESSAGES = [{"role": "user", "content": "Who is Ida?"}, {"role": "assistant", "content": "Ida is"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}])
def test_a_chat_goes_on_within_the_last_message(server: Running, more: dict[str, Any]) -> None:
    ids = server.tokenizer.apply_chat_template(MESSAGES, continue_final_message=True, return_dict=False)
    wanted = server.tokenizer.decode(load_driver(None, CONFIG).generate(ids, 12).token_ids, skip_special_tokens=True)
    with server.http() as http:
        body = {"messages": MESSAGES, "continue_final_message": True, **more}
        assert http.post("/tokenize", json=body).json()["tokens"] == ids
        (choice,) = http.post("/v1/chat/completions", json={**ASKED, **body}).json()["choices"]
        assert choice["message"]["content"] == wanted
        bound = {**ASKED, **body, "structured_outputs": {"regex": " (old|new)"}}
        (choice,) = http.post("/v1/chat/completions", json=bound).json()["choices"]
        assert choice["message"]["content"] in (" old", " new")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_a_prompt_ends_in_one_place(server: Running, path: str) -> None:
    with server.http() as http:
        for value in (True, False):
            body = {"messages": MESSAGES, "add_generation_prompt": value, "continue_final_message": value}
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert f"are both {value}" in answer.json()["error"]["message"]
        answer = http.post(path, json={"messages": MESSAGES[:1], "continue_final_message": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "a message of the assistant" in answer.json()["error"]["message"]
