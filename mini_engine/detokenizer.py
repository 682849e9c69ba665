"""L5: text out of token ids as they come: whole characters only, and never a part of a stop string.

A byte-level token may end inside a character, and a stop string may begin in one token and end in another, or be
spelled with other tokens than the tokenizer would use. So the search runs over text, never over ids.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mini_engine.texts import AfterText, special_stops

UNFINISHED = "\ufffd"  # what a decoder writes for a character whose bytes are not all there


class StopStrings:
    """Finds the first stop string in a text that grows.

    The one that *ends* first wins; of two that end together the longer. So the answer is the same however the text was
    cut into pieces. vLLM decides likewise; SGLang takes the first of its list that occurs.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for ``stops``, none of them empty."""
        self.stops = sorted(stops, key=lambda stop: -len(stop))

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Return where the winning stop string begins, not before ``start``, and which it is; ``None`` if none does."""
        found = [(text.find(stop, start), stop) for stop in self.stops]
        ends = [(place + len(stop), place, stop) for place, stop in found if place >= 0]
        if not ends:
            return None
        _, place, stop = min(ends)
        return place, stop

    def held_back(self, text: str, start: int) -> int:
        """Return how many characters at the end of ``text`` might be the beginning of a stop string."""
        longest = min(max(map(len, self.stops), default=1) - 1, len(text) - start)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0


class Detokenizer:
    """The text of one request as it grows.

    ``text`` is all that was decoded, up to a stop string if one was found; ``matched`` names it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_new_tokens: int = 0) -> None:
        """Decode with ``tokenizer``. Stop strings count only in what follows the first ``min_new_tokens`` tokens.

        Raises ``ValueError`` for a stop string that can never be found.
        """
        self.tokenizer = AfterText(tokenizer)
        self.stops = StopStrings(stops)
        self.special_stops = special_stops(tokenizer, stops)
        self.min_new_tokens = min_new_tokens
        self.decoder: DecodeStream | None = self.tokenizer.stream()
        self.token_ids: list[int] = []
        self.text = ""
        self.matched: str | None = None
        self.searched_from = 0  # stop strings begin here or later
        self.num_given = 0  # characters handed out

    def add(self, token_id: int) -> str:
        """Take one token and return the text that can be shown now. Mutates."""
        self.token_ids.append(token_id)
        self.text += self.decode(token_id)
        if not self.stops.stops:
            return self.give(len(self.text))
        if len(self.token_ids) <= self.min_new_tokens:
            self.searched_from = self.begun()
        self.search()
        held = 0 if self.matched else self.stops.held_back(self.text, self.searched_from)
        return self.give(len(self.text) - held)

    def decode(self, token_id: int) -> str:
        """Return the characters that the newest token completes. Mutates.

        The library's decoder raises where a token turns the characters before it into others, as bytes that are no
        UTF-8 do. What was given out stays; from then on the whole answer is decoded with every token. A special token
        that is a stop string ends the text.
        """
        if token_id in self.special_stops and len(self.token_ids) > self.min_new_tokens:
            self.matched = self.special_stops[token_id]
            return self.tokenizer.decode(self.token_ids)[len(self.text) :]
        if self.decoder is not None:
            try:
                return self.decoder.step(self.tokenizer.tokenizer, token_id) or ""
            except Exception:  # the library raises no narrower kind
                self.decoder = None
        whole = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return "" if whole.endswith(UNFINISHED) else whole[len(self.text) :]

    def begun(self) -> int:
        """Return how many characters the tokens so far have begun: the last of them may end inside one."""
        if len(self.token_ids) < self.min_new_tokens:
            return len(self.text)  # nothing is looked for yet
        whole = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return max(len(self.text), len(whole.rstrip(UNFINISHED)) + whole.endswith(UNFINISHED))

    def flush(self) -> str:
        """Return the rest when no more tokens come, with a replacement character for an unfinished one. Mutates."""
        if self.matched is None:
            whole = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
            self.text += whole[len(self.text) :]
            self.search()
        return self.give(len(self.text))

    def search(self) -> None:
        """Look for a stop string in what has not been ruled out, and cut the text before it. Mutates."""
        # What was given out cannot begin a stop string: anything that could was held back.
        found = self.stops.find(self.text, max(self.searched_from, self.num_given))
        if found is not None:
            self.text = self.text[: found[0]]
            self.matched = found[1]

    def give(self, stop: int) -> str:
        """Return the text from what was given last up to ``stop``. Mutates."""
        piece = self.text[self.num_given : stop]
        self.num_given = stop
        return piece
