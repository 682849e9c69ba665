"""A folder of each family through every command: the texts are those of transformers.

Each has a tokenizer of the kind that its family has in the field, loaded by the class that its checkpoints name.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from starlette.testclient import TestClient
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from typer.testing import CliRunner

from mini_engine.cli.app import app
from mini_engine.cli.serve import Answering
from mini_engine.cli.start import start
from mini_engine.config import EngineConfig
from mini_engine.families import FAMILIES
from mini_engine.server.build import build_server
from mini_engine.texts import THINK_END
from tests.support.tokenizers import END_OF_TURN, EOS, TEMPLATE, tokenizer_of, write_folder

# For each folder: the configuration, the kind of the tokenizer, whether its post-processor writes a BOS, its class.
FEW: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
FULL: dict[str, Any] = {"num_local_experts": 0, "layer_types": ["attention"] * 4, "mamba_n_heads": 2}
FOLDERS: dict[str, tuple[Callable[..., PreTrainedConfig], str, bool, str]] = {
    "qwen3": (Qwen3Config, "byte-level", False, "Qwen2Tokenizer"),
    "qwen2": (Qwen2Config, "byte-level", False, "Qwen2Tokenizer"),
    "llama": (LlamaConfig, "byte-level", True, "PreTrainedTokenizerFast"),
    "llama 2": (LlamaConfig, "prepended", True, "LlamaTokenizer"),
    "smollm3": (SmolLM3Config, "byte-level", False, "PreTrainedTokenizerFast"),
    "mistral": (MistralConfig, "byte fallback", True, "LlamaTokenizer"),
    "ministral": (MinistralConfig, "byte-level", True, "PreTrainedTokenizerFast"),
    "olmo2": (Olmo2Config, "byte-level", False, "PreTrainedTokenizerFast"),
    "olmo3": (Olmo3Config, "byte-level", False, "PreTrainedTokenizerFast"),
    "granite": (GraniteConfig, "byte-level", False, "PreTrainedTokenizerFast"),
    "granitemoehybrid": (partial(GraniteMoeHybridConfig, **FULL), "byte-level", False, "PreTrainedTokenizerFast"),
    "qwen3_moe": (partial(Qwen3MoeConfig, moe_intermediate_size=20, **FEW), "byte-level", False, "Qwen2Tokenizer"),
    "mixtral": (partial(MixtralConfig, num_local_experts=5), "byte fallback", True, "LlamaTokenizer"),
}
PROMPT, QUESTION = "Once upon a time été", "Who is Ida?"
COUNT = 14
THINKING = TEMPLATE.replace("'[assistant]'", "'[assistant]<think>\\n'")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["été", "日本"]}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    make, kind, puts_bos, name = FOLDERS[request.param]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path, tokenizer = tmp_path_factory.mktemp("model"), tokenizer_of(kind, puts_bos)
    config = make(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=0,
    )
    write_folder(path, config, tokenizer, [EOS, END_OF_TURN])
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": name}))
    yield path
    torch.set_num_threads(before)


def answer(folder: Path, given: str | list[dict[str, str]]) -> str:
    """The oracle: what transformers adds to the text of a prompt."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    plain = tokenizer(given).input_ids if isinstance(given, str) else None
    ids = plain or tokenizer.apply_chat_template(given, add_generation_prompt=True)["input_ids"]
    made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=COUNT, pad_token_id=0)[0].tolist()
    whole, prompt = (tokenizer.decode(each, skip_special_tokens=True) for each in (made, ids))
    assert whole.startswith(prompt)
    return str(whole[len(prompt) :])


def invoke(folder: Path, *arguments: str, text: str | None = None) -> str:
    done = CliRunner().invoke(app, [*arguments, "--model", str(folder), "--max-new-tokens", str(COUNT)], input=text)
    assert done.exit_code == 0, done.output
    return done.stdout


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_there_is_a_folder_of_each_family() -> None:
    assert {name.split()[0] for name in FOLDERS} == set(FAMILIES)


def test_the_commands_write_what_transformers_writes(folder: Path, tmp_path: Path) -> None:
    text, turn = answer(folder, PROMPT), answer(folder, chat(QUESTION))
    assert text.strip()
    assert turn.strip()
    assert invoke(folder, "generate", PROMPT) == f"{PROMPT}{text}\n"
    assert json.loads(invoke(folder, "generate", QUESTION, "--chat", "--json"))["text"] == turn
    assert invoke(folder, "chat", text=f"{QUESTION}\n/exit\n") == f"{turn}\n"
    (tmp_path / "lines").write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"messages": chat(QUESTION)}))
    lines = invoke(folder, "batch", str(tmp_path / "lines"), "--ordered").splitlines()
    assert [json.loads(line)["answers"][0]["text"] for line in lines] == [text, turn]


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    driver, tokenizer = start(folder, None, EngineConfig.serving(max_running_requests=4))
    with TestClient(build_server(driver, tokenizer, "it", Answering()).config.app, "http://127.0.0.1") as client:
        yield client


def asked(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answered = client.post(f"/v1/{path}", json={"temperature": 0, "max_tokens": COUNT, **body})
    assert answered.status_code == 200, answered.text
    return list(answered.json()["choices"])


def test_the_server_writes_it_and_takes_thoughts_and_calls_apart(folder: Path, client: TestClient) -> None:
    (choice,) = asked(client, "completions", prompt=PROMPT)
    assert choice["text"] == answer(folder, PROMPT)
    (choice,) = asked(client, "completions", prompt=PROMPT, echo=True, logprobs=0, max_tokens=3)
    lists = choice["logprobs"]
    for at, token in list(zip(lists["text_offset"], lists["tokens"], strict=True))[2:]:
        assert token.startswith("bytes:") or choice["text"][at:].startswith(token)
    (choice,) = asked(client, "chat/completions", messages=chat(QUESTION))
    assert choice["message"]["content"] == answer(folder, chat(QUESTION))
    drawn = {"messages": chat(QUESTION), "max_tokens": 150, "temperature": 1, "seed": 1}
    at_once = {"chat_template_kwargs": {"enable_thinking": False}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    (choice,) = asked(client, "chat/completions", **drawn, **at_once, response_format=form)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    calling = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = asked(client, "chat/completions", **drawn, **at_once, **calling)
    (call,) = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    service = client.app.state.service  # type: ignore[attr-defined]
    service.tokenizer.chat_template = THINKING
    ends = {str(service.tokenizer.convert_tokens_to_ids(THINK_END)): 4}
    choices = asked(client, "chat/completions", **drawn, logit_bias=ends, regex="[a-z]{3} été", n=4)
    finished = [choice["message"] for choice in choices if choice["finish_reason"] == "stop"]
    assert any(message.get("reasoning_content") for message in finished)
    assert all(re.fullmatch("[a-z]{3} été", message["content"]) for message in finished)
