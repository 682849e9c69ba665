"""What a token looked at, over HTTP: the weights are those of transformers, and no answer notices the request."""

import threading

import pytest
import torch
from starlette.testclient import TestClient
from transformers import Qwen3ForCausalLM

from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.play import Small
from mini_engine.model import Qwen3
from mini_engine.server.app import create_app
from mini_engine.server.attention import MOST_TOKENS
from tests.server.conftest import serving
from tests.server.test_watch import events_of

STORY = "Once upon a time there was a fox named Mila who lived in a small house near the old mill."


def peer_weights(ids: list[int]) -> list[torch.Tensor]:
    """The attention of transformers, averaged over heads: for each layer, query by key."""
    peer = Qwen3ForCausalLM.from_pretrained(TINY_MODEL, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        return [layer[0].mean(0) for layer in peer(torch.tensor([ids]), output_attentions=True).attentions]


def ask(http, **body):
    return http.post("/v1/attention", json={"prompt": STORY, "layer": 0, **body})


@pytest.mark.parametrize("compute", ["reference", "fast", "compiled"])
def test_the_weights_are_those_of_transformers_in_every_layer(compute):
    with serving(Small(compute=compute).config()) as running, running.http() as http:
        ids = running.tokenizer.encode(STORY)
        for layer, peer in enumerate(peer_weights(ids)):
            for position in (0, 9, len(ids) - 1):
                answer = ask(http, layer=layer, position=position).json()
                assert (answer["layer"], answer["position"]) == (layer, position)
                assert answer["weights"] == pytest.approx(peer[position, : position + 1].tolist(), abs=1e-5)
                assert sum(answer["weights"]) == pytest.approx(1, abs=1e-5)
            assert answer == ask(http, layer=layer).json() == ask(http, layer=layer, prompt=ids).json()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"layer": 5}, "layer", "layer is 5; the model has the layers 0 to 4"),
        ({"layer": -1}, "layer", "greater than or equal to 0"),
        ({"position": 3, "prompt": [1, 2, 3]}, "position", "position is 3; the prompt has the tokens 0 to 2"),
        ({"prompt": [7] * 1025}, "position", "the first 1024 tokens alone; choose one of 0 to 1023"),
        ({"prompt": [1, 5000]}, "prompt", "5000"),
        ({"prompt": ""}, "prompt", "at least 1"),
        ({"heads": 1}, "heads", "not a field that this server knows"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_what_is_not_there_is_refused(http, body, param, words):
    answer = ask(http, **body)
    assert answer.status_code == (404 if "model" in body else 400)
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


def test_a_long_sequence_is_answered_up_to_the_limit(http):
    assert len(ask(http, prompt=[7] * 1500, position=1023).json()["weights"]) == MOST_TOKENS


def test_answers_and_steps_do_not_notice(server, http):
    """The same tokens, stages and chunks in as many steps, whether or not requests for attention come meanwhile."""
    body = {"prompt": STORY, "max_tokens": 60, "ignore_eos": True, "seed": 3}

    def answer() -> tuple[list, list]:
        http.post("/flush_cache")
        before = server.engine.log.num_steps
        with http.stream("POST", "/v1/stages", json=body) as response:
            events = list(events_of(response))
        server.wait_until_idle()
        told = [(each["id"], each["stages"], each["step"] - before) for name, each in events if name == "token"]
        steps = [each for each in server.engine.log if each.number >= before]
        return told, [([chunk[1:] for chunk in each.chunks], each.num_pages_used) for each in steps]

    quiet = answer()
    statuses = []
    is_over = threading.Event()

    def keep_asking() -> None:
        with server.http() as other:
            while not is_over.is_set():
                statuses.append(ask(other, layer=2).status_code)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        assert answer() == quiet
    finally:
        is_over.set()
        asking.join()
    assert set(statuses) == {200}


def test_the_gates_of_the_page_guard_it(server):
    gates = {"page": (False, 404), "api_key": ("secret", 401), "hosts": (["a.example"], 421)}
    for name, (value, status) in gates.items():
        assert ask(TestClient(create_app(server.service, **{name: value}))).status_code == status
    text = TestClient(create_app(server.service)).post(
        "/v1/attention", content="{}", headers={"Content-Type": "text/plain"}
    )
    assert text.status_code == 415


@pytest.mark.parametrize(
    ("name", "replacement", "fault"),
    [
        ("attention_block", lambda self, index, layer, x, *_: x, "never asked for"),
        ("mlp_block", lambda self, layer, x: x * torch.nan, "not finite"),
    ],
)
def test_a_model_at_fault_is_refused_by_name(monkeypatch, http, name, replacement, fault):
    monkeypatch.setattr(Qwen3, name, replacement)
    answer = ask(http, layer=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (500, "layer")
    assert fault in answer.json()["error"]["message"]
