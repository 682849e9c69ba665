"""Log-probabilities in the forms of the interface: parallel lists for completions, a list of tokens for chats."""

import codecs
from collections.abc import Sequence
from typing import Any

from mini_engine.sampler.logprobs import TokenLogprob
from mini_engine.server.token_text import TokenTexts

LEAST = -9999.0  # JSON has no minus infinity; OpenAI writes this number
Report = Sequence[TokenLogprob]  # the chosen token, then its alternatives


def finite(entry: TokenLogprob) -> float:
    """Return a log-probability that JSON can write."""
    return max(entry.logprob, LEAST)


class CompletionLogprobs:
    """The parallel lists of one choice, and where in its text each token begins."""

    def __init__(self, texts: TokenTexts, num_left_out: int = 0) -> None:
        """Begin at the beginning of the text, which lacks the first ``num_left_out`` characters of the tokens."""
        self.texts = texts
        self.offset = -num_left_out
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(self, reports: Sequence[tuple[int, Report | None]]) -> dict[str, list[Any]]:
        """Return the lists for the next tokens, ``None`` where nothing predicts a token. Mutates the offset."""
        offsets = []
        for token, _ in reports:
            offsets.append(max(self.offset, 0))
            self.offset += len(self.decoder.decode(self.texts.shown(token)))
        return {
            "tokens": [self.texts.text_of(token) for token, _ in reports],
            "token_logprobs": [None if report is None else finite(report[0]) for _, report in reports],
            "top_logprobs": [None if report is None else self.table(report) for _, report in reports],
            "text_offset": offsets,
        }

    def table(self, report: Report) -> dict[str, float]:
        """Return alternatives by their text, the chosen one last: of two ids with one text it wins."""
        return {self.texts.text_of(entry.token_id): finite(entry) for entry in [*report[1:], report[0]]}


def chat_logprobs(texts: TokenTexts, reports: Sequence[Report]) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat's choice or chunk."""

    def entry(each: TokenLogprob) -> dict[str, Any]:
        own = texts.bytes_of(each.token_id)
        return {"token": texts.text_of(each.token_id), "logprob": finite(each), "bytes": list(own)}

    return {
        "content": [{**entry(report[0]), "top_logprobs": [entry(each) for each in report[1:]]} for report in reports],
        "refusal": None,
    }


def prompt_table(texts: TokenTexts, reports: Sequence[Report | None]) -> list[dict[str, Any] | None]:
    """Return ``prompt_logprobs`` as vLLM does: for each token a table by id, ``null`` where nothing is reported."""
    return [
        None
        if report is None
        else {
            str(entry.token_id): {
                "logprob": finite(entry),
                "rank": entry.rank,
                "decoded_token": texts.text_of(entry.token_id),
            }
            for entry in [*report[1:], report[0]]
        }
        for report in reports
    ]
