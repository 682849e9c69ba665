"""Every error has OpenAI's form, so that its client raises the class that fits; and it names the field at fault."""

import threading
from dataclasses import replace

import openai
import pytest

from mini_engine.server.service import Limits
from tests.server.conftest import CONFIG, serving

QUESTION = [{"role": "user", "content": "Who is Ida?"}]
PICTURE = {"role": "user", "content": [{"type": "image_url"}]}
COMPLETION = {"prompt": "The", "max_tokens": 3}
JSON = {"Content-Type": "application/json"}
CHAT = {"messages": QUESTION, "max_tokens": 3}

# path, what is changed in a good body, the field at fault, a part of the message
TOOL = {"type": "function", "function": {"name": "f"}}
LISTED = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
FAULTY = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "other.json"}}}
NAMED = {"type": "function", "function": {"name": "g"}}
TWO_TAGS = {"type": "structural_tag", "format": {}, "structures": [], "triggers": []}
BAD = [
    ("completions", {"temperature": -1}, "temperature", "from 0 to"),
    ("completions", {"temprature": 1}, "temprature", "not a field that this server knows"),
    ("completions", {"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ("completions", {"max_tokens": 3, "min_tokens": 5}, "min_tokens", "min_tokens is 5 and max_tokens 3"),
    ("completions", {"n": 65}, "n", "at most 64"),
    ("completions", {"n": 2, "best_of": 1}, "best_of", "best_of is 1 and n is 2"),
    ("completions", {"n": 1, "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    ("chat/completions", {"messages": [PICTURE]}, "messages.0.content.0.type", "'text'"),
    ("completions", {"suffix": "the end"}, "suffix", "suffix is 'the end'"),
    ("completions", {"logit_bias": {"1": 200}}, "logit_bias", "-100 to 100"),
    ("completions", {"logit_bias": {"5000": 1}}, "logit_bias", "ids 0 to 1023"),
    ("completions", {"prompt": ["a", ""]}, "prompt", "empty"),
    ("completions", {"prompt": [1, 5000]}, "prompt", "5000"),
    ("completions", {"prompt": ["x"] * 129}, "prompt", "at most 128"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options", "only for streams"),
    ("completions", {"bad_words": [" "]}, "bad_words", "empty word"),
    ("completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves 0 tokens"),
    ("completions", {"regex": "("}, "regex", "unterminated"),
    ("completions", {"regex": "a", "ebnf": "b"}, "ebnf", "leave one"),
    ("completions", {"guided_choice": []}, "guided_choice", "at least one choice"),
    ("completions", {"structured_outputs": {}}, "structured_outputs", "give one"),
    ("completions", {"json_schema": "x" * 70_000}, "json_schema", "at most 65536"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    ("chat/completions", {"tools": [TOOL, TOOL]}, "tools", "two tools have the name 'f'"),
    ("chat/completions", {"tools": [LISTED]}, "tools", "the parameters of f are of type 'array'"),
    ("chat/completions", {"tools": [FAULTY]}, "tools", "other.json"),
    ("chat/completions", {"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "'g', and the tools are f"),
    ("chat/completions", {"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice", "regex is given"),
    ("chat/completions", {"tools": [TOOL], "regex": "a"}, "tool_choice", "leave one"),
    ("chat/completions", {"response_format": {"type": "structural_tag"}}, "response_format", "needs a format"),
    ("chat/completions", {"response_format": TWO_TAGS}, "response_format", "leave one"),
    ("chat/completions", {"tool_choice": "required"}, "tools", "no tools"),
    ("chat/completions", {"stop": [""]}, "stop", "at least one character"),
]


@pytest.mark.parametrize(("path", "change", "param", "message"), BAD, ids=[f"{b[0][:4]} {str(b[1])[:40]}" for b in BAD])
def test_a_bad_value_is_the_clients_fault_and_its_field_is_named(http, path, change, param, message):
    good = COMPLETION if path == "completions" else CHAT
    response = http.post(f"/v1/{path}", json={"model": "tiny"} | good | change)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert message in error["message"]


def test_a_misspelt_field_is_named_and_not_the_one_that_is_missing(http):
    error = http.post("/v1/completions", json={"promt": "x"}).json()["error"]
    assert error["param"] == "promt"


def test_a_bad_schema_is_known_before_a_stream_begins(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}
    with pytest.raises(openai.BadRequestError, match="thing") as caught:
        client.chat.completions.create(model="tiny", messages=QUESTION, response_format=form, stream=True)
    assert caught.value.param == "response_format"


def test_an_overlong_prompt_is_told_in_the_words_that_clients_look_for(client):
    words = r"This model's maximum context length is 2048 tokens\. However, you requested 3000 tokens"
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.completions.create(model="tiny", prompt=[1] * 2000, max_tokens=1000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x " * 3000}])


@pytest.mark.parametrize(
    ("options", "most"),
    [({"max_model_len": 40}, 40), ({"num_pages": 3}, 48), ({"num_pages": 3, "max_model_len": 20}, 20)],
    ids=str,
)
def test_a_limit_on_positions_is_told_everywhere_and_fills_what_is_left_out(options, most):
    """With a small pool the server used to promise 2048 positions, and to refuse every chat without ``max_tokens``."""
    with serving(replace(CONFIG, grammar_backend="none", **options)) as running, running.http() as http:
        client = running.client()
        assert client.models.retrieve("tiny").max_model_len == most
        told = [
            http.get("/get_server_info").json(),
            http.get("/v1/models").json()["data"][0],
            http.post("/tokenize", json={"prompt": "The owl"}).json(),
        ]
        assert [each["max_model_len"] for each in told] == [most] * 3
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_body={"ignore_eos": True}
        )
        assert chat.usage.total_tokens == most
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {most} tokens"):
            client.completions.create(model="tiny", prompt=[1] * 5, max_tokens=most - 4)


def test_another_model_is_not_found(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'large' does not exist") as caught:
        client.completions.create(model="large", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/large")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b'"text"', 400),
        ("/v1/completions", b"\xff\xfe{}", 400),
        ("/v1/completions", b'{"prompt": "\\ud800", "max_tokens": 1}', 400),
        ("/v1/completions", b'{"prompt": "x", "guided_json": {"enum": ["\\ud800"]}}', 400),
        ("/v1/completions", b'{"prompt": "x", "temperature": 1e999}', 400),
        ("/v1/completions", b"[" * 100_000, 400),
        ("/v1/completions", b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 413),
        ("/v1/nothing", b"{}", 404),
    ],
)
def test_malformed_requests_have_an_error_object(http, path, body, status):
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_body_without_a_length_is_cut_off_too(http):
    response = http.post("/v1/completions", content=(b" " * 1_000_000 for _ in range(6)), headers=JSON)
    assert response.status_code == 413
    assert "more than 4194304 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x" * 2_000_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 2_000_000}]}),
    ],
)
def test_a_text_that_can_never_fit_is_refused_unread(server, http, monkeypatch, path, body):
    """Tokenizing it takes seconds. With ``truncate_prompt_tokens`` it is asked for, and off the event loop."""
    seen = []
    encode = server.tokenizer.encode
    monkeypatch.setattr(
        server.tokenizer, "encode", lambda *a, **k: seen.append(threading.current_thread()) or encode(*a, **k)
    )
    response = http.post(f"/v1/{path}", json=body | {"max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["code"], seen) == (400, "context_length_exceeded", [])
    assert "2000000 characters" in error["message"]
    assert http.post(f"/v1/{path}", json=body | {"max_tokens": 1, "truncate_prompt_tokens": 5}).status_code == 200
    assert seen
    assert server.thread not in seen


def test_more_answers_than_may_ever_wait_are_refused_for_good(client, http):
    """A 429 would let a client try again for ever."""
    response = http.post("/v1/completions", json={"prompt": ["x"] * 100, "n": 3, "max_tokens": 1})
    assert response.status_code == 400
    assert "300 answers are asked for at once, and at most 264 run or wait" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models"])
def test_a_head_is_answered(http, path):
    assert http.head(path).status_code == 200


def test_a_key_is_asked_for_if_there_is_one():
    with serving(api_key="secret") as running:
        assert running.client().completions.create(model="tiny", **COMPLETION).choices
        for key in ("wrong", "secre", "secrets", ""):
            with pytest.raises(openai.AuthenticationError, match="API key"):
                running.client().with_options(api_key=key or "x").completions.create(model="tiny", **COMPLETION)
        with running.http() as http:
            assert http.get("/health").status_code == 200
            assert [http.get(path).status_code for path in ("/v1/models", "/metrics", "/nothing")] == [401] * 3


def test_a_full_queue_a_deadline_a_failed_step_and_a_dead_engine():
    limits = Limits(max_waiting=0, timeout_s=1.0)
    with serving(CONFIG.serving(max_running_requests=1), limits) as running:
        client = running.client()
        engine = running.engine
        with pytest.raises(openai.BadRequestError, match="at most 1 run or wait"):
            client.completions.create(model="tiny", prompt=["x", "y"])
        endless = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        with client.completions.create(model="tiny", prompt="x", stream=True, **endless) as running_one:
            next(running_one)
            with pytest.raises(openai.RateLimitError, match="limit of 1") as caught:
                client.completions.create(model="tiny", prompt="y")
        running.wait_until_idle()
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError, match=r"longer than 1 s") as late:
            client.completions.create(model="tiny", prompt="x", **endless)
        assert late.value.status_code == 504
        running.wait_until_idle()
        sampler = engine.driver.sampler

        def fail(*_):
            engine.driver.sampler = sampler
            raise RuntimeError("no luck")

        engine.driver.sampler = fail
        with pytest.raises(openai.InternalServerError, match="no luck"):
            client.completions.create(model="tiny", prompt="x", stream=True)
        assert client.completions.create(model="tiny", prompt="x").choices
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=900, stream=True)
        assert next(stream).choices
        engine.driver.sampler = fail
        with pytest.raises(openai.APIError, match="no luck"):
            list(stream)  # after the headers the failure is an event

        def refuse():
            raise RuntimeError("no schedule")

        engine.schedule = refuse
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="no schedule") as dead:
                client.completions.create(model="tiny", prompt="x")
            assert dead.value.status_code == 503
        with running.http() as http:
            assert http.get("/health").status_code == 503
