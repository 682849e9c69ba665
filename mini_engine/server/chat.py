"""``POST /v1/chat/completions``: the assistant's turn, with its thoughts and its calls of functions apart."""

from collections.abc import AsyncGenerator, Iterator
from itertools import chain
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mini_engine.async_engine import Handle
from mini_engine.outputs import Delta, RequestOutput
from mini_engine.server.errors import ApiError
from mini_engine.server.job import Job, events_of, usage
from mini_engine.server.logprobs import Report, chat_logprobs, prompt_table
from mini_engine.server.schema import ChatBody
from mini_engine.server.service import Service
from mini_engine.server.stream import Frame, event, respond
from mini_engine.server.structure import structure_of
from mini_engine.server.thoughts import Thoughts
from mini_engine.server.tools import calling_of
from mini_engine.texts import is_thought_open


class Chat:
    """One request: what it asks, and how its answers are written."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        """Check the request. Raises ``ApiError``."""
        service.check_model(body.model)
        self.service = service
        self.body = body
        structure = structure_of(body)
        self.calling = calling_of(body, structure, service.chat_template, service.tool_parser)
        self.structure = structure if self.calling is None else self.calling.structure
        service.check_characters(sum(message.num_characters for message in body.messages), body, "messages")
        ids = service.encode_chat(body.messages, body, None if self.calling is None else body.tools)
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.prompt = service.truncate(ids, body, 1 if wanted is None else wanted)
        if wanted is None:
            service.check_length(len(self.prompt), 1, "messages")
            wanted = service.max_model_len - len(self.prompt)
        service.check_length(len(self.prompt), wanted, "messages")
        self.score_only = wanted == 0
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(400, "log-probabilities of the prompt cannot be streamed; set stream to false", "stream")
        begins = not body.continue_final_message  # a turn that goes on is past the place of a thought
        thinks = begins and body.may_think
        self.thought = is_thought_open(service.tokenizer.backend_tokenizer, ids) if thinks else None
        about = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
        reasoning = {"reasoning": True} if thinks and self.structure is not None else {}
        self.params = service.params(body, wanted, self.structure, **about, **reasoning)
        self.head = service.head("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")

    async def submit(self, job: Job) -> None:
        """Queue the chat. Raises ``ApiError``."""
        await job.submit([self.prompt], self.params, self.structure, self.body.options(self.score_only))

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        async with Job(self.service) as job:
            await self.submit(job)
            outputs = list(chain.from_iterable(await job.results()))
            choices = [self.choice(index, output) for index, output in enumerate(outputs)]
            answer: dict[str, Any] = {**self.head, "choices": choices, "usage": job.usage}
            if self.body.prompt_logprobs is not None:
                answer["prompt_logprobs"] = prompt_table(self.service.texts, outputs[0].prompt_logprobs or ())
            return answer

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return a choice of the whole answer."""
        thoughts = Thoughts(self.thought)
        pieces = [thoughts.add(output.text), thoughts.flush()]
        thought, text = ("".join(parts) for parts in zip(*pieces, strict=True))
        text += self.body.stop_text(output.matched)
        reader = None if self.calling is None else self.calling.reader()
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if reader is not None:
            message |= reader.message(text)
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.service.texts, output.logprobs) if self.body.logprobs else None,
            "finish_reason": output.finish_reason if reader is None else reader.reason(output.finish_reason),
            **self.service.ending(output),
        }

    def events(self) -> AsyncGenerator[bytes, None]:
        """Return the answer as events."""
        return events_of(self)

    def choices(self, job: Job) -> list["ChoiceStream"]:
        """Return what writes the choices of a stream."""
        (handle,) = job.handles
        return [ChoiceStream(self, index, handle) for index in range(len(handle.names))]


class ChoiceStream:
    """What one choice of a stream has not shown yet."""

    def __init__(self, chat: Chat, index: int, handle: Handle) -> None:
        """Begin with nothing shown."""
        self.chat = chat
        self.index = index
        self.handle = handle
        self.thoughts = Thoughts(chat.thought)
        self.reports: list[Report] = []  # of tokens whose text is not shown yet
        self.num_tokens = 0
        self.has_begun = False
        self.reader = None if chat.calling is None else chat.calling.reader()
        is_plain = not chat.body.logprobs and not chat.body.reports_usage
        self.frame = Frame(self.chunk({"content": Frame.MARK})) if is_plain else None

    def written(self, delta: Delta) -> bytes:
        """Return the chunks that ``delta`` completes. Mutates."""
        return b"".join(self.chunks(delta))

    def chunks(self, delta: Delta) -> Iterator[bytes]:
        """Yield the chunks that ``delta`` completes: the role first, then text, then the end. Mutates."""
        if not self.has_begun:
            self.has_begun = True
            yield event(self.chunk({"role": "assistant", "content": ""}))
        self.num_tokens += delta.token_id is not None
        if delta.logprobs is not None:
            self.reports.append(delta.logprobs)
        for part in self.parts(delta):
            if self.frame is not None and "content" in part:
                yield self.frame.filled(part["content"])
            else:
                yield event(self.chunk(part, with_reports=True))
        reason = delta.finish_reason
        if reason is None:
            return
        if self.reports:
            yield event(self.chunk({"content": ""}, with_reports=True))
        ending = self.chat.service.ending(self.handle.outputs[delta.request_id])
        why = reason if self.reader is None else self.reader.reason(reason)
        yield event(self.chunk({}, finish_reason=why, **ending))

    def parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield what is new as the interface's deltas: of the thought, then of the answer. Mutates."""
        thought, text = self.thoughts.add(delta.text)
        is_last = delta.finish_reason is not None
        if is_last:
            last_thought, last_text = self.thoughts.flush()
            thought += last_thought
            text += last_text + self.chat.body.stop_text(self.handle.outputs[delta.request_id].matched)
        if thought:
            yield {"reasoning_content": thought}
        if self.reader is not None:
            yield from self.reader.parts(text, is_last)
        elif text:
            yield {"content": text}

    def chunk(self, delta: dict[str, Any], with_reports: bool = False, **end: Any) -> dict[str, Any]:
        """Return a chunk. Mutates what is still to be reported."""
        chat = self.chat
        choice = {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None, **end}
        if with_reports and chat.body.logprobs:
            choice["logprobs"] = chat_logprobs(chat.service.texts, self.reports)
            self.reports = []
        data: dict[str, Any] = {**chat.head, "choices": [choice]}
        if chat.body.reports_usage:
            data["usage"] = usage(len(self.handle.prompt_ids), self.num_tokens)
        return data


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Answer a request, plain or as a stream. Raises ``ApiError``."""
    asked = await run_in_threadpool(Chat, service, body)  # other streams go on while it is tokenized
    return await respond(request.receive, asked, bool(body.stream))
