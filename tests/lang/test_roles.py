"""Marks of turns: a conversation written turn by turn is the text that the chat template makes of it."""

import pytest

from mini_engine import lang
from mini_engine.lang.roles import read_marks

CHATML = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
LLAMA_3 = (
    "{%- for m in messages -%}{%- set c = '<|start|>' + m.role + '<|end|>\\n\\n' + m.content | trim + '<|eot|>' -%}"
    "{%- if loop.first -%}{%- set c = '<|begin|>' + c -%}{%- endif -%}{{- c -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant<|end|>\\n\\n' -}}{%- endif -%}"
)
DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' -}}{%- endif -%}"
) + CHATML
MISTRAL = (  # no system, and turns must alternate
    "{%- for m in messages -%}{%- if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('turns must alternate') -}}{%- endif -%}"
    "{%- if m.role == 'user' -%}{{- '[INST] ' + m.content + ' [/INST]' -}}"
    "{%- else -%}{{- m.content + '</s>' -}}{%- endif -%}"
    "{%- endfor -%}"
)
CHAT = [("user", "Hello."), ("assistant", "Hi!"), ("user", "How are you?"), ("assistant", "Well.")]


class WithTemplate:
    """The embedded model's tokenizer with another chat template."""

    def __init__(self, tokenizer, template):
        self.tokenizer = tokenizer
        self.chat_template = template

    def apply_chat_template(self, chat, **options):
        return self.tokenizer.apply_chat_template(chat, chat_template=self.chat_template, **options)


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, DEFAULT_SYSTEM, MISTRAL, None])
@pytest.mark.parametrize("system", [False, True])
def test_turns_make_the_text_of_the_template(llm, template, system):
    tokenizer = WithTemplate(llm.tokenizer, template or llm.tokenizer.chat_template)
    marks = read_marks(tokenizer, True)
    chat = [("system", "Be brief.")] * system + CHAT
    if system and template == MISTRAL:
        assert "system" not in marks.first
        return
    text = ""
    for index, (role, content) in enumerate(chat):
        text += (marks.later if index else marks.first)[role] + content + marks.ends[role]
    messages = [{"role": role, "content": content} for role, content in chat]
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_model_can_be_kept_from_thinking(llm):
    @lang.program
    def turn(s):
        s += lang.user("Hello") + lang.assistant(lang.gen("answer", max_new_tokens=8))

    for think in (True, False):
        s = turn.run(backend=llm, think=think)
        prompt = llm.tokenizer.decode(s.answer("answer").output.prompt_ids)
        chat = [{"role": "user", "content": "Hello"}]
        assert prompt == llm.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=think
        )


def test_a_turn_without_a_place_and_a_model_without_a_template_are_refused(llm):
    @lang.program
    def turns(s):
        s += lang.user("Hello") + lang.system("Be brief.")

    with pytest.raises(ValueError, match="no place for a later turn of the system"):
        turns.run(backend=llm)
    tokenizer = WithTemplate(llm.tokenizer, None)
    with pytest.raises(ValueError, match="has no chat template"):
        read_marks(tokenizer, True)
