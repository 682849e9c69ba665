"""/v1/completions with OpenAI's own client; the oracle is transformers on the same weights."""

import collections

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM

from mini_engine.checkpoint import TINY_MODEL

STORY = "Once upon a time there was a fox named Mila"
LINES = [STORY, "A dog named Tom", "The owl"]


@pytest.fixture(scope="module")
def peer():
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL)


def greedy(peer, tokenizer, prompt, new_tokens):
    ids = torch.tensor([tokenizer.encode(prompt)])
    out = peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
    return out[0, ids.shape[1] :].tolist()


def logprobs_of(peer, ids):
    """The log-probability of every token but the first, and the whole rows."""
    with torch.inference_mode():
        rows = peer(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return rows[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), rows


def test_texts_ids_and_lists_of_both_are_continued_as_transformers_does(server, client, peer):
    tokenizer = server.tokenizer
    expected = [tokenizer.decode(greedy(peer, tokenizer, line, 12)) for line in LINES]
    ids = [tokenizer.encode(line) for line in LINES]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    for prompt in (LINES, ids):
        answer = client.completions.create(prompt=prompt, **options)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 36
    for prompt in (LINES[0], ids[0]):
        assert client.completions.create(prompt=prompt, **options).choices[0].text == expected[0]


def test_the_defaults_are_those_of_openai(client):
    answer = client.completions.create(model="tiny", prompt=STORY, seed=1)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    texts = {client.completions.create(model="tiny", prompt="The", seed=seed).choices[0].text for seed in range(4)}
    assert len(texts) > 1  # temperature 1


def test_echo_scores_a_prompt_as_transformers_does(server, client, peer):
    ids = server.tokenizer.encode(STORY)
    expected, rows = logprobs_of(peer, ids)
    answer = client.completions.create(
        model="tiny", prompt=[ids], echo=True, logprobs=2, max_tokens=0, temperature=0, seed=1234
    )
    (choice,) = answer.choices
    assert choice.text == STORY
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert "".join(choice.logprobs.tokens) == STORY
    for at, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert STORY[at:].startswith(token)
    for row, table in zip(rows[:-1], choice.logprobs.top_logprobs[1:], strict=True):
        assert max(table.values()) == pytest.approx(float(row.max()), abs=1e-4)
    assert answer.usage.completion_tokens == 0


def test_scores_from_a_token_on_use_the_prefix_cache(server, http, peer):
    ids = server.tokenizer.encode(" ".join(LINES) * 3)
    expected, _ = logprobs_of(peer, ids)
    body = {"prompt": ids, "max_tokens": 0, "prompt_logprobs": 0, "temperature": 0}
    http.post("/v1/completions", json=body)
    answer = http.post("/v1/completions", json=body | {"prompt_logprobs_start": len(ids) - 2}).json()
    table = answer["choices"][0]["prompt_logprobs"]
    assert table[:-2] == [None] * (len(ids) - 2)
    got = [row[str(token)]["logprob"] for row, token in zip(table[-2:], ids[-2:], strict=True)]
    assert got == pytest.approx(expected[-2:], abs=1e-4)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(ids) - 3) // 16 * 16


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "max_tokens": 0, "n": 1}])
def test_a_stream_is_the_plain_answer_in_pieces(client, more):
    options = {"model": "tiny", "prompt": LINES, "temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 20, "logprobs": 1}
    options |= more
    plain = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    number = len(plain.choices)
    texts = [""] * number
    lists = [collections.defaultdict(list) for _ in range(number)]
    reasons = [None] * number
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, own in choice.logprobs.model_dump().items():
                lists[choice.index][name] += own
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in plain.choices]
    assert lists == [choice.logprobs.model_dump() for choice in plain.choices]
    assert reasons == [choice.finish_reason for choice in plain.choices]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert len(set(texts)) == number  # the answers of one seed differ


def test_a_stop_string_never_shows_in_pieces(client):
    options = {"model": "tiny", "prompt": STORY, "temperature": 0, "max_tokens": 30}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[10:14]
    before = whole[: whole.index(stop)]
    for extra, expected in (({}, before), ({"include_stop_str_in_output": True}, before + stop)):
        plain = client.completions.create(**options, stop=stop, extra_body=extra).choices[0]
        assert (plain.text, plain.finish_reason, plain.stop_reason) == (expected, "stop", stop)
        chunks = list(client.completions.create(**options, stop=stop, stream=True, extra_body=extra))
        seen = ""
        for chunk in chunks:
            seen += chunk.choices[0].text
            assert expected.startswith(seen)
        assert seen == expected


def test_best_of_returns_the_likeliest_and_counts_all(client):
    options = {"model": "tiny", "prompt": "The", "seed": 5, "max_tokens": 8, "logprobs": 0}
    every = client.completions.create(**options, n=4).choices
    best = client.completions.create(**options, n=1, best_of=4)
    totals = [sum(choice.logprobs.token_logprobs) for choice in every]
    assert best.choices[0].text == every[totals.index(max(totals))].text
    assert best.usage.completion_tokens == 32


def test_prompts_are_truncated_from_the_left(server, client):
    ids = server.tokenizer.encode(STORY)
    options = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    cut = client.completions.create(prompt=ids, **options, extra_body={"truncate_prompt_tokens": 4})
    assert cut.usage.prompt_tokens == 4
    assert cut.choices[0].text == client.completions.create(prompt=ids[-4:], **options).choices[0].text


def test_the_cache_is_used_kept_apart_by_salt_and_flushed(server, http):
    ids = [7, 8, 9] * 20
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0}

    def cached(**more):
        answer = http.post("/v1/completions", json=body | more).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached(), cached(cache_salt="other"), cached(cache_salt="other")] == [0, 48, 0, 48]
    assert http.post("/flush_cache").json()["num_pages_flushed"] > 0
    assert cached() == 0


def test_half_a_character_is_held_back_and_its_bytes_are_reported(server, client):
    half = server.tokenizer.encode("ö")[0]
    assert server.tokenizer.decode([half]) == "\ufffd", "a token spells the whole character; take another one"
    options = {"model": "tiny", "prompt": "The", "max_tokens": 3, "logprobs": 0, "stream": True}
    chunks = list(client.completions.create(**options, extra_body={"allowed_token_ids": [half]}))
    (last,) = (chunk.choices[0] for chunk in chunks)  # nothing can be shown before the end
    assert last.finish_reason == "length"
    assert last.logprobs.tokens == ["bytes:\\xc3"] * 3


def test_texts_get_the_tokens_that_the_tokenizer_puts_around_them_and_chats_do_not(server, client, http):
    own = server.tokenizer.backend_tokenizer
    before = own.post_processor
    named = [(name, own.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    own.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=named)
    try:
        ids = server.tokenizer(STORY).input_ids
        piece = server.tokenizer(STORY, add_special_tokens=False).input_ids
        assert ids == [own.token_to_id("<|im_start|>"), *piece]
        answer = client.completions.create(
            model="tiny", prompt=STORY, max_tokens=1, temperature=0, echo=True, extra_body={"return_token_ids": True}
        )
        assert answer.choices[0].prompt_token_ids == ids
        assert answer.choices[0].text.startswith(STORY)
        for given, expected in ((None, ids), (True, ids), (False, piece)):
            body = {"prompt": STORY, "add_special_tokens": given}
            assert http.post("/tokenize", json=body).json()["tokens"] == expected
        messages = [{"role": "user", "content": STORY}]
        chat = server.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert http.post("/tokenize", json={"messages": messages}).json()["tokens"] == chat
        refused = http.post("/tokenize", json={"messages": messages, "add_special_tokens": True})
        assert refused.status_code == 400
        assert "those of its template" in refused.text
        asked = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert asked.usage.prompt_tokens == len(chat)
    finally:
        own.post_processor = before
