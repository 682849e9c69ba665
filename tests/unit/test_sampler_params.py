"""``SamplingParams`` takes what it documents and refuses the rest with one kind of error that names field and value."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_engine.sampler.params import SamplingParams, off_value
from tests.support.engines import EXAMPLES

REALS = ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
COUNTS = ["top_k", "min_new_tokens", "max_new_tokens", "n", "best_of", "logprobs", "prompt_logprobs", "seed"]
OPTIONAL = ["best_of", "logprobs", "prompt_logprobs", "seed"]
LISTS = ["stop", "stop_token_ids", "allowed_token_ids", "bad_words"]
MAPPINGS = ["logit_bias", "logits_processors"]


def endless() -> Iterator[int]:
    yield 1


# Never a number of any kind that is taken
NO_REAL_NUMBERS = [True, False, 1j, math.nan, math.inf, -math.inf, np.bool_(True), np.float64("nan")]
TOO_LARGE = [10**400, -(10**400)]
OTHER_TYPES = ["1", "", b"1", [1], {1: 2}, object()]
ARRAYS = [np.array(1.0), np.array([1.0, 2.0]), torch.tensor(1), torch.tensor([1.0, 2.0])]
NO_NUMBERS = [*NO_REAL_NUMBERS, *TOO_LARGE, *OTHER_TYPES, *ARRAYS]
NO_LISTS = [0, 5, 0.0, False, {}, {1: 2}, endless(), b"ab", b"", np.array([1, 2]), torch.tensor([])]
NO_MAPPINGS = [0, 0.0, False, "", "ab", [], [1], [(1, 2.0)], {1}, endless(), np.array([])]
refused = settings(max_examples=EXAMPLES // 3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def refusal(**given_: object) -> str:
    """Return the message of the ``ValueError``; any other exception fails the test by passing through."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SamplingParams(**given_)
    return str(caught.value)


def names(message: str, name: str, value: object) -> bool:
    """Whether the message names the field and shows the value, as it is or as the engine writes it."""
    return name in message and (repr(value) in message or str(value) in message)


NO_COUNTS = [value for value in NO_NUMBERS if not isinstance(value, int) or isinstance(value, bool)]
WRONG_KINDS: dict[str, list[object]] = {
    **{name: [*NO_NUMBERS, None] for name in REALS},
    **{name: [*NO_COUNTS, 0.5, np.float32(0.5), *([] if name in OPTIONAL else [None])] for name in COUNTS},
    **dict.fromkeys(LISTS, NO_LISTS),
    **dict.fromkeys(MAPPINGS, NO_MAPPINGS),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_a_value_of_another_kind_is_refused_by_name(name: str) -> None:
    """10**400 once came back as ``OverflowError``, ``stop_token_ids=0`` passed for an empty list."""
    for value in WRONG_KINDS[name]:
        assert names(refusal(**{name: value}), name, value), value


# Values that a message shows as they are.
OUT_OF_RANGE = {
    "top_k": [-2],
    "min_new_tokens": [-1],
    "max_new_tokens": [0],
    "n": [0],
    "best_of": [0],
    "logprobs": [-2],
    "prompt_logprobs": [-2],
    "seed": [2**63, -(2**63) - 1],
    "ignore_eos": [None, 1, "no"],
    "logprobs_mode": ["Raw", None],
    "stop": [""],
}
# Lists with a wrong entry, and the part of them that a message shows.
WRONG_ENTRIES = {
    "logprobs_mode": [(["raw"], "raw")],
    "stop_token_ids": [
        ([1, -1], -1),
        ([True], True),
        ([None], None),
        ([[1]], [1]),
        ([np.int64(-1)], -1),
        ([np.float64(1)], 1.0),
    ],
    "allowed_token_ids": [([2, None], None), ([], "empty")],
    "bad_words": [([5], 5), ([[1, "a"]], "a"), (["ab"], "ab"), ([[]], "empty"), ([endless()], "generator")],
    "stop": [(["a", 5], 5), ([["a"]], "a"), ([""], ""), ([str(i) for i in range(33)], 33)],
    "logits_processors": [({"a": None}, None), ({"a": 5}, 5), ({"a": [("budget", 3)]}, "budget")],
}
WRONG_KEYS = [-1, "a", "\u00b2", 1.5, True, None, (1,)]
WRONG_BIASES = [101, math.nan, -math.inf, None, "3", True, [3], 10**400]


WRONG_VALUES = [
    *((name, value, value) for name, values in OUT_OF_RANGE.items() for value in values),
    *((name, value, part) for name, pairs in WRONG_ENTRIES.items() for value, part in pairs),
    *(("logit_bias", {key: 1.0}, key) for key in WRONG_KEYS),
    *(("logit_bias", {1: bias}, bias) for bias in WRONG_BIASES),
    ("logit_bias", {"1": 1.0, 1: 2.0}, 1),
]


@pytest.mark.parametrize("name", sorted({name for name, _, _ in WRONG_VALUES}))
def test_a_value_out_of_range_is_named(name: str) -> None:
    for value, part in ((value, part) for own, value, part in WRONG_VALUES if own == name):
        assert names(refusal(**{name: value}), name, part), value


SCALARS = st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats()
LEAVES = SCALARS | st.complex_numbers() | st.text(max_size=3) | st.binary(max_size=3)
KEYS = st.integers() | st.text(max_size=2)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists = st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.frozensets(KEYS, max_size=3)
    return lists | st.dictionaries(KEYS, inner, max_size=3)


junk = st.recursive(LEAVES, containers, max_leaves=6)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_anything_is_taken_whole_or_refused_by_a_value_error_with_the_name(name: str) -> None:
    @refused
    @given(junk)
    def check(value: object) -> None:
        try:
            params = SamplingParams(**{name: value})
        except ValueError as error:
            assert name in str(error) or "samples at temperature 0" in str(error)  # noqa: PT017
            return
        assert replace(params) == params  # what was taken is in its one form
        hollow = value is None or (isinstance(value, list | tuple | dict | frozenset) and not value)
        if getattr(params, name) == off_value(name) and not hollow:
            assert value == off_value(name) or name in ("temperature", "top_k"), "accepted and ignored"

    check()


EVERYTHING = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": -(2**63),
    "n": 2,
    "best_of": 3,
    "logprobs": -1,
    "logit_bias": {3: 1.5, 11: -100},
    "allowed_token_ids": [3, 11],
    "logprobs_mode": "processed",
    "ignore_eos": True,
    "logits_processors": {
        "thinking_budget": {"budget": 3, "model": "qwen3"},
        "disallowed_tokens": {"token_ids": [1]},
    },
}


def test_parameters_survive_json() -> None:
    for given_ in (EVERYTHING, {"stop_token_ids": [3], "bad_words": [[1, 2], [4]], "stop": ["a", "b"]}):
        params = SamplingParams(**given_)
        assert SamplingParams(**json.loads(json.dumps(asdict(params)))) == params


@pytest.mark.parametrize(
    "given_",
    [{"stop_token_ids": [9]}, {"logit_bias": {9: 1.0}}, {"allowed_token_ids": [0, 9]}, {"bad_words": [[0], [1, 9]]}],
    ids=str,
)
def test_ids_beyond_the_vocabulary_are_named_with_its_size(given_: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given_))} names token id 9; the vocabulary has the ids 0 to 8"):
        SamplingParams(**given_).check_vocabulary(9)
    SamplingParams(**given_).check_vocabulary(10)
