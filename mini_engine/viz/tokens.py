"""Texts and token ids: prompts in the model's chat format, printable names for tokens, words around a crossroads.

Owns: text. Must not know: pictures, logits.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mini_engine.viz.distribution import Crossroads

CONTEXT_TOKENS = 6
LABEL_LENGTH = 44  # characters


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


def crossroads_texts(
    tokenizer: PreTrainedTokenizerBase, generated: Sequence[int], crossroads: Sequence[Crossroads]
) -> list[tuple[str, str, str]]:
    """Return for every crossroads the words before it, the words taken and the other words."""
    texts = []
    for fork in crossroads:
        before = tokenizer.decode(generated[max(0, fork.step - CONTEXT_TOKENS) : fork.step])
        if fork.step > CONTEXT_TOKENS:
            before = before.partition(" ")[2]  # the first word is cut
        texts.append((before, *(tokenizer.decode(ids).strip() for ids in (fork.taken, fork.other))))
    return [(one_line(before), one_line(taken), one_line(other)) for before, taken, other in texts]


def one_line(text: str) -> str:
    """Make line breaks visible and cut what is too long for a label."""
    return text.replace("\n", "⏎")[:LABEL_LENGTH]
