"""The bodies of requests. A field that is unknown is refused, and so is one that the server would have to ignore.

``NEUTRAL`` has what clients send although it changes nothing: such a field is taken at these values alone.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mini_engine.scheduler.request import RequestOptions

MESSAGE_LABELS = (
    "id",
    "status",
    "cache_control",
    "provider_specific_fields",
)  # histories carry them; nothing reads them
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # they never change an answer
NEUTRAL: dict[str, tuple[Any, ...]] = {  # null is neutral too
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "lora_path": (),
    "separate_reasoning": (True,),
    "include_reasoning": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
}


class Body(BaseModel):
    """A JSON object in which every field is known, and has the type that is asked for."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NeutralBody(Body):
    """A body of which some fields are taken at the values alone that change nothing."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, data: Any) -> Any:
        """Take out what changes nothing. Raises ``ValueError`` for another value of such a field."""
        if not isinstance(data, dict):
            return data
        neutral = cls.neutral.keys() - cls.model_fields.keys()
        for name in neutral & data.keys():
            if data[name] is not None and data[name] not in cls.neutral[name]:
                raise ValueError(f"{name} is {data[name]!r}, which this server does not do; leave it out")
        return {name: value for name, value in data.items() if name not in neutral and name not in LABELS}


class StreamOptions(Body):
    """What a stream reports besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """A schema with a name. It is always kept to, ``strict`` or not."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Body):
    """One of vLLM's ways to say what an answer must be."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class GenerationBody(NeutralBody):
    """What completions and chats have in common. ``null`` is the same as a field left out."""

    neutral = NEUTRAL
    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    n: Annotated[int | None, Field(ge=1)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    prompt_logprobs_start: Annotated[int | None, Field(ge=0)] = None
    receipt: bool | None = None
    cache_salt: Annotated[str | None, Field(min_length=1)] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> "GenerationBody":
        """Raise ``ValueError`` for options of a stream without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are only for streams; set stream to true, or leave them out")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with the number of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reports_usage(self) -> bool:
        """Whether every chunk of a stream is to have the number of tokens."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def options(self, score_only: bool) -> RequestOptions:
        """Return what ``AsyncEngine.submit`` takes besides ``SamplingParams``."""
        start = self.prompt_logprobs_start or 0
        return RequestOptions(cache_key=self.cache_salt, prompt_logprobs_start=start, score_only=score_only)

    def stop_text(self, matched: int | str | None) -> str:
        """Return the stop string that ended an answer, if it is to be in the text."""
        wanted = self.include_stop_str_in_output or self.no_stop_trim
        return matched if wanted and isinstance(matched, str) else ""


Prompt = str | list[int] | list[str] | list[list[int]]


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Prompt
    best_of: Annotated[int | None, Field(ge=1)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    return_token_ids: bool | None = None


class HistoryBody(Body):
    """A message or a piece of one, as clients keep it; ``MESSAGE_LABELS`` are taken out."""

    @model_validator(mode="before")
    @classmethod
    def drop_labels(cls, data: Any) -> Any:
        """Take out what nothing reads."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in MESSAGE_LABELS}


class ContentPart(HistoryBody):
    """A piece of a message. Only text is understood."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A call that the assistant made."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call with its id."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(HistoryBody):
    """A turn of a chat. What the assistant said may come back with all fields of an answer, as clients dump it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it
    refusal: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        """What the message says, its parts joined."""
        parts = self.content
        return "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""

    @property
    def num_characters(self) -> int:
        """Characters of what it says and of the calls that it made."""
        return len(self.text) + sum(len(call.function.arguments) for call in self.tool_calls or ())


class Function(Body):
    """A function that the model may call: ``parameters`` is a JSON Schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function as a tool."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


class TemplateOptions(Body):
    """What the chat template is told."""

    enable_thinking: bool | None = None


class Rendering(Body):
    """How a chat becomes a prompt."""

    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def check_turn(self) -> Self:
        """Raise ``ValueError`` unless the prompt ends either where the assistant's turn begins, or within it."""
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt is not None and self.add_generation_prompt == continues:
            raise ValueError(
                f"add_generation_prompt and continue_final_message are both {continues}; a prompt ends where the "
                "assistant's turn begins or within that turn, so leave add_generation_prompt out"
            )
        options = self.chat_template_kwargs
        if self.reasoning_effort == "none" and options is not None and options.enable_thinking:
            raise ValueError("reasoning_effort is 'none' and enable_thinking true; leave one out")
        return self

    @property
    def may_think(self) -> bool:
        """Whether an answer may begin with a thought."""
        options = self.chat_template_kwargs
        return self.reasoning_effort != "none" and (options is None or options.enable_thinking is not False)


class ChatBody(GenerationBody, Rendering):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=0)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_top_logprobs(self) -> "ChatBody":
        """Raise ``ValueError`` for alternatives without log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs: true; set it, or leave top_logprobs out")
        return self


class TokenizeBody(Rendering):
    """``POST /tokenize``: a text, or a chat as the model would read it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_one(self) -> "TokenizeBody":
        """Raise ``ValueError`` unless there is either a text or a chat."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is None and self.tools:
            raise ValueError("tools are for a chat; give messages, or leave tools out")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens is true for a chat, which has those of its template; leave it out")
        return self


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
