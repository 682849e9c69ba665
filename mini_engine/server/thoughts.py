"""A thought and the answer after it, taken apart while the text comes."""

from mini_engine.texts import THINK, THINK_END, begun


class Thoughts:
    """Splits a text that may begin with a thought. The marks and the blank lines after them are in neither part."""

    def __init__(self, is_open: bool | None) -> None:
        """``is_open``: whether the prompt has opened a thought; ``None``: all of the text is the answer."""
        self.state = "answer" if is_open is None else "thought" if is_open else "begin"
        self.held = ""  # what may be a part of a mark, or blank lines around one
        self.has_begun = False  # whether the thought has

    def add(self, text: str) -> tuple[str, str]:
        """Take more of the text and return what is new of the thought and of the answer. Mutates."""
        self.held += text
        thought = ""
        if self.state == "begin":
            self.begin()
        if self.state == "thought":
            thought = self.think()
        if self.state == "gap":
            self.held = without_blank_lines(self.held)
            self.state = "answer" if self.held.strip() else "gap"
        if self.state != "answer":
            return thought, ""
        answer = self.held
        self.held = ""
        return thought, answer

    def begin(self) -> None:
        """Find out whether there is a thought. Mutates."""
        start = self.held.lstrip()
        if start.startswith(THINK):
            self.state = "thought"
            self.held = start.removeprefix(THINK)
        elif not THINK.startswith(start):
            self.state = "answer"

    def think(self) -> str:
        """Return what is new of the thought: not what may belong to the mark at its end. Mutates."""
        if not self.has_begun:
            self.held = without_blank_lines(self.held)
            self.has_begun = bool(self.held.strip())
            if not self.has_begun:
                return ""
        thought, mark, rest = self.held.partition(THINK_END)
        if mark:
            self.state = "gap"
            self.held = rest
            return thought.rstrip("\n")
        shown = thought[: len(thought) - begun(thought, THINK_END)].rstrip("\n")
        self.held = thought[len(shown) :]
        return shown

    def flush(self) -> tuple[str, str]:
        """Return the rest when no more text comes. Mutates."""
        rest = self.held
        self.held = ""
        return (rest.rstrip("\n"), "") if self.state == "thought" else ("", rest if self.state == "answer" else "")


def without_blank_lines(text: str) -> str:
    """Return a text without the blank lines at its beginning.

    There may be a space in the first one: some tokenizers write one between a mark and what follows it.
    """
    return text[text.rfind("\n", 0, len(text) - len(text.lstrip())) + 1 :]
