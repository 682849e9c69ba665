"""The checks of L4.A: one form per parameter, and errors that say what to do.

Owns: probes that build ``SamplingParams`` and what becomes of every way to write a value. Needs no other lesson.
"""

import math
import random
import re
from typing import Any

from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
WARM: dict[str, Any] = {"temperature": 0.7}
ALL = 1 << 30
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "max_new_tokens": 128,
    "ignore_eos": False,
    "stop": [],
    "stop_token_ids": [],
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "logits_processors": None,
    "seed": None,
    "n": 1,
    "best_of": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprobs_mode": "raw",
}


def plain(value: Any) -> Any:
    """Turn a parameter into lists and strings: what it is made of stays visible."""
    if isinstance(value, dict):
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else f"{type(value).__name__} {value!r}"


def build(arguments: dict[str, Any]) -> Any:
    """Return the parameters, or the words of the error."""
    from mini_engine.sampler.params import SamplingParams

    try:
        return SamplingParams(**arguments)
    except ValueError as error:
        return f"ValueError: {error}"


def defaults_probe(seed: int) -> Values:
    """Read every default, and build the presets and every parameter at its off value."""
    from mini_engine.sampler.params import PRESETS, SamplingParams

    params = SamplingParams()
    written = SamplingParams(**{name: value for name, value in DEFAULTS.items() if value is not None})
    return {
        "defaults": {name: plain(getattr(params, name)) for name in DEFAULTS},
        "all written out is the same": written == params,
        "greedy": params.is_greedy,
        "presets that can be built": [name for name in PRESETS if SamplingParams.preset(name) is not None],
        "a preset with a change": plain(SamplingParams.preset("chat", top_k=-1, seed=3).top_k),
    }


def defaults_spec(seed: int) -> Values:
    """Say what is off."""
    return {
        "defaults": DEFAULTS,
        "all written out is the same": True,
        "greedy": True,
        "presets that can be built": ["code", "technical", "creative", "chat", "brainstorm"],
        "a preset with a change": 0,
    }


REGISTRY.add(
    "L4.A.defaults",
    "SamplingParams() is greedy with every option off, and each off value can be written out.",
    defaults_probe,
    bitwise(defaults_spec),
)

# arguments, the parameter to read, its form (an id or number sequence as a list, a dictionary as a list of pairs).
FORMS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "temperature 0": ({"temperature": 0}, "temperature", 0.0),
    "temperature 1e-7": ({"temperature": 1e-7}, "temperature", 0.0),
    "temperature 9.9e-7": ({"temperature": 9.9e-7}, "temperature", 0.0),
    "temperature 1e-6": ({"temperature": 1e-6}, "temperature", 1e-6),
    "temperature 1": ({"temperature": 1}, "temperature", 1.0),
    "temperature 35.5": ({"temperature": 35.5}, "temperature", 35.5),
    "top_k -1": ({"top_k": -1}, "top_k", 0),
    "top_k 1 << 30": ({"top_k": ALL}, "top_k", 0),
    "top_k above 1 << 30": ({"top_k": ALL + 7}, "top_k", 0),
    "top_k just below 1 << 30": ({"top_k": ALL - 1}, "top_k", ALL - 1),
    "top_k 1": ({"top_k": 1}, "top_k", 1),
    "one stop string": ({"stop": "end"}, "stop", ["end"]),
    "stop strings, one twice": ({"stop": ["b", "a", "b"]}, "stop", ["b", "a"]),
    "no stop string, as None": ({"stop": None}, "stop", []),
    "33 times one stop string": ({"stop": ["a"] * 33}, "stop", ["a"]),
    "stop ids, one twice": ({"stop_token_ids": [5, 3, 5]}, "stop_token_ids", [5, 3]),
    "no stop ids, as None": ({"stop_token_ids": None}, "stop_token_ids", []),
    "bias with keys from JSON": ({"logit_bias": {"7": 2, 9: -1.5}}, "logit_bias", [[7, 2.0], [9, -1.5]]),
    "bias at both limits": ({"logit_bias": {0: -100, 1: 100.0}}, "logit_bias", [[0, -100.0], [1, 100.0]]),
    "empty bias": ({"logit_bias": {}}, "logit_bias", None),
    "allowed ids": ({"allowed_token_ids": [9, 2, 9, 4]}, "allowed_token_ids", [2, 4, 9]),
    "bad words": ({"bad_words": [[3, 3], [1]]}, "bad_words", [[3, 3], [1]]),
    "no bad words, as None": ({"bad_words": None}, "bad_words", []),
    "no processors": ({"logits_processors": {}}, "logits_processors", None),
    "processors": ({"logits_processors": {"x": {"a": 1}}}, "logits_processors", [["x", [["a", 1]]]]),
    "top_p 1 as a whole number": ({"top_p": 1}, "is_greedy", True),
    "temperature 1e-7 is greedy": ({"temperature": 1e-7}, "is_greedy", True),
    "temperature 1e-6 is not": ({"temperature": 1e-6}, "is_greedy", False),
}


def all_forms(seed: int) -> dict[str, tuple[dict[str, Any], str, Any]]:
    """Return the table, and ids, words and biases that are drawn."""
    rng = random.Random(f"forms {seed}")
    ids = [rng.randrange(1000) for _ in range(9)]
    twice = [*ids, rng.choice(ids)]
    words = [rng.sample(range(1000), rng.randint(1, 4)) for _ in range(3)]
    bias = {token: rng.randint(-100, 100) for token in dict.fromkeys(ids)}
    drawn: dict[str, tuple[dict[str, Any], str, Any]] = {
        "drawn stop ids": ({"stop_token_ids": twice}, "stop_token_ids", list(dict.fromkeys(ids))),
        "drawn allowed ids": ({"allowed_token_ids": twice}, "allowed_token_ids", sorted(set(ids))),
        "drawn bad words": ({"bad_words": words}, "bad_words", words),
        "drawn bias": ({"logit_bias": bias}, "logit_bias", [[token, float(x)] for token, x in bias.items()]),
    }
    return FORMS | drawn


def forms_probe(seed: int) -> Values:
    """Build every way to write a value; build the result anew; change the caller's objects afterwards."""
    from dataclasses import replace

    values: Values = {}
    for name, (arguments, field, _) in all_forms(seed).items():
        params = build(dict(arguments))
        values[name] = params if isinstance(params, str) else plain(getattr(params, field))
        values[f"{name}, built anew"] = isinstance(params, str) or replace(params) == params
    ids = [4, 5]
    word = [1, 2]
    given = {"x": {"a": 1}}
    params = build({"stop_token_ids": ids, "bad_words": [word], "logits_processors": given})
    ids.append(6)
    word.append(3)
    given["x"]["a"] = 2
    values["after the caller changed its lists"] = [
        plain(params.stop_token_ids),
        plain(params.bad_words),
        plain(params.logits_processors),
    ]
    return values


def forms_spec(seed: int) -> Values:
    """Read the table."""
    forms = all_forms(seed)
    values: Values = {name: form for name, (_, _, form) in forms.items()}
    values |= {f"{name}, built anew": True for name in forms}
    values["after the caller changed its lists"] = [[4, 5], [[1, 2]], [["x", [["a", 1]]]]]
    return values


REGISTRY.add(
    "L4.A.forms",
    "Every way to write a value becomes one form, which building anew does not change.",
    forms_probe,
    bitwise(forms_spec),
)

# The parameter, the value, the numbers that the message must name: the range, and the value that switches it off.
RANGES: tuple[tuple[str, Any, tuple[float, ...]], ...] = (
    ("temperature", -0.1, (0,)),
    ("temperature", -1e-9, (0,)),
    ("temperature", 2e6, (0, 1e6)),
    ("top_p", 0, (0, 1)),
    ("top_p", 0.0, (0, 1)),
    ("top_p", -0.5, (0, 1)),
    ("top_p", 1.0001, (0, 1)),
    ("min_p", -0.01, (0, 1)),
    ("min_p", 1.5, (0, 1)),
    ("repetition_penalty", 0.0, (0, 2, 1)),
    ("repetition_penalty", -1.0, (0, 2, 1)),
    ("repetition_penalty", 2.5, (0, 2, 1)),
    ("frequency_penalty", 2.01, (-2, 2, 0)),
    ("frequency_penalty", -2.01, (-2, 2, 0)),
    ("presence_penalty", 3, (-2, 2, 0)),
    ("presence_penalty", -3, (-2, 2, 0)),
)
REAL = {
    "temperature": (0,),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 2, 1),
    "frequency_penalty": (-2, 2, 0),
    "presence_penalty": (-2, 2, 0),
}
NO_NUMBERS: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "True": True,
    "0.5": "0.5",
    "None": None,
}
FITTING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_p": 1e-9},
    {"temperature": 1e6, "min_p": 1.0},
    {"repetition_penalty": 2.0, "frequency_penalty": -2.0, "presence_penalty": 2},
    {"repetition_penalty": 1e-3, "frequency_penalty": 2, "presence_penalty": -2.0},
)


def ranges_probe(seed: int) -> Values:
    """Build with values out of range, with what is no number, and with the last values that fit."""
    values: Values = {}
    for name, value, _ in RANGES:
        values[f"{name}={value}"] = str(build({name: value}))
    for name in REAL:
        for words, value in NO_NUMBERS.items():
            values[f"{name}={words}, no finite number"] = str(build({name: value}))
    for arguments in FITTING:
        params = build(arguments)
        values[f"{arguments} fits"] = params if isinstance(params, str) else "accepted"
    return values


def message_failures(case: str, words: Any, names: tuple[str, ...], numbers: tuple[float, ...]) -> list[Failure]:
    """Ask a message for words and numbers."""
    text = str(words)
    if not text.startswith("ValueError: "):
        return [Failure(case, "", "a ValueError", text[:100])]
    found = {float(number) for number in NUMBER.findall(text)}
    missing = [name for name in names if name.lower() not in text.lower()]
    missing += [f"{number:g}" for number in numbers if float(number) not in found]
    return [Failure(case, "", f"a message that names {' and '.join(missing)}", text)] if missing else []


def ranges_verdict(seed: int, got: Values) -> list[Failure]:
    """Every message names the parameter, the value, both ends of the range and the value that means "off"."""
    failures = []
    for name, value, numbers in RANGES:
        case = f"{name}={value}"
        failures += message_failures(case, got[case], (name,), (value, *numbers))
    for name, numbers in REAL.items():
        for words in NO_NUMBERS:
            case = f"{name}={words}, no finite number"
            failures += message_failures(case, got[case], (name, words), numbers)
    cases = [f"{arguments} fits" for arguments in FITTING]
    failures += [Failure(case, "", "accepted", str(got[case])) for case in cases if got[case] != "accepted"]
    return failures


REGISTRY.add(
    "L4.A.ranges",
    "A number out of range, NaN, infinity, a flag or a string is an error naming the value, the range and the way out.",
    ranges_probe,
    ranges_verdict,
)

# arguments, words and numbers of the message.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[float, ...]]] = {
    "5 at least, 3 at most": ({"min_new_tokens": 5, "max_new_tokens": 3}, ("min_new_tokens", "max_new_tokens"), (5, 3)),
    "129 at least, by default 128 at most": ({"min_new_tokens": 129}, ("min_new_tokens", "max_new_tokens"), (129, 128)),
    "2 made, 3 returned": ({**WARM, "best_of": 2, "n": 3}, ("best_of", "n"), (2, 3)),
    "two greedy answers": ({"n": 2}, ("temperature", "n"), (2,)),
    "three answers at 1e-7": ({"n": 3, "temperature": 1e-7}, ("temperature", "n"), (3,)),
    "best of two greedy ones": ({"best_of": 2}, ("temperature",), (2,)),
    "no id allowed": ({"allowed_token_ids": []}, ("allowed_token_ids", "None"), ()),
    "an empty bad word": ({"bad_words": [[1], []]}, ("bad_words",), ()),
    "an empty stop string": ({"stop": ["a", ""]}, ("stop",), ()),
    "an empty stop string alone": ({"stop": ""}, ("stop",), ()),
    "a stop string that is a number": ({"stop": ["a", 5]}, ("stop", "5"), ()),
    "33 stop strings": ({"stop": [f"s{i}" for i in range(33)]}, ("stop",), (33, 32)),
    "a negative stop id": ({"stop_token_ids": [4, -1]}, ("stop_token_ids",), (-1, 0)),
    "True as an allowed id": ({"allowed_token_ids": [True]}, ("allowed_token_ids", "True"), (0,)),
    "half an id in a bad word": ({"bad_words": [[1, 0.5]]}, ("bad_words",), (0.5, 0)),
    "a bias of 101": ({"logit_bias": {4: 101}}, ("logit_bias", "bad_words"), (101, 100)),
    "a bias of minus infinity": ({"logit_bias": {4: -math.inf}}, ("logit_bias", "inf", "bad_words"), (100,)),
    "a bias of NaN": ({"logit_bias": {4: math.nan}}, ("logit_bias", "nan"), (100,)),
    "a bias of True": ({"logit_bias": {4: True}}, ("logit_bias", "True"), ()),
    "a bias key that is no id": ({"logit_bias": {"cat": 1.0}}, ("logit_bias", "cat"), ()),
    "a negative bias key": ({"logit_bias": {-3: 1.0}}, ("logit_bias",), (-3,)),
    "one bias key twice": ({"logit_bias": {7: 1.0, "7": 2.0}}, ("logit_bias",), (7,)),
    "one bias key twice, in two ways": ({"logit_bias": {7: 1.0, "07": 2.0}}, ("logit_bias",), (7,)),
    "half a bias key": ({"logit_bias": {7.5: 1.0}}, ("logit_bias", "7.5"), ()),
    **{f"the bias key {key!r}": ({"logit_bias": {key: 1.0}}, ("logit_bias", key), ()) for key in (" 7", "+7", "1_0")},
    "a bias that is a string": ({"logit_bias": {4: "5"}}, ("logit_bias", "5"), (100,)),
    "True as a bias key": ({"logit_bias": {True: 1.0}}, ("logit_bias", "True"), ()),
    "an empty grammar and another": ({"regex": "", "ebnf": "root ::= 'a'"}, ("regex", "ebnf"), ()),
    "two grammars": ({"regex": "a+", "ebnf": "root ::= 'a'"}, ("regex", "ebnf"), ()),
    "a schema and a structural tag": ({"json_schema": {}, "structural_tag": {}}, ("json_schema", "structural_tag"), ()),
    "reasoning without a grammar": ({"reasoning": True}, ("reasoning",), ()),
    "a least length, ignored end ids and a grammar": (
        {"min_new_tokens": 4, "ignore_eos": True, "regex": "a+"},
        ("min_new_tokens", "ignore_eos"),
        (4,),
    ),
}
AGREEMENTS: dict[str, dict[str, Any]] = {
    "3 at least, 3 at most": {"min_new_tokens": 3, "max_new_tokens": 3},
    "3 made, 3 returned": {**WARM, "best_of": 3, "n": 3},
    "5 made, 2 returned": {**WARM, "best_of": 5, "n": 2},
    "three sampled answers": {**WARM, "n": 3},
    "one greedy answer out of one": {"n": 1, "best_of": 1},
    "32 stop strings": {"stop": [f"s{i}" for i in range(32)]},
    "one allowed id": {"allowed_token_ids": [0]},
    "one grammar with reasoning": {"regex": "a+", "reasoning": True},
    "a least length and a grammar": {"min_new_tokens": 4, "ebnf": "root ::= 'a'"},
    "ignored end ids and a grammar": {"ignore_eos": True, "json_schema": {}},
    "a least length and ignored end ids": {"min_new_tokens": 4, "ignore_eos": True},
    "id 0 everywhere": {"stop_token_ids": [0], "bad_words": [[0]], "logit_bias": {0: 1.0}},
}


def combinations_probe(seed: int) -> Values:
    """Build what contradicts itself and what just agrees."""
    values: Values = {name: str(build(dict(arguments))) for name, (arguments, *_) in CONTRADICTIONS.items()}
    for name, arguments in AGREEMENTS.items():
        params = build(dict(arguments))
        values[name] = params if isinstance(params, str) else "accepted"
    return values


def combinations_verdict(seed: int, got: Values) -> list[Failure]:
    """Every contradiction is refused by name."""
    failures = []
    for name, (_, words, numbers) in CONTRADICTIONS.items():
        failures += message_failures(name, got[name], words, numbers)
    failures += [Failure(name, "", "accepted", str(got[name])) for name in AGREEMENTS if got[name] != "accepted"]
    return failures


REGISTRY.add(
    "L4.A.combinations",
    "Parameters that contradict each other or name no token are errors that name them; what just fits is accepted.",
    combinations_probe,
    combinations_verdict,
)
