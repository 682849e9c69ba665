"""``POST /v1/completions``: texts that go on from prompts."""

from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mini_engine.async_engine import Handle
from mini_engine.outputs import Delta, RequestOutput
from mini_engine.server.errors import ApiError
from mini_engine.server.job import Job, events_of, usage
from mini_engine.server.logprobs import CompletionLogprobs, Report, prompt_table
from mini_engine.server.schema import CompletionBody
from mini_engine.server.service import Service
from mini_engine.server.stream import Frame, event, respond
from mini_engine.server.structure import structure_of

DEFAULT_MAX_TOKENS = 16


class Completion:
    """One request: what it asks, and how its answers are written."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        """Check the request. Raises ``ApiError``."""
        service.check_model(body.model)
        self.service = service
        self.body = body
        self.structure = structure_of(body)
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        given = prompts_of(body, service)
        service.check_characters(max(len(each) for each in given), body, "prompt")
        prompts = [service.truncate(ids, body, wanted) for ids in map(service.encode, given)]
        longest = max(map(len, prompts))
        if body.max_tokens is None:
            wanted = max(min(wanted, service.max_model_len - longest), 1)
        service.check_length(longest, wanted, "prompt")
        self.prompts = prompts
        self.score_only = wanted == 0
        self.check_stream()
        more: dict[str, Any] = {"best_of": body.best_of, "logprobs": body.logprobs}
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            more["prompt_logprobs"] = body.logprobs
        self.params = service.params(body, wanted, self.structure, **more)
        self.head = service.head("cmpl", "text_completion")

    def check_stream(self) -> None:
        """Raise ``ApiError`` for what is known at the end alone and so cannot be streamed."""
        body = self.body
        if body.stream and (body.best_of or 1) > (body.n or 1):
            raise ApiError(
                HTTPStatus.BAD_REQUEST, "best_of cannot be streamed: set it to n, or stream to false", "best_of"
            )
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(
                HTTPStatus.BAD_REQUEST, "prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs"
            )

    async def submit(self, job: Job) -> None:
        """Queue the prompts. Raises ``ApiError``."""
        await job.submit(self.prompts, self.params, self.structure, self.body.options(self.score_only))

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        async with Job(self.service) as job:
            await self.submit(job)
            outputs = list(chain.from_iterable(await job.results()))
            choices = [self.choice(index, output) for index, output in enumerate(outputs)]
            return {**self.head, "choices": choices, "usage": job.usage}

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return a choice of the whole answer."""
        body = self.body
        texts = self.service.texts
        lists = None
        if body.logprobs is not None:
            sampled = zip(output.token_ids, output.logprobs, strict=True)
            lists = self.logprobs(output.prompt_ids).lists([*self.echoed(output), *sampled])
        own: dict[str, Any] = {
            "index": index,
            "text": (self.echo(output.prompt_ids) if body.echo else "") + output.text + body.stop_text(output.matched),
            "logprobs": lists,
            "finish_reason": output.finish_reason,
            **self.service.ending(output),
        }
        if body.prompt_logprobs is not None:
            own["prompt_logprobs"] = prompt_table(texts, output.prompt_logprobs or ())
        if body.return_token_ids:
            own |= {"token_ids": output.token_ids, "prompt_token_ids": output.prompt_ids}
        return own

    def echo(self, prompt_ids: list[int]) -> str:
        """Return a prompt as text."""
        return str(self.service.tokenizer.decode(prompt_ids, skip_special_tokens=True))

    def logprobs(self, prompt_ids: list[int]) -> CompletionLogprobs:
        """Return the lists of a choice, empty. An echoed prompt may lack the space that its first token begins with."""
        texts = self.service.texts
        if not self.body.echo or self.body.logprobs is None:  # nothing is listed
            return CompletionLogprobs(texts)
        spelled = b"".join(map(texts.shown, prompt_ids))
        return CompletionLogprobs(
            texts, num_spaces(spelled.decode(errors="replace")) - num_spaces(self.echo(prompt_ids))
        )

    def echoed(self, output: RequestOutput) -> list[tuple[int, Report | None]]:
        """Return the report about a prompt that is echoed, empty for one that is not."""
        return list(zip(output.prompt_ids, output.prompt_logprobs or (), strict=False)) if self.body.echo else []

    def events(self) -> AsyncGenerator[bytes, None]:
        """Return the answer as events."""
        return events_of(self)

    def choices(self, job: Job) -> list["ChoiceStream"]:
        """Return what writes the choices of a stream."""
        owners = [handle for handle in job.handles for _ in handle.names]
        return [ChoiceStream(self, index, handle) for index, handle in enumerate(owners)]


class ChoiceStream:
    """What one choice of a stream has not shown yet."""

    def __init__(self, completion: Completion, index: int, handle: Handle) -> None:
        """Begin, with the prompt if it is echoed."""
        self.completion = completion
        self.index = index
        self.handle = handle
        self.held: list[tuple[int, Report | None]] | None = None  # tokens whose text is not shown yet
        self.token_ids: list[int] = []  # of the text that is not shown yet
        self.num_tokens = 0
        self.before = completion.echo(handle.prompt_ids) if completion.body.echo else ""
        self.lists = completion.logprobs(handle.prompt_ids)
        body = completion.body
        is_plain = body.logprobs is None and not body.reports_usage and not body.return_token_ids
        self.frame = Frame(self.chunk(Frame.MARK)) if is_plain else None

    def written(self, delta: Delta) -> bytes:
        """Return the chunk that ``delta`` completes, empty if it does not. Mutates."""
        if self.held is None:
            self.held = self.completion.echoed(self.handle.growing[delta.request_id])
        if delta.token_id is not None:
            self.num_tokens += 1
            self.token_ids.append(delta.token_id)
            self.held.append((delta.token_id, delta.logprobs))
        text = self.before + delta.text
        end = {}
        if delta.finish_reason is not None:
            output = self.handle.outputs[delta.request_id]
            text += self.completion.body.stop_text(output.matched)
            end = {"finish_reason": delta.finish_reason, **self.completion.service.ending(output)}
        elif not text:
            return b""
        reports = self.held
        self.held = []
        self.before = ""
        if self.frame is not None and not end:
            return self.frame.filled(text)
        return event(self.chunk(text, reports, **end))

    def chunk(self, text: str, reports: Sequence[tuple[int, Report | None]] = (), **end: Any) -> dict[str, Any]:
        """Return a chunk that reports tokens. Mutates what is still to be reported."""
        lists = None if self.completion.body.logprobs is None else self.lists.lists(reports)
        choice = {"index": self.index, "text": text, "logprobs": lists, "finish_reason": None, **end}
        if self.completion.body.return_token_ids:
            choice["token_ids"] = self.token_ids
            self.token_ids = []
        chunk = {**self.completion.head, "choices": [choice]}
        if self.completion.body.reports_usage:
            chunk["usage"] = usage(len(self.handle.prompt_ids), self.num_tokens)
        return chunk


def num_spaces(text: str) -> int:
    """Return how many spaces a text begins with."""
    return len(text) - len(text.lstrip(" "))


def prompts_of(body: CompletionBody, service: Service) -> list[Any]:
    """Return the prompts, each a text or ids. Raises ``ApiError`` for none, an empty one, or too many."""
    prompt: Any = body.prompt
    many = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(many) > service.limits.max_prompts:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, f"{len(many)} prompts; at most {service.limits.max_prompts} are answered", "prompt"
        )
    if not all(len(each) for each in many):
        raise ApiError(HTTPStatus.BAD_REQUEST, "a prompt is empty; give at least 1 token", "prompt")
    return many


async def complete(service: Service, body: CompletionBody, request: Request) -> Response:
    """Answer a request, plain or as a stream. Raises ``ApiError``."""
    completion = await run_in_threadpool(Completion, service, body)  # other streams go on while it is tokenized
    return await respond(request.receive, completion, bool(body.stream))
