"""Where a chat template puts the marks of a turn, found by rendering small conversations.

Templates are programs of the checkpoint. A turn's marks are what stands around a text that is easy to find again.
"""

from dataclasses import dataclass
from typing import Any, cast

from mini_engine.lang.backends import Tokenizer

MARK = "\u2063mark\u2063"  # invisible separators: no template writes them


@dataclass(frozen=True)
class Marks:
    """What a template writes around turns.

    ``first`` and ``later``: role -> the text before the first turn of a chat, and before a turn after others.
    ``ends``: role -> the text after a turn.
    """

    first: dict[str, str]
    later: dict[str, str]
    ends: dict[str, str]


def read_marks(tokenizer: Tokenizer, think: bool) -> Marks:
    """Return the marks of the tokenizer's chat template. A role that it refuses is missing.

    ``think``: let a model that can think do so. Raises ``ValueError`` without a template.
    """
    if not tokenizer.chat_template:
        raise ValueError("this checkpoint's tokenizer has no chat template; write the prompt without roles")

    def render(*roles: str, prompt: bool = False) -> str:
        chat = [{"role": role, "content": MARK} for role in roles]
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt, "enable_thinking": think}
        return cast(str, tokenizer.apply_chat_template(chat, **options))

    asked = render("user")
    prompted = render("user", prompt=True)
    answered = render("user", "assistant")
    end = asked.rsplit(MARK, 1)[1]
    first = {"user": asked.split(MARK)[0]}
    later = {"assistant": prompted[len(asked) :]}
    ends = {"user": end, "assistant": answered.rsplit(MARK, 1)[1]}
    later["user"] = render("user", "assistant", "user").split(MARK)[2].removeprefix(ends["assistant"])
    try:
        first["system"] = render("system", "user").split(MARK)[0]
        ends["system"] = ""
        between = render("system", "user").split(MARK)[1]
        ends["system"] = between.removesuffix(later["user"])
    except Exception:  # some templates have no system: they raise whatever they like
        first.pop("system", None)
    return Marks(first, later, ends)
