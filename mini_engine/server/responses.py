"""``POST /v1/responses``, without a memory: a chat whose answer is items, with events for each of them."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from mini_engine.outputs import Delta
from mini_engine.server.chat import Chat, ChoiceStream
from mini_engine.server.errors import ApiError
from mini_engine.server.identity import created, new_id
from mini_engine.server.job import Job
from mini_engine.server.responses_schema import CHAT_FIELDS, ResponsesBody
from mini_engine.server.service import Service
from mini_engine.server.stream import event, respond
from mini_engine.texts import thought_ids

KINDS = {"reasoning_content": "reasoning_text", "content": "output_text"}  # of a chat's delta -> of a part


class Items:
    """The items of an answer while it comes. One is open at a time, the last."""

    def __init__(self) -> None:
        """Begin with none."""
        self.items = list[dict[str, Any]]()
        self.kind: str | None = None  # of the part that is open; "" for a call

    def add(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Take a delta of a chat and yield its events. Mutates."""
        for name, kind in KINDS.items():
            if delta.get(name):
                if self.kind != kind:
                    yield from self.close("completed")
                    yield from self.open_part(kind)
                self.items[-1]["content"][0]["text"] += delta[name]
                yield self.text_event("delta", delta=delta[name])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self.close("completed")
                yield self.open_item("function_call", call_id=call["id"], name=call["function"]["name"], arguments="")
                self.kind = ""
            if new := call["function"]["arguments"]:
                self.items[-1]["arguments"] += new
                yield self.event("response.function_call_arguments.delta", delta=new)

    def open_part(self, kind: str) -> Iterator[dict[str, Any]]:
        """Begin an item of text, a thought or a message. Mutates."""
        part: dict[str, Any] = {"type": kind, "text": ""}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
            yield self.open_item("message", role="assistant", content=[])
        else:
            yield self.open_item("reasoning", summary=[], content=[])
        yield self.event("response.content_part.added", content_index=0, part=part)
        self.items[-1]["content"] = [dict(part)]
        self.kind = kind

    def open_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Begin an item and return its event. Mutates."""
        item = {"id": f"{kind}-{new_id()}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the open item, if there is one, and yield its events. Mutates."""
        if self.kind is None:
            return
        item = self.items[-1]
        item["status"] = status
        if self.kind:
            (part,) = item["content"]
            yield self.text_event("done", text=part["text"])
            yield self.event("response.content_part.done", content_index=0, part=part)
        else:
            yield self.event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        self.kind = None
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def text_event(self, what: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the text of the open part."""
        logprobs: dict[str, Any] = {"logprobs": []} if self.kind == "output_text" else {}
        return self.event(f"response.{self.kind}.{what}", content_index=0, **logprobs, **fields)

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the last item."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


@contextmanager
def own_fields() -> Iterator[None]:
    """Let errors of the chat name the fields of this request."""
    try:
        yield
    except ApiError as error:
        error.param = CHAT_FIELDS.get(error.param or "", error.param)
        raise


class Responses:
    """One request: the chat that it means, and how its answer is written."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        """Check the request. Raises ``ApiError`` naming its own fields."""
        self.service = service
        self.body = body
        with own_fields():
            self.chat = Chat(service, body.chat())
        self.id = f"resp-{new_id()}"
        self.created = created()

    async def submit(self, job: Job) -> "ItemStream":
        """Queue the chat and return what writes its answer. Raises ``ApiError``."""
        with own_fields():
            await self.chat.submit(job)
        return ItemStream(self, job)

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        async with Job(self.service) as job:
            stream = await self.submit(job)
            async for _ in job.chunks([stream]):
                pass
            return stream.response(stream.status)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events."""
        async with Job(self.service) as job:
            stream = await self.submit(job)
            yield b"".join(map(stream.numbered, stream.first_events()))
            async for data in job.chunks([stream]):
                yield data
            yield stream.numbered({"type": f"response.{stream.status}", "response": stream.response(stream.status)})


class ItemStream:
    """Turns what comes into items and numbered events."""

    def __init__(self, asked: Responses, job: Job) -> None:
        """Begin with nothing written."""
        self.asked = asked
        self.job = job
        (self.handle,) = job.handles
        self.choice = ChoiceStream(asked.chat, 0, self.handle)
        self.items = Items()
        self.num_events = 0
        self.status = "in_progress"

    def first_events(self) -> Iterator[dict[str, Any]]:
        """Yield what comes before all items."""
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self.response("in_progress")}

    def written(self, delta: Delta) -> bytes:
        """Return the events that ``delta`` completes. Mutates."""
        events = [each for part in self.choice.parts(delta) for each in self.items.add(part)]
        if delta.finish_reason is not None:
            self.status = "incomplete" if delta.finish_reason == "length" else "completed"
            events += self.items.close(self.status)
        return b"".join(map(self.numbered, events))

    def numbered(self, fields: dict[str, Any]) -> bytes:
        """Return an event with the next number. Mutates."""
        self.num_events += 1
        return event({**fields, "sequence_number": self.num_events - 1}, fields["type"])

    def response(self, status: str) -> dict[str, Any]:
        """Return the response as far as it has come."""
        body = self.asked.body
        given = body.model_dump(exclude={"input", "stream", "model"}, by_alias=True)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        params = self.asked.chat.params
        taken: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
        taken |= {"tools": given["tools"] or [], "tool_choice": given["tool_choice"] or "auto"}
        taken["parallel_tool_calls"] = body.parallel_tool_calls is not False
        return {
            **{"id": self.asked.id, "object": "response", "created_at": self.asked.created, "status": status},
            **{"model": self.asked.service.model_name, "error": None, "incomplete_details": cut},
            **{"store": False, "output": [dict(item) for item in self.items.items]},
            **given,
            **taken,
            "usage": None if status == "in_progress" else self.usage,
        }

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the conversation and of the answer, those of a thought and its marks apart."""
        counts = self.job.usage
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the end of the thought, all of them if it has none."""
        ids = thought_ids(self.asked.service.tokenizer.backend_tokenizer)
        is_open = self.asked.chat.thought  # by the prompt; None: there can be no thought
        (output,) = self.handle.outputs.values()
        tokens = list(output.token_ids)
        if ids is None or is_open is None or not (is_open or ids[0] in tokens):
            return 0
        return tokens.index(ids[1]) + 1 if ids[1] in tokens else len(tokens)


async def respond_to(service: Service, body: ResponsesBody, request: Request) -> Response:
    """Answer a request, whole or as a stream. Raises ``ApiError``."""
    asked = await run_in_threadpool(Responses, service, body)  # other streams go on while it is tokenized
    return await respond(request.receive, asked, bool(body.stream))
