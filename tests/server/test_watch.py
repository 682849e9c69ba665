"""The streams of steps and stages over HTTP."""

import gc
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mini_engine import overlay
from mini_engine.attention import dense
from mini_engine.sampler import filters
from tests.server.conftest import CONFIG, serving

STORY = "Once upon a time there was a fox named Mila who lived in a small house"
KNOBS = {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 11}


def events_of(response: httpx.Response) -> Iterator[tuple[str, dict]]:
    name = ""
    for line in response.iter_lines():
        kind, _, value = line.partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            yield name, json.loads(value)


def stages(http: httpx.Client, **body: object) -> list[tuple[str, dict]]:
    with http.stream("POST", "/v1/stages", json={"prompt": STORY, "max_tokens": 20, **body}) as response:
        assert response.status_code == 200, response.read()
        return list(events_of(response))


def wait_until(holds) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("knobs", [KNOBS, {"temperature": 0}, {"seed": 2, "regex": " (red|blue) (ball|boat)"}])
def test_the_chosen_tokens_are_those_of_completions(server, http, knobs):
    events = stages(http, **knobs)
    asked = {"prompt": STORY, "max_tokens": 20, "logprobs": 5, **knobs}
    plain = http.post("/v1/completions", json=asked).json()["choices"][0]
    tokens = [fields for name, fields in events if name == "token"]
    assert events[0][0] == "start"
    assert [piece["id"] for piece in events[0][1]["prompt"]] == server.tokenizer.encode(STORY)
    assert events[-1][0] == "done"
    assert (events[-1][1]["text"], events[-1][1]["finish_reason"]) == (plain["text"], plain["finish_reason"])
    assert "".join(token["text"] for token in tokens) in (plain["text"], plain["text"] + "<|im_end|>")
    assert [token["stages"][0]["chosen"] for token in tokens] == pytest.approx(
        [2.718281828459045**x for x in plain["logprobs"]["token_logprobs"]], rel=1e-4
    )
    assert events[-1][1]["usage"]["completion_tokens"] == len(tokens)


def test_steps_begin_with_the_engine_and_show_every_request(server, http):
    before = list(server.engine.log.listeners)  # one that writes receipts stays
    with http.stream("GET", "/v1/steps") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response)
        name, engine = next(events)
        assert (name, engine["model"], engine["modules"], engine["page_size"]) == (
            "engine",
            "tiny",
            None,
            CONFIG.page_size,
        )
        answered = stages(http, **KNOBS, top=3)
        told: list[int] = []
        for _, step in events:
            told += [token["id"] for token in step["tokens"] if token["request"] == answered[0][1]["request"]]
            if answered[0][1]["request"] in step["finished"]:
                break
    assert told == [fields["id"] for name, fields in answered if name == "token"]
    wait_until(lambda: server.engine.log.listeners == before and server.engine.driver.sampler.trace is None)


def test_leaving_a_stream_of_stages_aborts_its_request_quietly(server, http, caplog):
    before = list(server.engine.log.listeners)  # one that writes receipts stays
    with http.stream("POST", "/v1/stages", json={"prompt": STORY, "max_tokens": 1500, "ignore_eos": True}) as response:
        next(events_of(response))
    server.wait_until_idle()
    wait_until(lambda: server.engine.log.listeners == before and server.engine.driver.sampler.trace is None)
    assert http.get("/health").status_code == 200  # so the loop has handed out the end
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_reader_of_steps_does_not_keep_the_server_from_ending():
    with serving() as running, running.http() as http, http.stream("GET", "/v1/steps") as response:
        events = events_of(response)
        next(events)
        running.server.handle_exit(signal.SIGTERM, None)
        began = time.monotonic()
        assert list(events) == []
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"top_p": 3.0}, "top_p", "above 0 and at most 1"),
        ({"n": 2}, None, "one answer is streamed"),
        ({"prompt_logprobs": 1}, None, "prompt_logprobs changes nothing here"),
        ({"max_tokens": 0}, "max_tokens", "ask for at least 1"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_a_body_at_fault_is_refused_before_the_stream(http, body, param, words):
    answer = http.post("/v1/stages", json={"prompt": STORY, **body})
    assert answer.status_code == (404 if "model" in body else 400)
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


def test_only_files_of_the_page_are_sent(http):
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for name in ("style.css", "app.js", "views.js", "timeline.js", "stream.js", "dom.js", "plotly.js"):
        assert http.get(f"/page/{name}").status_code == 200
    assert "://" not in page.text.replace("http://www.w3.org", "")  # nothing comes from elsewhere
    for name in ("plotly.min.js", "..%2Fapp.py", "index.htm"):
        assert http.get(f"/page/{name}").status_code == 404


def test_the_key_guards_the_streams_and_not_the_page():
    with serving(api_key="secret") as running, running.http() as http:
        assert http.get("/").status_code == http.get("/page/app.js").status_code == 200
        assert http.get("/v1/steps").status_code == http.post("/v1/stages", json={"prompt": "a"}).status_code == 401
        with http.stream("GET", "/v1/steps", headers={"Authorization": "Bearer secret"}) as response:
            assert next(events_of(response))[0] == "engine"


@pytest.mark.slow
def test_play_serves_the_page_over_ones_own_modules(tmp_path):
    for module in (filters, dense):
        own = tmp_path / "work" / Path(module.__file__).relative_to(overlay.REFERENCE)
        own.parent.mkdir(parents=True)
        own.write_text(Path(module.__file__).read_text())
    command = [sys.executable, "-m", "mini_engine", "play", "--no-browser", "--engine", str(tmp_path / "work")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        url = next(line for line in running.stderr if line.startswith("see the engine")).split()[5]
        with httpx.stream("GET", f"{url}v1/steps") as response:
            name, engine = next(events_of(response))
        looked = httpx.post(f"{url}v1/attention", json={"prompt": STORY, "layer": 4})
        running.send_signal(signal.SIGINT)
        running.stderr.read()
    assert (name, engine["model"], engine["modules"]) == ("engine", "tiny", "work")
    assert sum(looked.json()["weights"]) == pytest.approx(1, abs=1e-5)
    assert running.returncode in (0, -signal.SIGINT, 130)
