"""A chat whose last message is the beginning of the answer: the prompt is that of transformers on every way."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.cli.app import app
from mini_engine.llm import LLM, load_driver
from mini_engine.prompts import encode_chat
from mini_engine.sampler.params import SamplingParams

TOKENIZER = load_tokenizer(TINY_MODEL)
QUESTION = "Who is Ida?"
SHORT = ("--max-new-tokens", "12")
QWEN3 = (  # how the template of Qwen3 writes an assistant's message: a thought is taken out and put before the text
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}{%- if message.role == 'assistant' -%}"
    "{%- set text = message.content.split('</think>')[-1].lstrip('\\n') -%}{%- set thought = '' -%}"
    "{%- if '</think>' in message.content -%}"
    "{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}{%- endif -%}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + text -}}{%- else -%}{{- message.content -}}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TRIMS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
FORGETS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


def chat(text: Any, role: str = "assistant") -> list[dict[str, Any]]:
    return [{"role": "user", "content": QUESTION}, {"role": role, "content": text}]


def of_transformers(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> list[int]:
    """The oracle."""
    return list(
        tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False, enable_thinking=True)
    )


def invoke(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=text)


@pytest.mark.parametrize("template", [None, QWEN3, TRIMS], ids=["embedded", "qwen3", "trims"])
@pytest.mark.parametrize(
    "text",
    [
        "Ida is",
        "Ida is ",
        "",
        "<think>\nHm.\n</think>\n\nIda is",
        "<think>\nHm",
        "Ida <|im_end|> is",
        " a\n\nb",
        QUESTION,
    ],
)
def test_the_prompt_ends_as_transformers_renders_it(template: str | None, text: str) -> None:
    tokenizer = load_tokenizer(TINY_MODEL)
    tokenizer.chat_template = template or tokenizer.chat_template
    assert encode_chat(tokenizer, chat(text), True, True) == of_transformers(chat(text), tokenizer)


@pytest.mark.parametrize(("template", "text"), [(QWEN3, "<think>Hm.</think>Ida"), (FORGETS, "Ida is")])
def test_a_message_that_the_template_changes_is_one_clear_error(template: str, text: str) -> None:
    tokenizer = load_tokenizer(TINY_MODEL)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="does not appear in the chat"):
        of_transformers(chat(text), tokenizer)
    with pytest.raises(ValueError, match=r"last message is .*leaves out or changes") as refused:
        encode_chat(tokenizer, chat(text), True, True)
    assert len(str(refused.value)) < 250


def test_llm_goes_on_with_the_last_message_and_refuses_what_has_none() -> None:
    params = SamplingParams(max_new_tokens=12)
    wrong = [chat("Ida is", "user"), chat(None), chat([{"type": "text", "text": "Ida"}]), "Ida is", [5, 6]]
    with LLM() as llm:
        first, *refused, last = llm.generate([chat("Ida is"), *wrong, chat("She")], params, continue_final_message=True)
        for answer, text in ((first, "Ida is"), (last, "She")):
            assert answer.prompt_ids == of_transformers(chat(text))
            assert answer.token_ids == load_driver().generate(of_transformers(chat(text)), 12).token_ids
        assert [answer.finish_reason for answer in refused] == ["error"] * 5
        assert all("goes on with a message of the assistant" in str(answer.error) for answer in refused[:3])
        assert all("is for chats" in str(answer.error) for answer in refused[3:])
        deltas = llm.stream(chat("Ida is"), params, continue_final_message=True)
        assert "".join(delta.text for delta in deltas) == first.text
        (closed,) = llm.generate([chat("Ida is")], params)
        assert closed.prompt_ids != first.prompt_ids


def test_generate_begins_the_answer_with_a_prefill() -> None:
    report = json.loads(invoke("generate", QUESTION, "--chat", "--prefill", "Ida is", "--json", *SHORT).stdout)
    assert report["prompt_ids"] == of_transformers(chat("Ida is"))
    shown = invoke("generate", QUESTION, "--chat", "--prefill", "Ida is", *SHORT)
    assert shown.stdout == f"Ida is{report['text']}\n"
    bound = invoke("generate", QUESTION, "--chat", "--prefill", "Age:", "--choices", "7,8", "--json")
    assert json.loads(bound.stdout)["text"] in ("7", "8")
    assert "--prefill only means something with --chat" in invoke("generate", QUESTION, "--prefill", "x").stderr


def test_a_line_of_batch_can_be_continued(tmp_path: Path) -> None:
    asked = [
        {"messages": chat("Ida is"), "continue_final_message": True},
        {"messages": chat("Ida is")},
        {"messages": chat("Ida is", "user"), "continue_final_message": True},
        {"prompt": "Ida is", "continue_final_message": True},
        {"messages": chat("Ida is"), "continue_final_message": 1},
        {"messages": chat("Age: "), "continue_final_message": True, "regex": "7|8"},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in asked))
    lines = [
        json.loads(each) for each in invoke("batch", str(file), "--ordered", "--think", *SHORT).stdout.splitlines()
    ]
    (first,) = lines[0]["answers"]
    assert lines[0]["prompt_tokens"] == len(of_transformers(chat("Ida is")))
    assert first["token_ids"] == load_driver().generate(of_transformers(chat("Ida is")), 12).token_ids
    assert lines[1]["prompt_tokens"] > lines[0]["prompt_tokens"]
    errors = [line["answers"][0].get("error", "") for line in lines[2:]]
    assert "goes on with a message of the assistant" in errors[0]
    assert "continue_final_message is True beside prompt" in errors[1]
    assert "continue_final_message is 1 beside messages" in errors[2]
    assert lines[5]["answers"][0]["text"] in ("7", "8")
