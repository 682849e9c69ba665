"""Prompts as token ids: from a text, a chat, ids themselves, or what transformers made of one of them."""

from collections.abc import Mapping, Sequence
from numbers import Integral, Number
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Mapping[str, Any]]  # messages with "role" and "content"
Encoded = Mapping[str, Any]  # "input_ids" and more, as tokenizers of transformers give them
Prompt = str | Chat | Sequence[int] | Encoded
ENCODED = ("input_ids", "attention_mask", "token_type_ids")  # of one prompt, or of a batch


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, think: bool = True, continue_final: bool = False
) -> list[int]:
    """Return the ids of one prompt. ``think`` and ``continue_final`` are for chats, as ``encode_chat`` takes them.

    A text gets the special tokens that the tokenizer puts around one, such as a BOS; a chat has those of its template.
    Raises ``ValueError`` for what is not a prompt, and for ``continue_final`` and another prompt than a chat.
    """
    if continue_final and not is_chat(prompt):
        raise ValueError("continue_final_message is for chats, which are lists of messages; this prompt is none")
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt, with_special=True)
    if isinstance(prompt, Mapping):
        return ids_in(prompt)
    if not is_list(prompt):
        raise ValueError(
            f"the prompt is {shortened(prompt)}, of type {type(prompt).__name__}; give a text, a chat (a list of "
            "messages), a list of token ids (an array's tolist()), or a mapping with input_ids"
        )
    if is_chat(prompt):
        for place, message in enumerate(prompt[:-1] if continue_final else prompt):  # encode_chat checks the last one
            check_message(place, cast(Mapping[str, Any], message))
        return encode_chat(tokenizer, cast(Chat, prompt), think, continue_final)
    return whole_numbers("the prompt", prompt)


def each_prompt(prompts: Any) -> list[Any]:
    """Return the prompts of a list, those of a mapping with a batch, or the only one; they need not be right.

    A list of messages is one prompt. So is a list of numbers if one of them is a whole number.
    """
    if isinstance(prompts, Mapping):
        rows = plain(prompts.get("input_ids"))
        if not (is_list(rows) and rows and all(is_list(plain(row)) for row in rows)):
            return [prompts]
        each = {key: plain(value) for key, value in prompts.items()}
        return [
            {key: own[place : place + 1] if is_list(own) else own for key, own in each.items()}
            for place in range(len(rows))
        ]
    if not is_list(prompts) or is_chat(prompts):
        return [prompts]
    is_ids = all(isinstance(item, Number) for item in prompts) and any(isinstance(item, Integral) for item in prompts)
    return [prompts] if is_ids else list(prompts)


def is_list(value: Any) -> bool:
    """Whether ``value`` is a list, a tuple or another sequence, but neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def is_chat(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of messages."""
    is_full = is_list(prompt) and len(prompt) > 0
    return is_full and all(isinstance(each, Mapping) and "input_ids" not in each for each in prompt)


def check_message(place: int, message: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a message that a template would misread in silence."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(
            f"message {place} of the chat has the role {shortened(role)}; it must be a text such as 'user'"
        )
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"message {place} of the chat has the content {shortened(content)}; it must be a text")


def ids_in(encoding: Mapping[str, Any]) -> list[int]:
    """Return the ids of one prompt that transformers encoded, without padding. Raises ``ValueError``."""
    if "input_ids" not in encoding:
        raise ValueError(
            "the prompt is a mapping without input_ids; a chat is a list of messages, also of a single one"
        )
    unknown = [key for key in encoding if key not in ENCODED]
    if unknown:
        raise ValueError(f"the prompt is a mapping with {unknown[0]!r}; only {', '.join(ENCODED)} are read")
    ids = whole_numbers("input_ids", row_of(encoding["input_ids"]))
    if encoding.get("attention_mask") is None:
        return ids
    mask = whole_numbers("attention_mask", row_of(encoding["attention_mask"]))
    if len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise ValueError(f"attention_mask is {shortened(mask)}; give a 0 or 1 for each of the {len(ids)} input_ids")
    return [token for token, is_read in zip(ids, mask, strict=True) if is_read]


def row_of(value: Any) -> Any:
    """Return a list of numbers, also if it is the only row of a batch."""
    listed = plain(value)
    return plain(listed[0]) if is_list(listed) and len(listed) == 1 and is_list(plain(listed[0])) else listed


def plain(value: Any) -> Any:
    """Return an array or a tensor as lists, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def whole_numbers(name: str, values: Any) -> list[int]:
    """Return ``values`` as a list of ``int``. Raises ``ValueError`` naming what is not a whole number."""
    if not is_list(values):
        raise ValueError(f"{name} is {shortened(values)}; it must be a list of whole numbers")
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} holds {shortened(value)} at {place}; token ids are whole numbers")
    return list(map(int, values))


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


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str, with_special: bool = False) -> list[int]:
    """Return the ids of ``text``: of a piece, or ``with_special`` tokens around it, as a prompt has them.

    A text that begins with the BOS, as one that a chat template wrote does, has its special tokens already: no model
    has seen two. Raises ``ValueError`` for half a surrogate pair: a byte that was not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has {text[error.start]!r} at {error.start}, which is not a character; is the text UTF-8?"
        ) from error
    begun = with_special and bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    return list(tokenizer.encode(text, add_special_tokens=with_special and not begun))


def opening_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the special tokens that the tokenizer puts before a text, such as a BOS."""
    whole, own = (encode_text(tokenizer, "a", with_special) for with_special in (True, False))
    return next((whole[:place] for place in range(len(whole)) if whole[place : place + len(own)] == own), [])
