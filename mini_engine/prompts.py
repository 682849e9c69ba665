"""Prompts as token ids: from a text, a chat, or ids themselves."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Mapping[str, Any]]  # messages with "role" and "content"
Prompt = str | Chat | Sequence[int]


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, think: bool = True) -> list[int]:
    """Return the ids of a prompt. ``think`` is for chats, as ``encode_chat`` takes it. Raises ``ValueError``."""
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt)
    if is_chat(prompt):
        return encode_chat(tokenizer, cast(Chat, prompt), think)
    return list(cast(Sequence[int], prompt))


def is_chat(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(each, Mapping) for each in prompt)


def encode_chat(tokenizer: "PreTrainedTokenizerBase", messages: Chat, think: bool, **variables: Any) -> list[int]:
    """Render a conversation with the tokenizer's chat template and encode it, ready for the assistant's turn.

    ``think``: let a model that can think do so before it answers. ``variables``: what else the template may read, such
    as ``tools``. Raises ``ValueError`` without a template, and for one that fails.
    """
    if not tokenizer.chat_template:
        raise ValueError("this checkpoint's tokenizer has no chat template; give a text (leave out --chat)")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=think,
            **variables,
        )
    except Exception as error:  # the checkpoint's template is a program and may raise anything
        raise ValueError(
            f"the checkpoint's chat template fails ({error}); correct it, or give a text (leave out --chat)"
        ) from error
    return encode_text(tokenizer, cast(str, text))


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the ids of ``text``. Raises ``ValueError`` for half a surrogate pair: a byte that was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has {text[error.start]!r} at {error.start}, which is not a character; is the text UTF-8?"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))
