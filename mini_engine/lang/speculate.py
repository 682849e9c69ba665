"""Cutting an answer to what a program asked for, and answers cut from text that an earlier call wrote ahead.

    first call    | gen "name" |  constant  |  gen "job" | rest |     one call without its stop string
    the program   | kept       |  compared  |  cut       | left for what comes next

What was written ahead is used only as far as a call of its own would write it: the constants have the same ids, and the
next gen samples in the same way. Otherwise that gen is a call of its own. So an answer is never another one.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from mini_engine.detokenizer import Detokenizer
from mini_engine.lang.backends import Call, Tokenizer
from mini_engine.lang.context import Ahead, Answer, Context
from mini_engine.lang.expressions import Gen
from mini_engine.lang.hub import Condition, Work
from mini_engine.outputs import RequestOutput
from mini_engine.prompts import encode_text
from mini_engine.sampler.params import SamplingParams
from mini_engine.texts import AfterText, special_stops

CONVERT: dict[type, Any] = {str: str, int: int, float: float, bool: lambda text: text == "True"}


def sampling_of(params: SamplingParams) -> SamplingParams | None:
    """Return how the tokens are drawn, without where the answer ends.

    ``None`` if the next token depends on where the answer began or on more than tokens, so that nothing can be cut.
    """
    plain = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        seed=params.seed,
        stop=params.stop,
        max_new_tokens=params.max_new_tokens,
    )
    return replace(plain, stop=(), max_new_tokens=1) if params == plain else None


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return what ``ids`` add to a text, without special tokens."""
    return AfterText(tokenizer.backend_tokenizer).decode(ids)


def kept_ids(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Return ids of ``text``, which is the beginning of what ``ids`` say.

    As many of ``ids`` as fit are kept. Where a stop string began inside a token, the rest is encoded.
    """
    count = len(ids)
    while not text.startswith(known := text_of(tokenizer, ids[:count])):
        count -= 1
    return [*ids[:count], *encode_text(tokenizer, text[len(known) :])]


def cut(tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams, is_end: bool) -> RequestOutput | None:
    """Return the answer that a call with ``params`` gives if the model writes ``ids``, ``None`` if it needs more.

    ``is_end``: the model ends after them. The answer's ids are a new list.
    """
    text = Detokenizer(tokenizer.backend_tokenizer, params.stop)
    shown = ""
    for count, token in enumerate(ids[: params.max_new_tokens], start=1):
        shown += text.add(token)
        if text.matched is not None:
            return RequestOutput("", [], list(ids[:count]), shown, "stop", text.matched)
    if len(ids) < params.max_new_tokens and not is_end:
        return None
    shown += text.flush()
    is_stopped = text.matched is not None or len(ids) < params.max_new_tokens
    taken = list(ids[: params.max_new_tokens])
    return RequestOutput("", [], taken, shown, "stop" if is_stopped else "length", text.matched)


def generate(context: Context, gen: Gen) -> Work:
    """Let the model write and append it. Mutates ``context``. Raises ``ValueError`` for a grammar that was cut."""
    params = SamplingParams(**{**context.settings.defaults, **gen.sampling})
    output = yield from (plain_call if context.settings.num_api_spec_tokens is None else cut_call)(context, params)
    if params.grammar is not None and output.finish_reason == "length":
        raise ValueError(
            f"the answer {output.text!r} was cut after {params.max_new_tokens} tokens, before its {params.grammar[0]} "
            "was complete; raise max_new_tokens"
        )
    context.extend(output.text, kept_ids(context.tokenizer, without_end(context, output, params), output.text))
    context.set(gen.name, Answer(CONVERT[gen.kind](output.text), output))


def plain_call(context: Context, params: SamplingParams) -> Generator[Condition, None, RequestOutput]:
    """Return the answer of a call of its own. Mutates ``context``."""
    call = Call(context.prompt(), params)
    yield from context.ask(call)
    return call.answer


def cut_call(context: Context, params: SamplingParams) -> Generator[Condition, None, RequestOutput]:
    """Return an answer cut from what was written ahead; where that is too short, write ahead. Mutates ``context``."""
    sampling = sampling_of(params)
    ahead = context.ahead
    least = context.settings.num_api_spec_tokens
    assert least is not None, "a run without speculation makes plain calls"
    if sampling is None:
        return (yield from plain_call(context, params))
    ids, is_end = (ahead.ids, ahead.is_end) if ahead and ahead.sampling == sampling else ([], False)
    output = cut(context.tokenizer, ids, params, is_end)
    if output is None:
        wanted = max(params.max_new_tokens, least) - len(ids)
        longer = replace(sampling, max_new_tokens=wanted)
        call = Call([*context.prompt(), *ids], longer)
        yield from context.ask(call)
        if call.error is not None:  # so many tokens more may be too many
            return (yield from plain_call(context, params))
        ids = [*ids, *without_end(context, call.answer, longer)]
        is_end = call.answer.finish_reason == "stop"
        output = cut(context.tokenizer, ids, params, is_end)
        assert output is not None, "a call is long enough for what is asked"
    else:
        context.hub.backend.stats["saved_calls"] += 1
    context.ahead = Ahead(ids, sampling, is_end)  # ``extend`` takes off what is kept of it
    return output


def without_end(context: Context, output: RequestOutput, params: SamplingParams) -> list[int]:
    """Return an answer's ids without the token that ended it, which has no text."""
    named = special_stops(context.tokenizer.backend_tokenizer, params.stop)
    ends = {*context.hub.backend.eos_token_ids, *params.stop_token_ids, *named}
    is_ended = output.finish_reason == "stop" and output.token_ids and output.token_ids[-1] in ends
    return output.token_ids[:-1] if is_ended else list(output.token_ids)
