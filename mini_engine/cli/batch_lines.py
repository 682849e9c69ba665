"""The two files of ``mini-engine batch``: requests, a line each, and answers, a line each.

A line is a prompt, or a JSON object with "prompt", "messages" or "token_ids" and any sampling parameter:

    {"prompt": "Once upon a time", "max_new_tokens": 30, "stop": ["."], "temperature": 0.8, "seed": 1}

Only a line feed, or a carriage return and a line feed, ends a line. A line that cannot be run keeps its place, with its
error. An answer names its line: the place in the file, from 0, empty lines counted, and a digest of its bytes.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedTokenizerBase

from mini_engine.checks import key_twice
from mini_engine.other_names import explanation
from mini_engine.outputs import RequestOutput, table_as_json
from mini_engine.prompts import encode_chat, encode_prompt
from mini_engine.sampler.params import SamplingParams

PROMPT_KEYS = ("prompt", "messages", "token_ids")
CONTINUES = "continue_final_message"  # whether the last of the messages is the beginning of the answer
PARAMETERS = tuple(field.name for field in fields(SamplingParams))
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DIGEST_BYTES = 8
BEGINNING = b'{"line": '  # of every answer, also of a torn one
MAX_SAMPLES = 1_000  # of one line: all of them are queued at once
MOST_SHOWN = 80  # characters of a value in an error
MOST_DIGITS = 300  # of a whole number: a float holds no longer one


@dataclass(frozen=True)
class Line:
    """One request of the file: its place and digest, ids and parameters, or what is wrong with it."""

    index: int
    digest: str
    prompt_ids: list[int]
    params: SamplingParams
    error: str | None = None


@dataclass(frozen=True)
class LineReader:
    """Reads requests. ``base`` holds what a line does not say. ``chat``: texts are wrapped in the chat template."""

    tokenizer: PreTrainedTokenizerBase
    base: SamplingParams
    chat: bool = False
    think: bool = False

    def lines(self, stream: Iterable[bytes], done: Mapping[int, str]) -> Iterator[Line]:
        """Yield the lines that are neither empty nor ``done`` (place -> digest), one by one.

        Raises ``ValueError`` for a line that is done and was another one then.
        """
        for index, raw in enumerate(stream):
            own = raw.removesuffix(b"\n").removesuffix(b"\r")
            own = own.removeprefix(BYTE_ORDER_MARK) if index == 0 else own
            if own.strip():
                digest = blake2b(own, digest_size=DIGEST_BYTES).hexdigest()
                if index not in done:
                    yield self.line(index, digest, own)
                elif done[index] != digest:
                    raise ValueError(
                        f"line {index} (from 0) is not the one that was answered; give --resume the file of requests "
                        "that the answers are for, or write to another file"
                    )

    def line(self, index: int, digest: str, raw: bytes) -> Line:
        """Read one line; what is wrong with it becomes its error."""
        try:
            ids, params = self.request(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            wrong = (
                f"byte {error.start} of the line is {raw[error.start]:#04x}, which is not UTF-8; save the file as UTF-8"
            )
        except RecursionError:
            wrong = "the line is nested too deeply to be read; give fewer brackets within brackets"
        except ValueError as error:
            wrong = str(error)
        except Exception as error:  # lines and chat templates come from outside
            wrong = f"the line cannot be read ({type(error).__name__}: {error})"
        else:
            return Line(index, digest, ids, params)
        return Line(index, digest, [], self.base, wrong)

    def request(self, text: str) -> tuple[list[int], SamplingParams]:
        """Return ids and parameters of one line. Raises ``ValueError`` naming what is wrong."""
        if not text.lstrip().startswith("{"):
            return self.encode("prompt", text), self.base
        try:
            given: dict[str, Any] = json.loads(text, object_pairs_hook=unique, parse_int=whole_number)
            json.dumps(given, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not a JSON object ({error}); a line that begins with {{ must be one") from error
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the line has {error.object[error.start]!r}, half of a surrogate pair, which is not a character; "
                "write both halves, or the character itself"
            ) from error
        unknown = sorted(set(given) - set(PARAMETERS) - {*PROMPT_KEYS, CONTINUES})
        if unknown:
            known = ", ".join([*PROMPT_KEYS, CONTINUES, *PARAMETERS])
            wrong = f"there is no parameter {unknown[0]!r:.80}; choose from {known}"
            raise ValueError(explanation(unknown[0], "SamplingParams") or wrong)
        prompts = [key for key in PROMPT_KEYS if key in given]
        if len(prompts) != 1:
            raise ValueError(f"{len(prompts)} of {', '.join(PROMPT_KEYS)} are given; give exactly one")
        continues = given.pop(CONTINUES, False)
        if not isinstance(continues, bool) or (continues and prompts != ["messages"]):
            raise ValueError(f"{CONTINUES} is {continues!r} beside {prompts[0]}; it is true or false beside messages")
        changes = {key: value for key, value in given.items() if key not in PROMPT_KEYS}
        if continues:  # past the place of a thought, which a grammar would wait for
            changes.setdefault("reasoning", False)
        params = replace(self.base, **changes)
        if params.num_samples > MAX_SAMPLES:
            raise ValueError(f"{params.num_samples} answers are asked for; give n and best_of of at most {MAX_SAMPLES}")
        return self.encode(prompts[0], given[prompts[0]], continues), params

    def encode(self, kind: str, value: Any, continues: bool = False) -> list[int]:
        """Return the ids of a prompt given as text, conversation or ids. Raises ``ValueError`` for another type."""
        if kind == "prompt" and isinstance(value, str) and not self.chat:
            return encode_prompt(self.tokenizer, value)
        if kind == "prompt" and isinstance(value, str):
            return encode_chat(self.tokenizer, [{"role": "user", "content": value}], self.think)
        if kind == "messages" and isinstance(value, list) and value and all(map(is_turn, value)):
            return encode_chat(self.tokenizer, value, self.think, continues)
        if kind == "token_ids" and isinstance(value, list) and all(type(token) is int for token in value):
            return value
        shown = repr(value)
        shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}…"
        raise ValueError(
            f"{kind} is {shown}; give a text, a list of messages with a role and a content that are texts, or a list "
            "of ids"
        )


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ``ValueError`` for a key that comes twice: the first value would be lost."""
    if (twice := key_twice(pairs)) is not None:
        raise ValueError(f"{twice!r:.80} is given twice in one object; leave out one of them")
    return dict(pairs)


def whole_number(digits: str) -> int:
    """Return the number. Raises ``ValueError`` for one that no parameter can take."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"the number {digits[:9]}… has {len(digits)} digits; give at most {MOST_DIGITS}")
    return int(digits)


def is_turn(value: Any) -> bool:
    """Whether ``value`` is a message of a conversation: a role and what it says."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def report(line: Line, answers: Iterable[RequestOutput]) -> dict[str, Any]:
    """Return the JSON form of a line's answers."""
    return {
        "line": line.index,
        "digest": line.digest,
        "prompt_tokens": len(line.prompt_ids),
        "answers": [report_answer(answer) for answer in answers],
    }


def report_answer(answer: RequestOutput) -> dict[str, Any]:
    """Return the JSON form of an answer: the text, how it ended, what was asked about it, what it had to wait."""
    known: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "matched": answer.matched,
    }
    if answer.error is not None:
        known["error"] = answer.error
    if answer.logprobs:
        known["cumulative_logprob"] = answer.cumulative_logprob
        known["logprobs"] = [table_as_json(table) for table in answer.logprobs]
    if answer.prompt_logprobs is not None:
        known["prompt_logprobs"] = [table and table_as_json(table) for table in answer.prompt_logprobs]
    known |= answer.grammar_as_json()
    if answer.receipt is not None:
        known["receipt"] = answer.receipt
    if answer.times is not None:
        times = answer.times
        known |= {"queue_s": times.queue_s, "ttft_s": times.ttft_s, "tpot_s": times.tpot_s}
        known["preemptions"] = answer.num_preemptions
    return known


def answered(file: Path) -> dict[int, str]:
    """Return place and digest of the lines that ``file`` has answers for; a torn last line is cut off. Mutates it.

    Raises ``ValueError`` for a line that is not an answer: ``file`` may be something else.
    """
    done: dict[int, str] = {}
    whole = 0
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if not raw.endswith(b"\n") and raw[: len(BEGINNING)] == BEGINNING[: len(raw)]:
                break
            try:
                known = json.loads(raw if raw.endswith(b"\n") else b"")
                done[int(known["line"])] = str(known["digest"])
                whole += len(raw)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(
                    f"line {number} of {file} is not an answer of this command; give the file that it was writing, or "
                    "leave out --resume and write to another one"
                ) from error
    if whole < file.stat().st_size:
        os.truncate(file, whole)
    return done


class AnswerWriter:
    """Writes a line of JSON for each answer and flushes it; with ``ordered``, not before those of earlier lines.

    ``num_written`` counts. ``expect`` tells it of a line in the order of the file, ``write`` brings its answer.
    """

    def __init__(self, stream: BinaryIO, name: str, ordered: bool) -> None:
        """Write to ``stream``, called ``name`` in errors."""
        self.stream = stream
        self.name = name
        self.ordered = ordered
        self.num_written = 0
        self.expected: dict[int, bytes | None] = {}  # in the order of the file: lines without an answer on paper

    def expect(self, line: Line) -> None:
        """Note that an answer of ``line`` will come. Mutates."""
        if self.ordered:
            self.expected[line.index] = None

    def write(self, line: Line, answers: Iterable[RequestOutput]) -> None:
        """Write the answers of ``line`` now or in their turn. Raises as ``put`` does. Mutates."""
        text = json.dumps(report(line, answers), allow_nan=False).encode() + b"\n"
        if not self.ordered:
            self.put(text)
            return
        self.expected[line.index] = text
        self.put_next()

    def forget(self, line: Line) -> None:
        """Note that ``line`` will not be answered. Raises as ``put`` does. Mutates."""
        self.expected.pop(line.index, None)
        self.put_next()

    def put_next(self) -> None:
        """Write what has its turn. Raises as ``put`` does. Mutates."""
        while self.expected:
            index = next(iter(self.expected))
            text = self.expected[index]
            if text is None:
                return
            del self.expected[index]
            self.put(text)

    def put(self, text: bytes) -> None:
        """Write one line and flush it. Raises ``ValueError`` if there is no room, or no reader. Mutates."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ValueError(
                f"answers cannot be written to {self.name} ({reason}); {self.num_written} of this run are there; write "
                "to --output FILE where there is room, and go on with --resume"
            ) from error
        self.num_written += 1
