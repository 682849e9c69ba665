"""Calls of functions in the form of Hermes, which the templates of Qwen teach: what is written, and its reader.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The grammar allows nothing else once ``<tool_call>`` has begun, so the reader knows every beginning to the letter. The
end holds a line break outside quotes, which no JSON does.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mini_engine.texts import TOOL_CALL, TOOL_CALL_END, begun

NAME = "hermes"
OTHER_FORMS = ("<function=", "<arg_key>")  # of other families, which have the same marks
SEPARATOR = "\n"
END = f"}}\n{TOOL_CALL_END}"


def is_taught(template: str) -> bool:
    """Return whether a chat template has the marks of this form and no word of another one."""
    return TOOL_CALL in template and not any(word in template for word in OTHER_FORMS)


def begin(name: str) -> str:
    """Return what stands before the arguments of a function."""
    return f'{TOOL_CALL}\n{{"name": "{name}", "arguments": '


@dataclass(frozen=True)
class Piece:
    """What is new of the content, or of a ``call`` by its number: first its ``name``, then text of its arguments."""

    text: str
    call: int | None = None
    name: str | None = None


class CallReader:
    """Splits a text into content and calls while it comes. White space before a call, and last after one, is neither.

    What does not begin a call of a known function to the letter is content.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Look for calls of the functions ``names``."""
        self.begins = {begin(name): name for name in names}
        self.longest = max(map(len, self.begins))
        self.held = ""  # what may belong to a mark, or white space before one
        self.num_calls = 0
        self.arguments: str | None = None  # of the call that has not ended, as far as they are written
        self.is_cut = False  # whether the text ended within a call

    def add(self, text: str) -> Iterator[Piece]:
        """Take more of the text and yield what is new. Mutates."""
        self.held += text
        is_new = True
        while is_new:
            is_new = False
            for piece in self.content() if self.arguments is None else self.rest():
                is_new = True
                if piece.text or piece.name:
                    yield piece

    def content(self) -> Iterator[Piece]:
        """Yield the text up to a call, and the call's name. Mutates."""
        place = self.next_mark()
        text = self.held[:place].rstrip()
        mark = next((mark for mark in self.begins if self.held.startswith(mark, place)), None)
        self.held = self.held[len(text) if mark is None else place + len(mark) :]
        if text:
            yield Piece(text)
        if mark is not None:
            self.arguments = ""
            self.num_calls += 1
            yield Piece("", self.num_calls - 1, self.begins[mark])

    def next_mark(self) -> int:
        """Return where a call begins, or what may become the beginning of one."""
        place = self.held.find(TOOL_CALL[0])
        while place >= 0:
            rest = self.held[place : place + self.longest]
            if any(rest.startswith(mark) or mark.startswith(rest) for mark in self.begins):
                return place
            place = self.held.find(TOOL_CALL[0], place + 1)
        return len(self.held)

    def rest(self) -> Iterator[Piece]:
        """Yield what is new of the arguments: not what may belong to the end. Mutates."""
        assert self.arguments is not None, "a call has begun"
        text, mark, rest = self.held.partition(END)
        text = text if mark else text[: len(text) - begun(text, END)]
        self.held = rest if mark else self.held[len(text) :]
        self.arguments = None if mark else self.arguments + text
        if text or mark:
            yield Piece(text, self.num_calls - 1)

    def flush(self) -> Iterator[Piece]:
        """Yield the rest when no more text comes. A call is cut unless its arguments are whole. Mutates.

        Of one that is cut before its name is whole nothing is yielded: it cannot be called, and it is no content.
        """
        if self.arguments is None:
            self.is_cut = self.held.lstrip().startswith(TOOL_CALL)
            text = "" if self.is_cut else self.held.rstrip() if self.num_calls else self.held
            call = None
        else:
            text = "" if is_json(self.arguments) else self.held
            call = self.num_calls - 1
            self.is_cut = not is_json(self.arguments + text)
        self.held = ""
        if text:
            yield Piece(text, call)


def is_json(text: str) -> bool:
    """Return whether a text is JSON as it stands."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
