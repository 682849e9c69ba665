"""Prompts as token ids: from a text, a chat, or ids themselves."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Mapping[str, Any]]  # messages with "role" and "content"
Prompt = str | Chat | Sequence[int]


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, think: bool = True, continue_final: bool = False
) -> list[int]:
    """Return the ids of a prompt. ``think`` and ``continue_final`` are for chats, as ``encode_chat`` takes them.

    Raises ``ValueError``, also for ``continue_final`` and another prompt than a chat.
    """
    if continue_final and not is_chat(prompt):
        raise ValueError("continue_final_message is for chats, which are lists of messages; this prompt is none")
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt)
    if is_chat(prompt):
        return encode_chat(tokenizer, cast(Chat, prompt), think, continue_final)
    return list(cast(Sequence[int], prompt))


def is_chat(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(each, Mapping) for each in prompt)


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Chat, think: bool, continue_final: bool = False, **variables: Any
) -> list[int]:
    """Render a conversation with the tokenizer's chat template and encode it, ready for the assistant's turn.

    ``think``: let a model that can think do so before it answers. ``continue_final``: the last message is the beginning
    of that turn, and the prompt ends with its text as the template writes it. ``variables``: what else the template may
    read, such as ``tools``. Raises ``ValueError`` without a template, for one that fails, and for a last message that
    cannot be continued.
    """
    if continue_final:
        check_final(messages[-1])
    if not tokenizer.chat_template:
        raise ValueError("this checkpoint's tokenizer has no chat template; give a text (leave out --chat)")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=not continue_final,
            continue_final_message=continue_final,
            enable_thinking=think,
            **variables,
        )
    except Exception as error:  # the checkpoint's template is a program and may raise anything
        if continue_final and str(error).startswith("continue_final_message is set but"):
            raise ValueError(
                f"the last message is {messages[-1]['content']!r:.60}, which the checkpoint's chat template leaves out "
                "or changes, so it cannot be continued; give the text in the form that the template writes"
            ) from None
        raise ValueError(
            f"the checkpoint's chat template fails ({error}); correct it, or give a text (leave out --chat)"
        ) from error
    return encode_text(tokenizer, cast(str, text))


def check_final(message: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless a last message can be continued: the assistant's, with a text."""
    if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
        raise ValueError(
            f"the last message is {dict(message)!r:.80}; continue_final_message goes on with a message of the "
            "assistant whose content is a text"
        )


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the ids of ``text``. Raises ``ValueError`` for half a surrogate pair: a byte that was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has {text[error.start]!r} at {error.start}, which is not a character; is the text UTF-8?"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))
