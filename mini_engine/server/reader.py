"""What a request asks for: its prompts as ids, its parameters, and what is refused. It needs no engine."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from mini_engine.checks import choice
from mini_engine.prompts import encode_chat, encode_text
from mini_engine.sampler.params import SamplingParams
from mini_engine.server.errors import ApiError, bad_request
from mini_engine.server.identity import created, new_id
from mini_engine.server.schema import GenerationBody, Message, Rendering, Tool
from mini_engine.server.structure import Structure
from mini_engine.server.token_text import TokenTexts
from mini_engine.server.tools import PARSERS

SAME_NAMES = (
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty seed stop stop_token_ids "
    "ignore_eos logit_bias allowed_token_ids n prompt_logprobs receipt"
).split()

TEXT_OF_ARGUMENTS = re.compile(r"""arguments['")\]]*\s*(is string|\+)""")  # in templates that take them as a text
COMPOSED = 4  # a tokenizer may normalize a text, which makes one character of up to four


class Sizes(NamedTuple):
    """What of a model limits its requests."""

    max_model_len: int
    vocab_size: int


@dataclass(frozen=True)
class Limits:
    """What the server accepts. ``timeout_s``: for a request. ``drain_s``: for running requests when it is to end."""

    max_body_bytes: int = 4 * 2**20
    max_prompts: int = 128
    max_n: int = 64
    max_grammar_chars: int = 64 * 2**10
    max_waiting: int = 256
    timeout_s: float = 600.0
    drain_s: float = 30.0


class Reader:
    """Reads requests to one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        sizes: Sizes,
        limits: Limits | None = None,
        defaults: Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
    ) -> None:
        """Read requests to a model of these ``sizes`` under the name ``model_name``.

        ``tool_parser``: the form of calls; the words of the chat template say it if not given. Raises ``ValueError``.
        ``defaults``: fields of ``SamplingParams`` for what a request leaves out. The temperature is 1 without one.
        """
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len, self.vocab_size = sizes
        self.limits = limits or Limits()
        self.tool_parser = None if tool_parser is None else choice("tool_parser", tool_parser, PARSERS)
        self.defaults: dict[str, Any] = {"temperature": 1.0, **(defaults or {})}
        self.texts = TokenTexts(tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()))  # characters; of bytes at least as many

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return what every answer, and every chunk of a stream, begins with."""
        names = {"id": f"{prefix}-{new_id()}", "object": kind}
        return {**names, "created": int(created()), "model": self.model_name}

    def check_model(self, name: str | None) -> None:
        """Raise ``ApiError`` if the request is for another model."""
        if name is not None and name != self.model_name:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                "model",
                "model_not_found",
            )

    def encode(self, prompt: str | list[int], with_special: bool = True) -> list[int]:
        """Return a prompt as ids, a text ``with_special`` tokens around it. Raises ``ApiError``."""
        if isinstance(prompt, list):
            self.texts.check(prompt, self.vocab_size, "prompt")
            return prompt
        try:
            return encode_text(self.tokenizer, prompt, with_special)
        except ValueError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error), "prompt") from error

    @property
    def chat_template(self) -> str:
        """The chat template for requests with tools, empty if there is none."""
        template: str | dict[str, str] | None = self.tokenizer.chat_template
        named = template if isinstance(template, dict) else {"default": template or ""}
        return named.get("tool_use", named.get("default", ""))

    def encode_chat(
        self, messages: Sequence[Message], body: Rendering, tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Return a chat as ids, ready for the assistant's turn or the rest of it. Raises ``ApiError``."""
        extra: dict[str, Any] = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]} if tools else {}
        as_text = TEXT_OF_ARGUMENTS.search(self.chat_template) is not None
        rendered = [template_message(message, as_text) for message in messages]
        effort = body.reasoning_effort
        if effort is not None and effort != "none":
            if "reasoning_effort" not in self.chat_template:
                raise ApiError(
                    HTTPStatus.BAD_REQUEST,
                    f"reasoning_effort is {effort!r}, which this model's chat template does not read; give 'none', "
                    "or leave it out",
                    "reasoning_effort",
                )
            extra["reasoning_effort"] = effort
        try:
            return encode_chat(self.tokenizer, rendered, body.may_think, bool(body.continue_final_message), **extra)
        except ValueError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error), "messages") from error

    def truncate(self, ids: list[int], body: GenerationBody, reserve: int) -> list[int]:
        """Return the last ``truncate_prompt_tokens`` of a prompt; -1: all that leave room for ``reserve`` more."""
        if body.truncate_prompt_tokens is None:
            return ids
        most = body.truncate_prompt_tokens
        most = self.max_model_len - reserve if most == -1 else most
        if most < 1:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"truncate_prompt_tokens leaves {most} tokens; leave 1",
                "truncate_prompt_tokens",
            )
        return ids[-most:]

    def check_characters(self, num_characters: int, body: GenerationBody, param: str) -> None:
        """Raise ``ApiError`` for a text that no tokenizing can make short enough; tokenizing it would take seconds."""
        most = self.max_model_len * self.longest_token * COMPOSED
        if num_characters > most and body.truncate_prompt_tokens is None:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"This model's maximum context length is {self.max_model_len} tokens, which are at most {most} "
                f"characters. However, the {param} has {num_characters} characters. Please reduce its length.",
                param,
                "context_length_exceeded",
            )

    def check_length(self, num_prompt_tokens: int, max_tokens: int, param: str) -> None:
        """Raise ``ApiError`` for a request that is longer than the model, in the words that clients look for."""
        if num_prompt_tokens + max_tokens > self.max_model_len:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the {param}, {max_tokens} in the "
                f"completion). Please reduce the length of the {param} or completion.",
                param,
                "context_length_exceeded",
            )

    def params(self, body: GenerationBody, max_tokens: int, structure: Structure | None, **more: Any) -> SamplingParams:
        """Return the engine's parameters of a request. Raises ``ApiError`` naming the field at fault."""
        if (body.n or 1) > self.limits.max_n:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"n is {body.n}; at most {self.limits.max_n} are answered", "n")
        if structure is not None and structure.size > self.limits.max_grammar_chars:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"{structure.param} has {structure.size} characters; at most {self.limits.max_grammar_chars} are read",
                structure.param,
            )
        given = {name: value for name in SAME_NAMES if (value := getattr(body, name)) is not None}
        given["min_new_tokens"] = body.min_tokens or 0
        given["bad_words"] = [ids for word in body.bad_words or () for ids in self.spellings(word)]
        if structure is not None:
            given |= {structure.kind: structure.value}
        try:
            return SamplingParams(**{**self.defaults, **given}, **more, max_new_tokens=max(max_tokens, 1))
        except ValueError as error:
            raise bad_request(
                error, {name: name for name in (*given, *more)} | {"max_new_tokens": "max_tokens"}
            ) from error

    def spellings(self, word: str) -> list[list[int]]:
        """Return a bad word as ids, at the beginning of a text and after a space. Raises ``ApiError``."""
        if not word.strip():
            raise ApiError(HTTPStatus.BAD_REQUEST, "bad_words holds an empty word", "bad_words")
        first = self.encode(word.lstrip(), with_special=False)
        later = self.encode(" " + word.lstrip(), with_special=False)
        return [first, later] if len(later) == len(first) and later[0] != first[0] else [first]


def template_message(message: Message, as_text: bool) -> dict[str, Any]:
    """Return a message as chat templates read it: parts are joined, and a developer is the system.

    The arguments of a call are an object, or ``as_text`` what was sent; so is what is no object.
    """
    role = "system" if message.role == "developer" else message.role
    thought = message.reasoning_content or message.reasoning
    own = {"reasoning_content": thought} if thought else {}
    given = message.model_dump(exclude_none=True, exclude={"reasoning", "reasoning_content"})
    rendered = given | own | {"role": role, "content": message.text}
    for call in rendered.get("tool_calls", ()):
        with suppress(ValueError):
            arguments = call["function"]["arguments"] if as_text else json.loads(call["function"]["arguments"])
            if isinstance(arguments, dict):
                call["function"]["arguments"] = arguments
    return rendered
