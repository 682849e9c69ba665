"""Every option of the engine and of a request: what it takes, and what is refused when it is made."""

import json
import math
import pickle
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest

from mini_engine import LLM, EngineConfig, SamplingParams
from mini_engine.checks import names_from
from mini_engine.config import Eviction, GrammarBackend, Policy
from mini_engine.config import options as engine_options
from mini_engine.grammar.backends import BUILT_IN
from mini_engine.llm import load_driver
from mini_engine.other_names import OURS, WITHOUT
from mini_engine.radix_cache import EVICTIONS
from mini_engine.scheduler.policy import POLICIES

NEEDS: dict[str, Any] = {
    "eviction": {"prefix_cache": "radix"},
    "wait_for_prefix": {"prefix_cache": "radix"},
    "wait_below_match": {"wait_for_prefix": 32, "prefix_cache": "radix"},
    "policy_seed": {"policy": "random"},
    "json_whitespace": {"grammar_backend": "fsm"},
    "jump_forward": {"grammar_backend": "fsm"},
    "max_draft_rows": {"drafts": "ngram"},
    "tensor_parallel_mode": {"tensor_parallel": 2},
}
FLAGS = ("batch_invariant", "preemption", "jump_forward")
COUNTS = {
    "page_size": 1,
    "max_model_len": 1,
    "max_running_requests": 1,
    "max_tokens_per_step": 1,
    "policy_seed": -(2**63),
    "max_steps_waited": 1,
    "num_pages": 1,
    "wait_for_prefix": 1,
    "wait_below_match": 0,
    "max_draft_rows": 1,
    "tensor_parallel": 1,
}
WORDS = ("dtype", "device", "compute", "policy", "prefix_cache", "eviction", "grammar_backend", "json_whitespace")
WORDS += ("drafts", "quantize", "tensor_parallel_mode")
OPTIONAL = ("max_model_len", "max_tokens_per_step", "policy_seed", "num_pages", "prefix_cache", "wait_for_prefix")
NO_NUMBERS: tuple[Any, ...] = (True, "1", 1.0, math.nan, math.inf, [1], b"1", 1j, np.float64(1), np.array([1]))


def refusal(name: str, value: Any) -> str:
    with pytest.raises(ValueError, match=f"^{name} (is )?") as caught:
        EngineConfig(**{**NEEDS.get(name, {}), name: value})
    return str(caught.value)


def test_every_field_has_a_check_and_every_check_is_met_here() -> None:
    assert list(engine_options()) == [each.name for each in fields(EngineConfig)]
    assert set(engine_options()) == {*FLAGS, *COUNTS, *WORDS, "grammar_timeout_s"}


@pytest.mark.parametrize("name", NEEDS)
def test_what_does_nothing_without_another_option_is_refused(name: str) -> None:
    needed = next(iter(NEEDS[name]))
    value = next(value for value in (True, 7, "lfu", "any", "sum") if accepts(name, value))
    with pytest.raises(ValueError, match=f"^{name} is {value!r} and does nothing while {needed} is .*; set {needed}"):
        EngineConfig(**{name: value})


def accepts(name: str, value: Any) -> bool:
    try:
        EngineConfig(**NEEDS[name], **{name: value})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", FLAGS)
def test_a_switch_is_true_or_false(name: str) -> None:
    for value in ("no", "off", "", 0, 1, None, [], math.nan):
        assert "it is True or False" in refusal(name, value)
    assert getattr(EngineConfig(**{**NEEDS.get(name, {}), name: True}), name) is True


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number(name: str) -> None:
    least = COUNTS[name]
    for value in (*NO_NUMBERS, least - 1, *(() if name in OPTIONAL else (None,))):
        assert f"a whole number of at least {least}" in refusal(name, value)
    for number in (np.int64(7), np.uint8(7), 7):
        config = EngineConfig(**{**NEEDS.get(name, {}), name: number})
        assert type(getattr(config, name)) is int
        assert config == EngineConfig(**{**NEEDS.get(name, {}), name: 7})


@pytest.mark.parametrize("name", WORDS)
def test_a_word_is_one_of_those_that_are_known(name: str) -> None:
    for value in ("nope", "", 1, True, b"lru", ["cpu"], *(() if name in OPTIONAL else (None,))):
        assert ("cuda:1" if name == "device" else "choose one of") in refusal(name, value)


def test_a_timeout_is_a_finite_time() -> None:
    for value in ("1", None, True, 0, -1, math.nan, math.inf, -math.inf, np.float32("inf")):
        assert "a finite number above 0 seconds" in refusal("grammar_timeout_s", value)
    for seconds in (1, 0.25, np.float32(0.25), np.int64(1)):
        kept = EngineConfig(grammar_timeout_s=seconds).grammar_timeout_s
        assert (kept, type(kept) in (int, float)) == (float(seconds), True)


def test_the_declared_names_are_those_of_the_tables() -> None:
    assert list(get_args(Policy)) == list(POLICIES)
    assert list(get_args(Eviction)) == list(EVICTIONS)
    assert list(get_args(GrammarBackend)) == ["none", "auto", *BUILT_IN]


def test_a_name_that_is_registered_later_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "choose one of fcfs, lpm" in refusal("policy", "lifo")
    monkeypatch.setitem(POLICIES, "lifo", POLICIES["fcfs"])
    assert EngineConfig(policy="lifo").policy == "lifo"
    monkeypatch.setitem(EVICTIONS, "longest", lambda node: (-len(node.pages),))
    assert EngineConfig(prefix_cache="radix", eviction="longest").eviction == "longest"
    own: dict[str, object] = {}
    names_from("policy", own)
    own["own"] = None
    assert EngineConfig(policy="own").policy == "own"


def test_a_seed_without_a_policy_that_draws_is_refused() -> None:
    assert EngineConfig(policy="random", policy_seed=3).policy_seed == 3
    with pytest.raises(
        ValueError,
        match="policy_seed is 3 and does nothing while policy is 'fcfs'; set policy='random', or leave policy_seed out",
    ):
        EngineConfig(policy_seed=3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"grammar_backend": "nope"}, "grammar_backend is 'nope'; choose one of none, auto, fsm"),
        ({"policy": "nope"}, "policy is 'nope'"),
        ({"device": "gpu"}, "device 'gpu' cannot be used"),
        ({"device": ""}, "device '' cannot be used"),
        ({"device": "meta"}, "device 'meta' cannot be used"),
        ({"device": None}, "device None cannot be used"),
        ({"device": "cuda:93"}, "device 'cuda:93' cannot be used"),
        ({"device": "cpu:7"}, "device 'cpu:7' cannot be used"),
        ({"n_ctx": 8}, "n_ctx is called max_model_len here"),
        ({"max_tokens": 8}, "max_tokens is called max_new_tokens here, a field of SamplingParams"),
        ({"max_new_tokens": 8}, "max_new_tokens is a field of SamplingParams, not of EngineConfig"),
        ({"enforce_eager": True}, "enforce_eager is no option here: there are no CUDA graphs"),
    ],
    ids=str,
)
def test_what_is_wrong_shows_before_a_checkpoint_is_looked_for(options: dict[str, Any], reason: str) -> None:
    """The folder is not there, and the error is about the option."""
    with pytest.raises(ValueError, match=f"^{reason}"):
        LLM("/no/such/checkpoint", **options)


def test_a_device_that_is_not_there_is_refused_when_a_driver_is_loaded() -> None:
    with pytest.raises(ValueError, match="device 'cuda:93' cannot be used"):
        load_driver(engine=EngineConfig(device="cuda:93"))


@pytest.mark.parametrize("name", [*OURS, *WITHOUT])
def test_names_of_other_engines_are_answered_with_ours(name: str) -> None:
    ours = {each.name for made in (EngineConfig, SamplingParams) for each in fields(made)}
    assert name not in ours
    assert OURS.get(name) in (None, *ours)
    for make in (EngineConfig, EngineConfig.serving, SamplingParams, LLM):
        with pytest.raises(ValueError, match=rf"^{name} is (called {OURS.get(name)} here|no option here)"):
            make(**{name: 8})


def test_a_name_that_nobody_has_stays_python_s_own_error() -> None:
    for make in (EngineConfig, SamplingParams):
        with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
            make(temprature=1)
    with pytest.raises(TypeError):
        SamplingParams(*range(99))


def test_numbers_of_numpy_are_numbers_in_a_request() -> None:
    made = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        top_p=np.float64(0.5),
        repetition_penalty=np.float16(1.5),
        max_new_tokens=np.uint8(9),
        seed=np.int64(-4),
        logprobs=np.int32(2),
        stop_token_ids=[np.int64(5), 6],
        allowed_token_ids=[np.int64(9), np.int32(2)],
        bad_words=[[np.int64(1), 2]],
        logit_bias={np.int64(4): np.float32(1.5), 5: np.int64(2)},
    )
    plain = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        repetition_penalty=1.5,
        max_new_tokens=9,
        seed=-4,
        logprobs=2,
        stop_token_ids=[5, 6],
        allowed_token_ids=[9, 2],
        bad_words=[[1, 2]],
        logit_bias={4: 1.5, 5: 2.0},
    )
    assert made == plain
    assert json.dumps(vars(made)) == json.dumps(vars(plain))
    assert pickle.dumps(made) == pickle.dumps(plain)
    assert replace(made) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": np.float32("nan")},
        {"temperature": Fraction(10**400)},
        {"top_k": np.float64(3)},
        {"max_new_tokens": np.bool_(True)},
        {"max_new_tokens": np.int64(0)},
        {"stop_token_ids": [np.float32(3)]},
        {"stop_token_ids": [np.int64(-3)]},
        {"logit_bias": {1: np.float32("inf")}},
        {"logit_bias": {1: np.bool_(True)}},
        {"ignore_eos": "no"},
    ],
    ids=str,
)
def test_numpy_s_numbers_meet_the_same_limits(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(changes))} "):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cuda"}, "tensor_parallel is 2, which is for CPUs, and device is 'cuda'; set device='cpu'"),
        ({"compute": "compiled"}, "compute='compiled' runs in one process; set compute='fast'"),
        ({"compute": "triton"}, "compute='triton' runs in one process"),
        (
            {"tensor_parallel_mode": "sum", "batch_invariant": True},
            "batch_invariant is True; set tensor_parallel_mode='gather'",
        ),
        ({"tensor_parallel_mode": "sum", "quantize": "int8"}, "quantize is 'int8'; set tensor_parallel_mode='gather'"),
    ],
    ids=str,
)
def test_what_several_processes_do_not_compute_is_refused(options: dict[str, Any], reason: str) -> None:
    assert EngineConfig(**options | {"device": "cpu", "tensor_parallel_mode": "gather"})
    with pytest.raises(ValueError, match=reason):
        EngineConfig(tensor_parallel=2, **options)
