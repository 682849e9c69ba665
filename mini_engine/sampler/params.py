"""L4: what one request asks of the sampler (``SamplingParams``): frozen, validated, every default off.

Imports no torch.

Three engines write "off" in three ways (SGLang ``top_k=-1`` and ``1 << 30`` inside, vLLM ``top_k=0``). Here every alias
becomes one form when the object is built, so no later code has to check for the others.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from mini_engine.checks import plain_number
from mini_engine.other_names import knows_other_names

TOP_K_ALL = 1 << 30  # SGLang's "every token"
GREEDY_BELOW = 1e-6  # temperatures below it mean greedy: no smaller divisor is useful
MAX_TEMPERATURE = 1e6  # there all tokens are equally likely; near 1e39 float32 would turn a banned one into NaN
MAX_STOP_STRINGS = 32
MAX_BIAS = 100  # OpenAI's range
MOST_DIGITS = 10  # of a token id
PLAIN = (int, float, type(None))  # numbers that are kept as they are
LogprobsMode = Literal["raw", "processed"]
GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
GrammarKey = tuple[GrammarKind, str]  # a grammar and its text, by which compiled ones are found again

PRESETS: dict[str, dict[str, Any]] = {
    "code": {"temperature": 0.0},
    "technical": {"temperature": 0.3, "top_p": 0.9},
    "creative": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "chat": {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    "brainstorm": {"temperature": 1.2, "top_p": 0.95},
}


@knows_other_names
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. ``SamplingParams()`` is greedy with nothing on.

    ``temperature``: 0 is greedy; otherwise the logits are divided by it. ``top_k``: keep the k likeliest, 0 is off.
    ``top_p``: keep the smallest set whose mass reaches p, 1 is off. ``min_p``: drop what is less likely than
    ``min_p`` times the likeliest, 0 is off.
    ``repetition_penalty``: positive logits of seen tokens (prompt and output) are divided by it, negative ones
    multiplied; 1 is off. ``frequency_penalty``: subtracted once per occurrence in the output. ``presence_penalty``:
    subtracted once from every token of the output.
    ``min_new_tokens``: no stop token before. ``max_new_tokens``: end after. ``ignore_eos``: the model's own
    end-of-sequence ids do not end it, ``stop_token_ids`` still do. ``stop``: strings that end it.
    ``logit_bias``: id -> number added to its logit. ``allowed_token_ids``: nothing else may come. ``bad_words``: id
    sequences that must not be completed in the output. ``logits_processors``: registered name -> its arguments.
    ``seed``: makes the tokens a function of the logits alone. ``n``: answers to return, out of ``best_of`` generated.
    ``logprobs``: report the chosen token's log-probability and that many alternatives (0: none of them, -1: the whole
    vocabulary), ``logprobs_mode`` before ("raw") or after ("processed") everything above; ``prompt_logprobs`` likewise
    for the prompt, always raw.
    ``json_schema`` (a mapping, its text, or a pydantic model), ``regex``, ``ebnf`` or ``structural_tag``: what the
    answer must be as a whole (L7). ``reasoning``: what is not part of a thought before it.
    ``receipt``: the answer says what it depended on, so that ``mini-engine replay`` can compute it again.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_new_tokens: int = 0
    max_new_tokens: int = 128
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    logits_processors: Mapping[str, Mapping[str, Any]] | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    json_schema: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    reasoning: bool = False
    receipt: bool = False

    def __post_init__(self) -> None:
        """Bring every alias to its one form, then check. Raises ``ValueError`` naming value, range and remedy."""
        for name, value in plain_numbers(self).items():
            object.__setattr__(self, name, value)
        check_numbers(self)
        check_counts(self)
        check_collections(self)
        grammars = {kind: grammar_text(kind, getattr(self, kind)) for kind in get_args(GrammarKind)}
        for name, value in (normal_forms(self) | grammars).items():
            object.__setattr__(self, name, value)
        check_combinations(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken and nothing is drawn."""
        return self.temperature == 0.0

    @property
    def num_samples(self) -> int:
        """How many sequences are generated, of which ``n`` are returned."""
        return self.best_of or self.n

    @property
    def grammar(self) -> GrammarKey | None:
        """The grammar that the answer must match, ``None`` if it is free."""
        return next(((kind, text) for kind in get_args(GrammarKind) if (text := getattr(self, kind)) is not None), None)

    @property
    def for_ids(self) -> Self:
        """The same without what a driver alone cannot give: it sees token ids only."""
        return replace(
            self, stop=(), json_schema=None, regex=None, ebnf=None, structural_tag=None, reasoning=False, receipt=False
        )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a named starting point, with ``changes`` on top. Raises ``ValueError`` for an unknown name."""
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``ValueError`` if any token id that the parameters name lies outside ``0 … vocab_size - 1``."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias or ()),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": tuple(token for word in self.bad_words for token in word),
        }
        for name, ids in named.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} names token id {token}; the vocabulary has the ids 0 to {vocab_size - 1}")


def off_value(name: str) -> Any:
    """Return the default of a parameter: the value at which the option is disabled."""
    return next(field.default for field in fields(SamplingParams) if field.name == name)


# name -> (whether a number is in range, the range in words, the remedy)
RANGES: dict[str, tuple[Callable[[float], bool], str, str]] = {
    "temperature": (
        lambda x: 0 <= x <= MAX_TEMPERATURE,
        f"from 0 to {MAX_TEMPERATURE:g}",
        "0 is greedy, 1 leaves the model's distribution as it is",
    ),
    "top_p": (
        lambda x: 0 < x <= 1,
        "above 0 and at most 1",
        "1.0 switches it off; for the top token use temperature=0",
    ),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1", "0.0 switches it off"),
    "repetition_penalty": (lambda x: 0 < x <= 2, "above 0 and at most 2", "1.0 switches it off"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "from -2 to 2", "0.0 switches it off"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "from -2 to 2", "0.0 switches it off"),
}

# name -> (least value, whether None is allowed, the remedy)
COUNTS: dict[str, tuple[int, bool, str]] = {
    "top_k": (-1, False, "0 or -1 switches it off"),
    "min_new_tokens": (0, False, "0 switches it off"),
    "max_new_tokens": (1, False, "ask for at least one token"),
    "n": (1, False, "1 returns one answer"),
    "best_of": (1, True, "None generates as many as n returns"),
    "logprobs": (-1, True, "None switches it off, 0 reports the chosen token only, -1 the whole vocabulary"),
    "prompt_logprobs": (-1, True, "None switches it off, 0 reports the prompt's own tokens only"),
    "seed": (-(2**63), True, "None draws from the engine's own generator"),
}


def plain_numbers(params: SamplingParams) -> dict[str, Any]:
    """Return the numbers that are of another library, such as NumPy's, and the biases, as Python's own."""
    numbers = (*RANGES, *COUNTS)
    plain = {name: plain_number(value) for name in numbers if type(value := getattr(params, name)) not in PLAIN}
    if isinstance(params.logit_bias, Mapping):
        plain["logit_bias"] = {plain_number(key): plain_number(value) for key, value in params.logit_bias.items()}
    return plain


def check_numbers(params: SamplingParams) -> None:
    """Raise ``ValueError`` for a real-valued parameter that is not finite or is out of range."""
    for name, (in_range, limits, remedy) in RANGES.items():
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise ValueError(f"{name} is {value!r}; it must be a finite number {limits} ({remedy})")
        if not in_range(value):
            raise ValueError(f"{name} is {value}; it must be {limits} ({remedy})")


def check_counts(params: SamplingParams) -> None:
    """Raise ``ValueError`` for a whole number that is not an ``int`` or is too small, and for a wrong flag."""
    for name, (least, optional, remedy) in COUNTS.items():
        value = getattr(params, name)
        if optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least} ({remedy})")
    if params.seed is not None and params.seed >= 2**63:
        raise ValueError(f"seed is {params.seed}; it must be below 2**63 = {2**63}, as a signed 64-bit number")
    for name in ("ignore_eos", "reasoning", "receipt"):
        if not isinstance(getattr(params, name), bool):
            raise ValueError(f"{name} is {getattr(params, name)!r}; it is True or False")
    if params.logprobs_mode not in get_args(LogprobsMode):
        raise ValueError(
            f"logprobs_mode is {params.logprobs_mode!r}; choose one of {', '.join(get_args(LogprobsMode))}"
        )


def check_collections(params: SamplingParams) -> None:
    """Raise ``ValueError`` for a list or mapping of another type: 0 is not an empty list, a generator is read once.

    ``None`` is the same as an empty one, so that a JSON null is legal.
    """
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        value = getattr(params, name)
        if not (value is None or is_list(value) or (name == "stop" and isinstance(value, str))):
            raise ValueError(f"{name} is {value!r}; it must be a list")
    for name in ("logit_bias", "logits_processors"):
        value = getattr(params, name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}; it must be a mapping")
    if any(not isinstance(text, str) for text in params.stop or ()):
        raise ValueError(f"stop is {params.stop!r}; it must be a string or a list of strings")
    for word in params.bad_words or ():
        if not is_list(word):
            raise ValueError(f"bad_words holds {word!r}; every word is a list of token ids")
    for name, given in (params.logits_processors or {}).items():
        if not isinstance(given, Mapping):
            raise ValueError(f"logits_processors gives {name} the arguments {given!r}; they must be a mapping")


def is_list(value: object) -> bool:
    """Whether ``value`` holds items that can be read more than once; a string is not a list here."""
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)


def normal_forms(params: SamplingParams) -> dict[str, Any]:
    """Return the one form of every parameter that can be written in several ways.

    A temperature is a float, and 0.0 below ``GREEDY_BELOW``. A ``top_k`` of -1, or from ``TOP_K_ALL`` on, is 0. One
    stop string alone is a tuple of one; stop strings and ids come once each, in their order; allowed ids are sorted.
    A bias has whole numbers as keys and floats as values; an empty one, and an empty choice of processors, is
    ``None``. Bad words are tuples of ids.

    Raises ``ValueError`` for what is not a token id, two bias keys that are one id, and a bias beyond ``MAX_BIAS``.
    Minus infinity is a ban, and the message names ``bad_words``, the parameter for that.
    """
    return {
        "temperature": 0.0 if params.temperature < GREEDY_BELOW else float(params.temperature),
        "top_k": 0 if params.top_k == -1 or params.top_k >= TOP_K_ALL else params.top_k,
        "stop": (params.stop,) if isinstance(params.stop, str) else tuple(dict.fromkeys(params.stop or ())),
        "stop_token_ids": token_ids("stop_token_ids", params.stop_token_ids or ()),
        "logit_bias": bias_form(params.logit_bias),
        "allowed_token_ids": None
        if params.allowed_token_ids is None
        else tuple(sorted(token_ids("allowed_token_ids", params.allowed_token_ids))),
        "bad_words": tuple(tuple(token_ids("bad_words", word, unique=False)) for word in params.bad_words or ()),
        "logits_processors": {name: dict(given) for name, given in (params.logits_processors or {}).items()} or None,
    }


def grammar_text(kind: str, value: object) -> str | None:
    """Return a grammar as text: a mapping, or the schema of a pydantic model, as JSON in its own order of keys.

    Raises ``ValueError`` for anything else that is not a text.
    """
    if kind == "json_schema" and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if kind in ("json_schema", "structural_tag") and isinstance(value, Mapping):
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{kind} is {value!r}, which is not JSON ({error})") from error
    if value is not None and not isinstance(value, str):
        forms = {"json_schema": "a mapping, JSON text or a pydantic model", "structural_tag": "a mapping or JSON text"}
        raise ValueError(f"{kind} is {value!r}; it must be {forms.get(kind, 'text')}")
    return value


def token_ids(name: str, ids: Sequence[int], unique: bool = True) -> tuple[int, ...]:
    """Return the ids as a tuple, each once if ``unique``. Raises ``ValueError`` for anything that is not an id."""
    ids = [token if type(token) is int else plain_number(token) for token in ids]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{name} holds {token!r}; token ids are whole numbers of at least 0")
    return tuple(dict.fromkeys(ids)) if unique else tuple(ids)


def bias_form(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    """Return the bias with whole-number keys (JSON makes them strings), ``None`` if it is empty."""
    form: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not str(key).isdecimal() or len(str(key)) > MOST_DIGITS:
            raise ValueError(f"logit_bias has the key {key!r:.60}; keys are token ids")
        if int(key) in form:
            raise ValueError(f"logit_bias names token id {int(key)} twice")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_BIAS:
            raise ValueError(
                f"logit_bias of token {key} is {value!r}; it must be a number from -{MAX_BIAS} to {MAX_BIAS} "
                "(to ban a token use bad_words)"
            )
        form[int(key)] = float(value)
    return form or None


def check_combinations(params: SamplingParams) -> None:
    """Raise ``ValueError`` for parameters that contradict each other, after normalisation.

    ``min_new_tokens`` above ``max_new_tokens``; ``best_of`` below ``n``; several samples without a temperature; an
    empty list of allowed ids; an empty bad word; an empty stop string, or more than ``MAX_STOP_STRINGS`` of them; more
    than one grammar, or ``reasoning`` without any; ``min_new_tokens``, ``ignore_eos`` and a grammar, all three at once.
    """
    if params.min_new_tokens > params.max_new_tokens:
        raise ValueError(
            f"min_new_tokens is {params.min_new_tokens} and max_new_tokens {params.max_new_tokens}; "
            "the least cannot be more than the most"
        )
    if params.best_of is not None and params.best_of < params.n:
        raise ValueError(f"best_of is {params.best_of} and n is {params.n}; generate at least as many as are returned")
    if params.num_samples > 1 and params.is_greedy:
        raise ValueError(
            f"{params.num_samples} samples at temperature 0 would be the same one; set a temperature or n=1"
        )
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError("allowed_token_ids is empty, so no token could ever come; use None to allow all")
    if any(not word for word in params.bad_words):
        raise ValueError("bad_words holds an empty sequence; every word needs at least one token id")
    if not all(params.stop):
        raise ValueError(f"stop is {params.stop!r}; every stop string needs at least one character")
    grammars = [kind for kind in get_args(GrammarKind) if getattr(params, kind) is not None]
    if len(grammars) > 1:
        raise ValueError(f"{' and '.join(grammars)} are given; an answer has one grammar, so leave one")
    if grammars and params.ignore_eos and params.min_new_tokens:
        raise ValueError(
            f"min_new_tokens is {params.min_new_tokens} and ignore_eos is True next to a {grammars[0]}: its text ends "
            "with an end-of-sequence id, which min_new_tokens bans only while it counts as an end; leave ignore_eos out"
        )
    if params.reasoning and not grammars:
        raise ValueError("reasoning is True without a grammar, which alone it changes; leave it out")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop has {len(params.stop)} strings; at most {MAX_STOP_STRINGS} are looked for")
