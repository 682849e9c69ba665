"""A detokenizer that decodes, searches and cuts the whole text with every token, and remembers only what it showed."""

from collections.abc import Sequence

from tokenizers import Tokenizer


class StopStrings:
    """Tries every end of the text, and there every stop string, the longest first."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for ``stops``."""
        self.stops = sorted(stops, key=len, reverse=True)

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Return place and string of the one that ends first."""
        for end in range(start, len(text) + 1):
            for stop in self.stops:
                if text[start:end].endswith(stop):
                    return end - len(stop), stop
        return None

    def held_back(self, text: str, start: int) -> int:
        """Count from the first place of the text's end that begins a stop string."""
        for place in range(start, len(text)):
            if any(len(stop) > len(text) - place and stop.startswith(text[place:]) for stop in self.stops):
                return len(text) - place
        return 0


class Detokenizer:
    """``text`` is computed from the ids when somebody asks."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_new_tokens: int = 0) -> None:
        """Decode with ``tokenizer``."""
        self.tokenizer = tokenizer
        self.stops = StopStrings(stops)
        self.min_new_tokens = min_new_tokens
        self.token_ids: list[int] = []
        self.shown = ""
        self.is_over = False

    def decode(self, count: int | None = None) -> str:
        """Return the text of the first tokens, without unfinished characters while more may come."""
        text = str(self.tokenizer.decode(self.token_ids[:count], skip_special_tokens=True))
        return text if self.is_over and count is None else text.rstrip("\ufffd")

    @property
    def start(self) -> int:
        """Where a stop string may begin."""
        ids = self.token_ids[: self.min_new_tokens]
        raw = str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
        return len(raw.rstrip("\ufffd")) + raw.endswith("\ufffd")

    @property
    def found(self) -> tuple[int, str] | None:
        """Place and name of the stop string that ended the text."""
        return self.stops.find(self.decode(), self.start)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return None if self.found is None else self.found[1]

    @property
    def text(self) -> str:
        """The text up to a stop string."""
        return self.decode() if self.found is None else self.decode()[: self.found[0]]

    def add(self, token_id: int) -> str:
        """Take one token and return what can be shown."""
        self.token_ids.append(token_id)
        text = self.text
        held = 0 if self.found else self.stops.held_back(text, self.start)
        return self.show(text[: len(text) - held])

    def flush(self) -> str:
        """Return the rest."""
        self.is_over = self.is_over or self.found is None
        return self.show(self.text)

    def show(self, text: str) -> str:
        """Return what ``text`` has beyond what was shown."""
        piece = text[len(self.shown) :]
        self.shown += piece
        return piece
