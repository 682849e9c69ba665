"""Texts and token ids: prompts in the chat format of the model, and printable names of tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def chat_ids(tokenizer: PreTrainedTokenizerBase, question: str, answer: str = "") -> list[int]:
    """Return the prompt that asks ``question`` in the checkpoint's chat format, to be answered without thinking.

    ``answer``: the words with which the answer has already begun.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    ids: list[int] = tokenizer.encode(text + answer, add_special_tokens=False)
    return ids


def visible(text: str) -> str:
    """Make blanks and line breaks of a token's text visible: " the" becomes "␣the"."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def token_names(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return a printable name for every token id; a token that is part of a character is named by its bytes."""
    names = []
    for token_id in token_ids:
        text = tokenizer.decode([int(token_id)])
        broken = "\N{REPLACEMENT CHARACTER}" in text
        names.append(str(tokenizer.convert_ids_to_tokens(int(token_id))) if broken else visible(text))
    return names


def token_at(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], text: str) -> int:
    """Return the position of the token in which ``text`` first begins. Raises ``ValueError`` if it does not occur."""
    whole = tokenizer.decode(list(token_ids))
    if text not in whole:
        raise ValueError(f"the tokens say {whole!r}; {text!r} does not occur")
    start = whole.index(text)
    return next(i for i in range(len(token_ids)) if len(tokenizer.decode(list(token_ids[: i + 1]))) > start)
