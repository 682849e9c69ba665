"""Where a program's calls are computed: an engine in this process, or an endpoint that speaks OpenAI's interface."""

import asyncio
from collections import Counter
from dataclasses import dataclass, fields
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from mini_engine.checkpoint import load_eos_ids, load_tokenizer, resolve_folder
from mini_engine.llm import LLM
from mini_engine.outputs import RequestOutput
from mini_engine.prompts import encode_text
from mini_engine.sampler.logprobs import TokenLogprob
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import RequestOptions, RequestState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase
else:
    Tokenizer = Any  # importing transformers takes seconds, and only annotations need it

ALWAYS_SHARE: dict[str, Any] = {"prefix_cache": "radix", "wait_for_prefix": 1, "wait_below_match": 1 << 30}


@dataclass(eq=False)
class Call:
    """One request of a program. ``start``: score the tokens of ``ids`` from there on, and write nothing."""

    ids: list[int]
    params: SamplingParams
    start: int | None = None
    output: RequestOutput | None = None
    error: Exception | None = None
    text: str = ""  # what can be shown so far

    @property
    def is_done(self) -> bool:
        """Whether the answer, or an error, is there."""
        return self.output is not None or self.error is not None

    @property
    def answer(self) -> RequestOutput:
        """The answer. Raises what the call raised."""
        if self.error is not None:
            raise self.error
        assert self.output is not None, "the call has not ended"
        return self.output

    @property
    def scores(self) -> list[float]:
        """The log-probabilities of the tokens from ``start`` on."""
        entries = (self.answer.prompt_logprobs or [])[self.start :]
        return [entry[0].logprob for entry in entries if entry is not None]


class Backend(Protocol):
    """What programs need of an engine. ``stats`` counts calls, prompt, cached and new tokens, and calls saved."""

    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    stats: Counter[str]

    def submit(self, call: Call) -> None:
        """Begin a call. Errors end the call, they are not raised."""

    def advance(self) -> None:
        """Do some work, or wait for some, so that calls end in the end."""

    def abort(self, call: Call) -> None:
        """Give up a call that has not ended."""


class InProcess:
    """The engine of an ``LLM``, which nothing else steps meanwhile."""

    def __init__(self, llm: LLM) -> None:
        """Begin without calls."""
        self.engine = llm.engine
        self.tokenizer = llm.tokenizer
        self.eos_token_ids = llm.engine.driver.eos_token_ids
        self.stats: Counter[str] = Counter()
        self.calls: dict[str, Call] = {}

    def submit(self, call: Call) -> None:
        """Queue a request of the engine."""
        options = RequestOptions(prompt_logprobs_start=call.start or 0, score_only=call.start is not None)
        try:
            self.calls[self.engine.add_request(call.ids, call.params, options=options)] = call
        except ValueError as error:
            call.error = error

    def advance(self) -> None:
        """Step the engine and hand out what ended."""
        assert self.calls, "nothing is under way that could end the wait"
        self.engine.step()
        for name, call in list(self.calls.items()):
            call.text = self.engine.entries[name].output.text
            if self.engine.entries[name].request.state is RequestState.FINISHED:
                finish(call, self.engine.take_output(name), self.stats)
                del self.calls[name]

    def abort(self, call: Call) -> None:
        """End the request of a call."""
        name = next(name for name, own in self.calls.items() if own is call)
        self.engine.abort(name)
        del self.calls[name]
        self.engine.take_output(name)
        call.error = ValueError("the call was given up")


def finish(call: Call, output: RequestOutput, stats: Counter[str]) -> None:
    """Give a call its answer, and count it. Mutates."""
    call.output = output
    call.text = output.text
    stats.update(calls=1, prompt_tokens=len(call.ids), new_tokens=len(output.token_ids))
    stats.update(cached_tokens=output.num_cached_tokens)
    if output.finish_reason == "error":
        call.error = ValueError(output.error)


# Fields of SamplingParams -> fields of a body; those with the same name on both sides are sent as they are.
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
STRUCTURED = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
# What a server may take from the checkpoint where a body leaves it out, as this one, vLLM and SGLang do.
PINNED = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": []}
UNSENT = ("logits_processors", "logprobs_mode", "reasoning", "bad_words", "logprobs", "prompt_logprobs")


class Endpoint:
    """``POST /v1/completions`` of a server that takes token ids, such as this project's, vLLM's or SGLang's.

    An answer's ids come with it where the server knows ``return_token_ids``; another's text is encoded again.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        """Call ``base_url``, for example "http://127.0.0.1:8000/v1".

        ``tokenizer``: the folder or hub id of the served model's checkpoint, ``None`` for the embedded one.
        ``options``: what ``httpx.AsyncClient`` takes, such as ``headers``. Needs the extra ``lang``.
        """
        import httpx

        folder = resolve_folder(tokenizer)
        self.tokenizer = load_tokenizer(folder)
        self.eos_token_ids = load_eos_ids(folder)
        self.stats: Counter[str] = Counter()
        self.model = model
        self.open = dict[Call, Any]()
        self.ended: SimpleQueue[tuple[Call, RequestOutput | Exception]] = SimpleQueue()
        self.client = httpx.AsyncClient(base_url=base_url, timeout=timeout_s, **options)
        self.loop = asyncio.new_event_loop()
        Thread(target=self.loop.run_forever, name="endpoint", daemon=True).start()

    def submit(self, call: Call) -> None:
        """Send a request."""
        self.open[call] = asyncio.run_coroutine_threadsafe(self.post(call), self.loop)

    async def post(self, call: Call) -> None:
        """Send a request and leave its answer, or what went wrong, to ``advance``."""
        try:
            response = await self.client.post("/completions", json=self.body(call))
            if response.is_error:
                raise ValueError(f"the endpoint answered {response.status_code}: {response.text[:500]}")
            self.ended.put((call, self.output(call, response.json())))
        except Exception as error:
            self.ended.put((call, error))

    def body(self, call: Call) -> dict[str, Any]:
        """Return the body of a request: what differs from the defaults, and what a server might choose itself."""
        body: dict[str, Any] = {"prompt": call.ids, "max_tokens": call.params.max_new_tokens, **PINNED}
        body |= {} if self.model is None else {"model": self.model}
        if call.start is not None:
            return {**body, "max_tokens": 0, "echo": True, "logprobs": 0, "prompt_logprobs_start": call.start}
        for each in fields(call.params):
            value = getattr(call.params, each.name)
            name = each.name
            if value == each.default:
                continue
            if name in UNSENT:
                raise ValueError(f"{name} is {value!r}; it is for an engine in this process, not for an endpoint")
            if name in STRUCTURED:
                body["structured_outputs"] = {STRUCTURED[name]: value}
            else:
                body[RENAMED.get(name, name)] = list(value) if isinstance(value, tuple) else value
        return {**body, "return_token_ids": True}

    def output(self, call: Call, answer: dict[str, Any]) -> RequestOutput:
        """Return an answer in the engine's form."""
        choice = answer["choices"][0]
        if call.start is not None:
            values = zip(call.ids, choice["logprobs"]["token_logprobs"], strict=True)
            scored = [None if value is None else [TokenLogprob(token, value, 0)] for token, value in values]
            return RequestOutput(answer["id"], call.ids, prompt_logprobs=scored, finish_reason="length")
        ids = choice.get("token_ids")
        text = choice["text"]
        if ids is None:
            ids = encode_text(self.tokenizer, text)
        output = RequestOutput(answer["id"], call.ids, ids, text, choice["finish_reason"], choice.get("stop_reason"))
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        output.num_cached_tokens = details.get("cached_tokens") or 0
        return output

    def advance(self) -> None:
        """Wait for the next answer."""
        assert self.open, "nothing is under way that could end the wait"
        call, outcome = self.ended.get()
        if self.open.pop(call, None) is None:
            return  # it was given up meanwhile
        if isinstance(outcome, RequestOutput):
            finish(call, outcome, self.stats)
        else:
            call.error = outcome

    def abort(self, call: Call) -> None:
        """Close the connection of a call."""
        self.open.pop(call).cancel()
        call.error = ValueError("the call was given up")
