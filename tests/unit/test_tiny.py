"""The embedded model: its corpus, its tokenizer, and the folder as transformers sees it."""

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from mini_engine.checkpoint import TINY_MODEL, load_config
from mini_engine.tiny import corpus, evaluate, train
from mini_engine.tiny.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, train_tokenizer
from mini_engine.tiny.train import (
    PHASES,
    SEED,
    Progress,
    lr_scale,
    make_optimizers,
    model_config,
    train_step,
)

TOKENIZER = AutoTokenizer.from_pretrained(TINY_MODEL)


def some_documents(seed: int, count: int) -> list[str]:
    return list(itertools.islice(corpus.documents(seed), count))


def test_held_out_names_never_occur_in_training_and_always_in_the_questions() -> None:
    """Without this, copying could not be told from memory."""
    rng = random.Random(0)
    held_out = {make(rng, True) for _ in range(2000) for make in (corpus.make_name, corpus.make_odd_name)}
    texts = [*some_documents(1, 1500), *itertools.islice(corpus.documents(1, PHASES[1].mixture), 1500)]
    assert all(corpus.is_held_out(name) for name in held_out)
    names = set(re.findall(r"(?:named|called|name|Record: name) ([A-Z]\w+)", " ".join(texts)))
    names |= set(re.findall(r"([A-Z]\w+) has ", " ".join(texts)))
    assert len(names) > 500
    assert not any(corpus.is_held_out(name) for name in names)


def test_a_document_is_what_the_chat_template_renders() -> None:
    """Training text and prompts must agree to the byte, or the model is asked in a format that it never saw."""
    rng = random.Random(5)
    story, record = corpus.story_task(rng), corpus.record_task(rng)
    answer = f"<think>\n{record.thought}\n</think>\n\n{record.answer}"
    messages = [
        {"role": "user", "content": story.prompt},
        {"role": "assistant", "content": f"<think>\nforgotten\n</think>\n\n{story.answer}"},
        {"role": "user", "content": record.prompt},
        {"role": "assistant", "content": answer},
    ]
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert rendered == corpus.render_turn(story, "past") + corpus.render_turn(record, "think")
    asked = TOKENIZER.apply_chat_template(
        messages[:3], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert asked + record.answer + "<|im_end|>\n" == corpus.render_turn(story, "past") + corpus.render_turn(
        record, "no_think"
    )


def test_the_stored_template_is_that_of_the_code_and_writes_calls_without_a_text() -> None:
    assert TOKENIZER.chat_template == CHAT_TEMPLATE
    call = {"type": "function", "function": {"name": "f", "arguments": {"é": 1}}}
    chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    written = '<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call>'
    rendered = TOKENIZER.apply_chat_template(chat, tokenize=False)
    assert rendered.endswith(f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n")
    tools = [{"type": "function", "function": {"name": "f"}}]
    system = [{"role": "system", "content": "Be brief."}, *chat]
    with_tools = TOKENIZER.apply_chat_template(system, tools=tools, tokenize=False)
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert with_tools.count("Be brief.") == with_tools.count("<|im_start|>system") == 1
    assert TOKENIZER.apply_chat_template(system, tokenize=False).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_records_are_json_with_the_fields_of_the_prompt() -> None:
    rng = random.Random(2)
    for _ in range(200):
        task = corpus.record_task(rng)
        assert json.loads(task.answer) == task.facts
        assert all(str(value) in task.prompt for key, value in task.facts.items() if key != "happy")


def test_the_tokenizer_is_byte_level_and_loses_nothing() -> None:
    assert len(TOKENIZER) == load_config(TINY_MODEL).vocab_size == 1024
    assert len(set(TOKENIZER.get_vocab().values())) == 1024
    for text in [*some_documents(7, 50), "Ünïcödé 你好 🦊\n\ttabs  and   spaces", "".join(map(chr, range(1, 256)))]:
        assert TOKENIZER.decode(TOKENIZER.encode(text), clean_up_tokenization_spaces=False) == text
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(1019, 1024))


@pytest.mark.slow
def test_training_the_tokenizer_again_gives_the_committed_one() -> None:
    assert json.loads(train_tokenizer(SEED).to_str()) == json.loads((TINY_MODEL / "tokenizer.json").read_text())


def test_the_folder_is_small_float32_and_loads_in_transformers() -> None:
    assert sum(file.stat().st_size for file in TINY_MODEL.iterdir()) < 12e6
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 3e6
    assert model.generation_config.eos_token_id == TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def test_batches_resume_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of steps has its own text; the last fifth of them has longer rows."""
    monkeypatch.setattr(train, "STEPS_PER_BLOCK", 2)
    tokenizer = TOKENIZER.backend_tokenizer
    phase = replace(PHASES[1], steps=10)
    whole = list(itertools.islice(train.batches(tokenizer, phase, 0, "1"), 5))
    assert torch.equal(whole[4], next(train.batches(tokenizer, phase, 4, "1")))
    assert not torch.equal(whole[4], whole[2])
    assert whole[4].shape == (32, 256)
    assert next(train.batches(tokenizer, phase, 8, "1")).shape == (16, 512)


def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """Weights, optimisers and the place in the text all have to come back, or the two runs drift apart."""
    torch.manual_seed(0)
    tokenizer = TOKENIZER.backend_tokenizer
    config = model_config(tokenizer)
    config.num_hidden_layers = 1  # a step of all five takes seconds
    model = Qwen3ForCausalLM(config)
    optimizers = make_optimizers(model)
    stream = torch.randint(0, 1024, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    train_step(model, optimizers, stream[0], lr_scale(0, 2))
    Progress(0, 1).save(tmp_path / "state.pt", model, optimizers)
    other = Qwen3ForCausalLM(config)
    other_optimizers = make_optimizers(other)
    assert Progress.load(tmp_path / "state.pt", other, other_optimizers) == Progress(0, 1)
    for side, own in ((model, optimizers), (other, other_optimizers)):
        train_step(side, own, stream[1], lr_scale(1, 2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert Progress.load(tmp_path / "none.pt", other, other_optimizers) == Progress(0, 0)


@pytest.mark.parametrize(
    ("text", "parses", "right"),
    [
        ('<think>\nx\n</think>\n\n{"name": "Mila", "age": 7}', True, True),
        ('{"age": 7, "name": "Mila"}', True, True),
        ('{"name": "Mila", "age": "7"}', True, False),
        ('{"name": "Mila"}', True, False),
        ('{"name": "Mila", "age": 7} and more', False, False),
        ('["Mila", 7]', False, False),
    ],
)
def test_an_answer_is_judged_as_it_should_be(text: str, parses: bool, right: bool) -> None:
    task = corpus.Task("", "", "", {"name": "Mila", "age": 7})
    assert evaluate.parses(task, text) == parses
    assert evaluate.every_field_right(task, text) == right


def test_a_story_must_name_its_animal_outside_the_think_block() -> None:
    task = corpus.Task("", "", "", {"name": "Mila", "animal": "fox"})
    assert evaluate.uses_name_and_animal(task, "<think>\n</think>\n\nThere was a fox named Mila.")
    assert not evaluate.uses_name_and_animal(task, "<think>\nfox Mila\n</think>\n\nThere was a dog named Mila.")
    assert not evaluate.uses_name_and_animal(task, "There was a foxglove named Mila.")


@pytest.mark.slow
def test_the_embedded_model_is_as_good_as_its_readme_says() -> None:
    """A small draw of the committed figures; ``python -m mini_engine.tiny.evaluate`` measures them all."""
    for figure in evaluate.measure(TINY_MODEL, count=10, seed=123):
        assert figure.right >= figure.wanted * figure.total - 1, figure
