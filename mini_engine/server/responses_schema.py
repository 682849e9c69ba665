"""The body of ``POST /v1/responses``, and the chat that it means."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from mini_engine.server.schema import (
    ChatBody,
    Function,
    FunctionCall,
    FunctionName,
    HistoryBody,
    Message,
    NamedTool,
    NeutralBody,
    ResponseFormat,
    Tool,
    ToolCall,
)
from mini_engine.server.schema import JsonSchemaFormat as ChatSchema

NEUTRAL: dict[str, tuple[Any, ...]] = {  # null is neutral too
    "store": (False,),  # nothing is kept
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "include": ([], ["reasoning.encrypted_content"]),  # nothing is encrypted
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "context_management": ([],),
    "stream_options": ({}, {"include_obfuscation": False}),
}
EFFORTS = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
CHAT_FIELDS = {  # field of the chat -> of this request, for errors
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class TextPart(HistoryBody):
    """A piece of what was said or thought. Only text is understood."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    logprobs: list[Any] | None = None


Parts = str | list[TextPart]


def joined(parts: Parts | None) -> str:
    """Return parts as one text."""
    return "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""


class MessageItem(HistoryBody):
    """A turn of a chat."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(HistoryBody):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(HistoryBody):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(HistoryBody):
    """What the assistant thought."""

    type: Literal["reasoning"]
    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None
    encrypted_content: None = None


def type_of(item: Any) -> Any:
    """Return the type of an item, which messages may leave out."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(type_of),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(FunctionName):
    """The choice of one function."""

    type: Literal["function"]


class SchemaFormat(ChatSchema):
    """An answer that keeps to a JSON Schema."""

    type: Literal["json_schema"]


class OtherFormat(NeutralBody):
    """An answer that is free, or any JSON object."""

    type: Literal["text", "json_object"]


class TextOptions(NeutralBody):
    """What the text of an answer must be."""

    neutral: ClassVar = {"verbosity": ("medium",)}
    format: SchemaFormat | OtherFormat | None = None

    def chat_format(self) -> ResponseFormat | None:
        """Return the same wish of a chat."""
        if isinstance(self.format, SchemaFormat):
            named = self.format.model_dump(exclude={"type"}, by_alias=True)
            return ResponseFormat(type="json_schema", json_schema=ChatSchema.model_validate(named))
        return None if self.format is None else ResponseFormat(type=self.format.type)


class ReasoningOptions(NeutralBody):
    """How much is thought before the answer."""

    neutral: ClassVar = {"summary": ("auto",), "generate_summary": ("auto",)}
    effort: EFFORTS | None = None


class ResponsesBody(NeutralBody):
    """``POST /v1/responses``. Nothing is kept: ``input`` has the whole conversation."""

    neutral: ClassVar = NEUTRAL
    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None

    def chat(self) -> ChatBody:
        """Return the chat that is meant."""
        choice = self.tool_choice
        tools = [
            Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in self.tools or ()
        ]
        same = ("model", "temperature", "top_p", "parallel_tool_calls", "stream")
        return ChatBody(
            messages=messages_of(self),
            max_completion_tokens=self.max_output_tokens,
            tools=tools or None,
            tool_choice=named_tool(choice) if isinstance(choice, NamedFunction) else choice,
            response_format=self.text.chat_format() if self.text else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            **{name: getattr(self, name) for name in same},
        )


def named_tool(choice: NamedFunction) -> NamedTool:
    """Return the choice of a function as a chat has it."""
    return NamedTool(type="function", function=FunctionName(name=choice.name))


def messages_of(body: ResponsesBody) -> list[Message]:
    """Return the conversation as messages. What the assistant thought, said and called in a row is one of them."""
    messages = list[Message]()
    if body.instructions is not None:
        messages.append(Message(role="system", content=body.instructions))
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in items:
        if isinstance(item, ResultItem):
            messages.append(Message(role="tool", content=joined(item.output), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(Message(role=item.role, content=joined(item.content)))
        else:
            extend_turn(messages, item)
    return messages


def extend_turn(messages: list[Message], item: MessageItem | CallItem | ReasoningItem) -> None:
    """Add an item to the assistant's turn at the end, or begin one. Mutates ``messages``."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if last is None or (isinstance(item, ReasoningItem) and (last.content or last.tool_calls)):
        last = Message(role="assistant")
        messages.append(last)
    if isinstance(item, CallItem):
        function = FunctionCall(name=item.name, arguments=item.arguments)
        last.tool_calls = [*(last.tool_calls or ()), ToolCall(id=item.call_id, function=function)]
    elif isinstance(item, MessageItem):
        last.content = last.text + joined(item.content)
    else:
        last.reasoning_content = (last.reasoning_content or "") + (joined(item.content) or joined(item.summary))
