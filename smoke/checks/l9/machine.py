"""A backend without a model: every token and every log-probability is a function of the tokens before it.

Owns: a tokenizer with few merges, what the machine writes, and the calls that it was given. Verdicts ask the same
functions for what a call of its own would answer. Must not know: the candidate's files.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any
from zlib import crc32

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Plain = dict[str, Any]
MERGES = ["a b", "ab c", "Ġ t", "Ġt h", "Ġth e", "r e", "o u", ". Ġ", "© b"]  # Ġ is a space, © the second half of é
END, MARK = "<end>", "<mark>"  # special tokens; only the first ends an answer
WRITTEN = ["a", "b", "c", "n", "o", "u", ".", " ", "ab", "abc", " t", " the", "re", "ou", "é", MARK, END]
FREE = {  # parameters that do not depend on where an answer began
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids", "seed")
}


class Words:
    """A tokenizer, as far as the language uses one of transformers."""

    chat_template = None
    bos_token = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode and decode with ``tokenizer``."""
        self.backend_tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return ids as text."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


@cache
def words() -> Words:
    """Return the machine's tokenizer, made once: byte-level pairs with few merges. "é" takes two tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    names = [*letters, *(left + right for left, right in merges)]
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, MARK])
    return Words(tokenizer)


def text_of(ids: Sequence[int]) -> str:
    """Return ids as text without special tokens."""
    return words().decode(ids, skip_special_tokens=True)


def number(*parts: Any) -> int:
    """Return a number that depends on all parts, in every process the same."""
    return crc32(json.dumps(parts, sort_keys=True).encode())


def logprob(seed: int, ids: Sequence[int], token: int) -> float:
    """Return the log-probability of a token after ``ids``: an eighth or a multiple of it, now and then exactly 0."""
    return -(number(seed, list(ids), token) % 24) / 8


def shaken(seed: int, ids: Sequence[int]) -> float:
    """Return by how much a call's values are off: little, and a power of 2 times a whole number, so sums are exact."""
    return number(seed, list(ids)) % 9 / (1 << 20)


def next_ids(seed: int, ids: Sequence[int], start: int, how: Plain) -> list[int]:
    """Return the next token, or two for a character of two bytes. ``start``: where the answer began."""
    place = None if how.keys() <= FREE else len(ids) - start
    name = WRITTEN[number(seed, list(ids[-3:]), how, place) % len(WRITTEN)]
    return words().encode(name)


def written(seed: int, ids: Sequence[int], count: int, how: Plain) -> list[int]:
    """Return the first ``count`` tokens that the machine writes after ``ids``, the end among them."""
    own: list[int] = []
    (end,) = words().encode(END)
    half, other = words().encode("é")
    while len(own) < count and end not in own:
        last = own[-1] if own else ids[-1]
        own += [other] if last == half else next_ids(seed, [*ids, *own], len(ids), how)
    return own[:count]


def ended(ids: Sequence[int], limit: int, stops: Sequence[str]) -> Plain:
    """Return the answer if the machine writes ``ids``: the tokens up to its end, its text, and why it ended."""
    (end,) = words().encode(END)
    for count, token in enumerate(ids[:limit], start=1):
        own = list(ids[:count])
        if token == end:
            return {"ids": own[:-1], "text": text_of(own), "reason": "stop", "matched": None}
        text = text_of(own)
        found = sorted((text.find(stop), stop) for stop in stops if stop in text)
        if found:
            return {"ids": own, "text": text[: found[0][0]], "reason": "stop", "matched": found[0][1]}
    own = list(ids[:limit])
    return {"ids": own, "text": text_of(own), "reason": "length", "matched": None}


def answered(seed: int, ids: Sequence[int], gen: Mapping[str, Any]) -> Plain:
    """Return what a call of its own answers to ``ids``. ``gen``: its sampling parameters."""
    limit = gen.get("max_new_tokens", 128)
    stops = gen.get("stop", [])
    return ended(written(seed, ids, limit, drawn(gen)), limit, [stops] if isinstance(stops, str) else stops)


def drawn(gen: Mapping[str, Any]) -> Plain:
    """Return how the tokens of a gen are drawn, without where it ends."""
    return {name: value for name, value in gen.items() if name not in ("stop", "max_new_tokens")}


def kept(answer: Plain) -> list[int]:
    """Return the ids that a state keeps of an answer: the most of them whose text is in it, and the rest encoded."""
    fitting = [n for n in range(len(answer["ids"]) + 1) if answer["text"].startswith(text_of(answer["ids"][:n]))]
    known = text_of(answer["ids"][: fitting[-1]])
    return [*answer["ids"][: fitting[-1]], *words().encode(answer["text"][len(known) :])]


class Machine:
    """The backend. ``log`` has every call in the order of submission; the last one waiting is answered first."""

    def __init__(self, seed: int, limit: int = 4000, is_shaken: bool = False) -> None:
        """Begin without calls. ``limit``: the most tokens of a call. ``is_shaken``: values of calls differ a little."""
        self.seed = seed
        self.limit = limit
        self.is_shaken = is_shaken
        self.tokenizer = words()
        self.eos_token_ids = frozenset(words().encode(END))
        self.stats: Counter[str] = Counter()
        self.waiting: list[Any] = []
        self.log: list[Plain] = []
        self.num_advanced, self.turn = 0, -1  # the place of the call that is answered next

    def submit(self, call: Any) -> None:
        """Note a call, and refuse one that is too long."""
        size = len(call.ids) + (0 if call.start is not None else call.params.max_new_tokens)
        self.log.append(
            {
                "ids": list(call.ids),
                "start": call.start,
                "asked": call.params.max_new_tokens,
                "advanced": self.num_advanced,
                "refused": size > self.limit,
            }
        )
        if size > self.limit or not call.ids:
            call.error = ValueError(f"the call has {size} tokens, and {self.limit} is the most")
            return
        self.waiting.append(call)

    def advance(self) -> None:
        """Answer one call."""
        if not self.waiting:
            raise RuntimeError("the program waits, and no call is under way")
        self.num_advanced += 1
        call = self.waiting.pop(self.turn)
        call.output = self.scored(call) if call.start is not None else self.generated(call)
        call.text = call.output.text
        self.stats.update(calls=1, new_tokens=len(call.output.token_ids))

    def abort(self, call: Any) -> None:
        """Give up a call."""
        self.waiting.remove(call)
        call.error = ValueError("the call was given up")

    def scored(self, call: Any) -> Any:
        """Return the log-probabilities from the call's start on."""
        from mini_engine.outputs import RequestOutput
        from mini_engine.sampler.logprobs import TokenLogprob

        table: list[Any] = [None] * call.start
        shift = shaken(self.seed, call.ids) if self.is_shaken and call.start > 1 else 0.0
        for place in range(call.start, len(call.ids)):
            token = call.ids[place]
            table.append([TokenLogprob(token, logprob(self.seed, call.ids[:place], token) + shift, 0)])
        return RequestOutput("", list(call.ids), prompt_logprobs=table, finish_reason="length")

    def generated(self, call: Any) -> Any:
        """Return what the machine writes; the token that ends it is among the ids, as in the engine."""
        from mini_engine.outputs import RequestOutput

        changed = {each.name: getattr(call.params, each.name) for each in fields(call.params)}
        given = {each.name: changed[each.name] for each in fields(call.params) if changed[each.name] != each.default}
        gen = json.loads(json.dumps(given))  # tuples are lists in the verdict
        answer = answered(self.seed, call.ids, gen)
        ids, reason, matched = answer["ids"], answer["reason"], answer["matched"]
        if reason == "stop" and matched is None:
            ids = [*ids, *self.eos_token_ids]
            matched = next(iter(self.eos_token_ids))
        return RequestOutput("", list(call.ids), ids, answer["text"], reason, matched)


def new_state(machine: Machine, **settings: Any) -> Any:
    """Return the candidate's state over a machine."""
    from mini_engine.lang.context import Settings
    from mini_engine.lang.hub import Hub
    from mini_engine.lang.state import State

    return State(Hub(machine), Settings(**settings))


def answer_values(answer: Any) -> Plain:
    """Return a variable: its value, and of what it was written."""
    output = answer.output
    if output is None:
        return {"value": answer.value}
    (end,) = words().encode(END)
    return {
        "value": answer.value,
        "ids": [token for token in output.token_ids if token != end],
        "reason": output.finish_reason,
        "matched": output.matched if isinstance(output.matched, str) else None,
    }
