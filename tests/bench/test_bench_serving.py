"""The serving benchmark: its arithmetic on logs made by hand, its peers against plain ``generate``, its commands."""

import itertools
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner, Result

from mini_engine.bench import ablate, machine, serving, workload
from mini_engine.bench.peers import ContinuousPeer, StaticPeer, gap_at_difference
from mini_engine.bench.serving import EngineSystem, Goal, Row, goals, median_figures, ratio, run_once
from mini_engine.bench.workload import (
    Answer,
    Figures,
    Job,
    PaddedWaste,
    Run,
    figures,
    make_jobs,
)
from mini_engine.cli.app import app
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver
from mini_engine.outputs import StepOutput
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import RequestTimes

FIGURES = Figures(100.0, 200.0, 1.0, 2.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1000, 0, 10, 0.001, 0.002, 0.03, 0.04)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def report_of(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def step(used: int, held: int, preempted: tuple[str, ...] = (), **seconds: float) -> StepOutput:
    return StepOutput(0, 0.0, seconds, [], [("a", 0, 1)], {}, list(preempted), 1, 0, used, held)


# Arithmetic.


def test_figures_of_a_run_made_by_hand() -> None:
    jobs = [Job([1] * 10, 3), Job([1] * 20, 1, arrival_s=2.0)]
    answers = [
        Answer([5, 6, 7], RequestTimes(added=100.0, started=100.5, finished=103.0, tokens=[101.0, 101.5, 103.0])),
        Answer([8], RequestTimes(added=102.0, started=103.0, finished=105.0, tokens=[105.0])),
    ]
    steps = [step(1, 1, (), schedule=1.0, forward=6.0, sample=2.0, update=1.0), step(1, 1, ("a", "b"), schedule=10.0)]
    own = figures(Run(100.0, answers, steps, kv_waste=0.25, memory_bytes=7), jobs)
    assert own.output_tokens_per_s == pytest.approx(4 / 5)
    assert own.total_tokens_per_s == pytest.approx(34 / 5)
    assert (own.ttft_p50, own.queue_p50) == pytest.approx(((1.0 + 3.0) / 2, (0.5 + 1.0) / 2))
    assert own.ttft_p99 == pytest.approx(1.0 + 0.99 * 2.0)
    assert own.tpot_p50 == own.tpot_p99 == pytest.approx(1.0)  # (103 - 101) / 2; one token has no TPOT
    assert (own.kv_waste, own.memory_bytes, own.preemptions, own.steps) == (0.25, 7, 2, 2)
    assert (own.schedule_s, own.sample_s) == pytest.approx((6.0, 1.0))
    assert (own.schedule_share, own.sample_share) == pytest.approx((12 / 20, 2 / 20))


def test_waste_of_a_padded_batch() -> None:
    waste = PaddedWaste()
    waste.add([Job([0] * 2, 3), Job([0] * 4, 1)])
    assert waste.shares == pytest.approx([1 - 6 / 8, 1 - 3 / 10, 1 - 4 / 12])
    waste.add([Job([0] * 5, 1)])
    assert waste.mean == pytest.approx((2 / 8 + 7 / 10 + 8 / 12 + 0) / 4)


def test_ratios_are_taken_within_a_round() -> None:
    ours = [replace(FIGURES, output_tokens_per_s=rate) for rate in (10.0, 40.0, 30.0)]
    theirs = [replace(FIGURES, output_tokens_per_s=rate) for rate in (5.0, 10.0, 30.0)]
    assert ratio(ours, theirs) == 2.0  # of 2, 4 and 1; the ratio of the medians would be 3


def test_medians_keep_what_is_unknown_unknown() -> None:
    rounds = [replace(FIGURES, ttft_p50=t, kv_waste=w) for t, w in ((3.0, 0.1), (1.0, None), (2.0, 0.3))]
    middle = median_figures(rounds)
    assert (middle.ttft_p50, middle.kv_waste, middle.output_tokens_per_s) == (2.0, None, 100.0)


def row(system: str, over_static: float, over_continuous: float | None = 2.0, **changes: float) -> Row:
    return Row(
        system,
        replace(FIGURES, **changes),
        over_static,
        over_continuous,
        1.0,
        1.0,
        0.0,
        model_bytes=5000,
        pool_bytes=2000,
    )


def test_goals_say_what_was_reached() -> None:
    load = {"workload": "ragged", "running": 32, "arrivals": "all at once"}
    rows = [row(serving.SERVING, 2.6, 0.9, sample_share=0.08), row("packed+invariant", 0.99)]
    assert goals("0.6b", "bfloat16", load, rows, weight_bytes=3000) == [
        Goal("fast / transformers static >= 2.5", 2.6, True),
        Goal("fast / transformers continuous >= 1", 0.9, False),
        Goal("packed+invariant / transformers static >= 1", 0.99, False),
        Goal("scheduling + sampling of a step of fast <= 0.1", pytest.approx(0.11), False),
        Goal("memory of fast / (weights + KV pool) <= 1.15", (5000 + 1000) / (3000 + 2000), False),
    ]


# Loads.


def test_ragged_lengths_are_log_uniform_and_seeded() -> None:
    jobs = make_jobs("ragged", 400, vocab_size=50, rate=0.0, seed=3)
    prompts = [len(job.prompt_ids) for job in jobs]
    outputs = [job.new_tokens for job in jobs]
    assert (min(prompts) >= 16, max(prompts) <= 512) == (True, True)
    assert (min(outputs) >= 8, max(outputs) <= 256) == (True, True)
    # Half of them below the geometric mean of the limits: 400 coins, 4 standard deviations are 40.
    assert abs(sum(n < (16 * 512) ** 0.5 for n in prompts) - 200) < 40
    assert abs(sum(n < (8 * 256) ** 0.5 for n in outputs) - 200) < 40
    assert all(0 <= token < 50 for job in jobs for token in job.prompt_ids)
    assert jobs == make_jobs("ragged", 400, 50, 0.0, 3) != make_jobs("ragged", 400, 50, 0.0, 4)
    assert {job.arrival_s for job in jobs} == {0.0}


def test_arrivals_are_a_poisson_process_and_leave_the_lengths_alone() -> None:
    jobs = make_jobs("ragged", 900, 50, rate=5.0, seed=3)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(jobs)]
    assert jobs[0].arrival_s == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.14)  # 4 standard deviations of the mean
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.2)
    assert [replace(job, arrival_s=0.0) for job in jobs] == make_jobs("ragged", 900, 50, 0.0, 3)


# Systems.


@pytest.fixture(scope="module")
def peer(untied: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(untied, dtype=torch.float32)


JOBS = [Job([7, 3, 9], 6), Job(list(range(20)), 2), Job([1, 2], 9), Job([4] * 11, 4)]


@pytest.fixture(scope="module")
def alone(peer: Qwen3ForCausalLM) -> list[list[int]]:
    """The oracle: every request by itself, no padding, no end-of-sequence id."""
    answers = []
    for job in JOBS:
        ids = torch.tensor([job.prompt_ids])
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=job.new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def serve(system: serving.System, jobs: list[Job]) -> Run:
    system.open()
    try:
        return system.serve(jobs)
    finally:
        system.close()


def test_every_system_gives_the_answers_of_lonely_requests(
    peer: Qwen3ForCausalLM, alone: list[list[int]], untied: Path
) -> None:
    config = EngineConfig.serving(max_running_requests=3, num_pages=64)
    systems = {
        "static": StaticPeer(peer, 3),
        "continuous": ContinuousPeer(peer, 3, tokens_per_step=16, pool_tokens=512),
        "engine": EngineSystem(load_driver(untied, config)),
    }
    for name, system in systems.items():
        run = serve(system, JOBS)
        assert [answer.token_ids for answer in run.answers] == alone, name
        for answer, job in zip(run.answers, JOBS, strict=True):
            times = answer.times
            assert len(times.tokens) == job.new_tokens, name
            assert times.added <= times.started <= times.tokens[0] <= times.tokens[-1] <= times.finished, name


def test_a_static_batch_takes_whoever_has_come(peer: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    generate = StaticPeer.generate

    def spy(self: StaticPeer, jobs: list[Job], began: float) -> list[Answer]:
        batches.append(len(jobs))
        return generate(self, jobs, began)

    monkeypatch.setattr(StaticPeer, "generate", spy)
    late = [replace(job, arrival_s=0.5) for job in JOBS]
    run = serve(StaticPeer(peer, 2), [*JOBS[:3], *late[:1]])
    assert batches == [2, 1, 1]
    assert run.answers[3].times.started >= run.began + 0.5
    assert run.answers[3].times.added == pytest.approx(run.began + 0.5)


def test_a_late_request_waits_from_its_arrival_even_if_a_step_is_on(untied: Path) -> None:
    system = EngineSystem(load_driver(untied, EngineConfig()))
    system.open()
    steps = system.engine.step

    def slow_step() -> StepOutput:
        time.sleep(0.1)
        return steps()

    system.engine.step = slow_step
    run = system.serve([replace(JOBS[0], new_tokens=3), replace(JOBS[1], arrival_s=0.05)])
    late = run.answers[1].times
    assert late.added == pytest.approx(run.began + 0.05, abs=1e-6)
    assert late.queue_s >= 0.34, "one request at a time: it starts in the fourth step"


def test_the_log_pool_and_waste_of_the_engine(untied: Path) -> None:
    driver = load_driver(untied, EngineConfig.serving(num_pages=4))
    run = serve(EngineSystem(driver), [JOBS[0]])
    shape = driver.model.config
    assert run.pool_bytes == 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * (4 * 16 + 1) * 4
    # Prompt of 3, then 5 tokens more in one page of 16; when the last token comes the page is free again.
    assert run.kv_waste == pytest.approx(statistics.mean(1 - held / 16 for held in (3, 4, 5, 6, 7)))
    assert len(run.steps) == 6


def test_an_impossible_request_stops_the_benchmark(untied: Path) -> None:
    with pytest.raises(ValueError, match="cannot be run"):
        serve(EngineSystem(load_driver(untied)), [Job([1] * 600, 8)])


def test_memory_is_what_open_and_serve_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hungry:
        def open(self) -> None:
            self.held = torch.ones(48 << 18)  # 48 MiB

        def serve(self, jobs: list[Job]) -> Run:
            torch.ones(16 << 18).sum()
            return Run(0.0, [])

        def close(self) -> None:
            del self.held

    if not machine.forget_peak():
        pytest.skip("this system does not let a process forget its peak")
    torch.ones(256 << 18)  # an older, higher peak
    for _ in range(2):
        # The system counts pages of a thread a few dozen at a time.
        assert 63 << 20 <= run_once(Hungry(), []).memory_bytes < 96 << 20
    monkeypatch.setattr(serving, "forget_peak", lambda: False)
    assert run_once(Hungry(), []).memory_bytes is None


def test_gap_at_the_first_difference(peer: Qwen3ForCausalLM, alone: list[list[int]]) -> None:
    prompt = JOBS[2].prompt_ids
    theirs = alone[2]
    with torch.inference_mode():
        logits = peer(torch.tensor([[*prompt, *theirs[:4]]])).logits[0, -1].double()
    for other in (0, 57):
        ours = [*theirs[:4], other, *theirs[5:]]
        expected = (logits.max() - logits[other]) / logits.std()
        assert gap_at_difference(peer, prompt, ours, theirs) == pytest.approx(float(expected), abs=1e-5)
    assert gap_at_difference(peer, prompt, theirs, theirs) == 0.0


# Commands.

SHORT = ("--requests", "3", "--rounds", "1")


@pytest.fixture
def short_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "RAGGED_PROMPT", (4, 64))
    monkeypatch.setattr(workload, "RAGGED_OUTPUT", (2, 24))
    monkeypatch.setattr(workload, "EQUAL_OUTPUT", 9)


@pytest.mark.slow
@pytest.mark.usefixtures("short_lengths")
def test_bench_serving_reports_every_system_and_ends_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "warm_up", lambda system: None)
    report = report_of(invoke("serving", *SHORT))
    rows = {one["system"]: one for one in report["rows"]}
    assert list(rows) == ["transformers static", "transformers continuous", *serving.SYSTEMS]
    jobs = make_jobs("ragged", 3, 1024, 0.0, 0)
    output = sum(job.new_tokens for job in jobs)
    prompts = sum(len(job.prompt_ids) for job in jobs)
    for name, one in rows.items():
        own = one["figures"]
        assert own["total_tokens_per_s"] / own["output_tokens_per_s"] == pytest.approx((output + prompts) / output)
        static = rows["transformers static"]["figures"]["output_tokens_per_s"]
        assert one["over_static"] == pytest.approx(own["output_tokens_per_s"] / static)
        assert own["queue_p50"] <= own["ttft_p50"] <= own["ttft_p99"]
        assert one["same_or_tied"] == 1.0, "in float32 only near-ties may differ"
        assert (own["steps"] > 0) == (own["schedule_share"] is not None) == (name in serving.SYSTEMS)
    assert rows["off"]["figures"]["steps"] == output  # one at a time and every prompt whole: a step per token
    assert rows["packed"]["figures"]["steps"] >= max(job.new_tokens for job in jobs)
    assert report["weight_bytes"] == 4_791_040
    assert report["goals"]


@pytest.mark.slow
@pytest.mark.usefixtures("short_lengths")
def test_bench_serving_with_arrivals_chosen_systems_and_a_peer_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ContinuousPeer) -> None:
        raise OSError("no such kernel")

    monkeypatch.setattr(ContinuousPeer, "open", broken)
    systems = ("--system", "transformers continuous", "--system", "packed")
    result = invoke("serving", *SHORT, "--workload", "equal", "--rate", "4", *systems, "--dtype", "bfloat16")
    report = report_of(result)
    assert report["unavailable"] == {"transformers continuous": "OSError: no such kernel"}
    assert "transformers continuous: not runnable here: OSError: no such kernel" in result.stdout
    assert [one["system"] for one in report["rows"]] == ["transformers static", "packed"]
    assert report["load"]["arrivals"] == "Poisson, 4 per second"
    last = make_jobs("equal", 3, 1024, 4.0, 0)[-1].arrival_s
    assert all(3 * 9 / one["figures"]["output_tokens_per_s"] > last for one in report["rows"])
    assert report["rows"][1]["over_continuous"] is None
    assert result.stdout.splitlines()[0] == report["command"]
    assert "--rate 4 " in report["command"]
    assert report["command"].endswith("--system 'transformers continuous' --system 'packed'")


@pytest.mark.parametrize("wrong", [("--model", "7b"), ("--dtype", "int4"), ("--workload", "x"), ("--system", "vllm")])
def test_bench_serving_refuses_unknown_words(wrong: tuple[str, str]) -> None:
    result = invoke("serving", *wrong)
    assert result.exit_code == 2
    assert wrong[1] in result.stderr


@pytest.mark.usefixtures("short_lengths")
def test_bench_ablate_compares_both_values_and_ends_in_json() -> None:
    result = invoke("ablate", "--option", "max_running_requests", "--values", "1,3", *SHORT)
    report = report_of(result)
    off, on = report["off"], report["on"]
    assert (report["option"], off["value"], on["value"]) == ("max_running_requests", 1, 3)
    rates = [side["figures"]["output_tokens_per_s"] for side in (off, on)]
    assert report["throughput_ratios"] == pytest.approx([rates[1] / rates[0]])
    assert report["ttft_ratio"] == pytest.approx(on["figures"]["ttft_p50"] / off["figures"]["ttft_p50"])
    assert report["tpot_ratio"] == pytest.approx(on["figures"]["tpot_p50"] / off["figures"]["tpot_p50"])
    assert off["figures"]["steps"] > on["figures"]["steps"]
    assert (report["changed_ids"], report["requests"]) == (0, 3)
    assert result.stdout.splitlines()[-2] == report["conclusion"]
    assert "max_running_requests=3 instead of 1" in report["conclusion"]


@pytest.mark.slow
@pytest.mark.usefixtures("short_lengths")
def test_bench_ablate_of_a_sampling_option_sees_other_ids() -> None:
    assert report_of(invoke("ablate", "--option", "temperature", *SHORT))["changed_ids"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--option", "turbo"), ("turbo", "max_running_requests", "temperature")),
        (
            ("--option", "batch_invariant", "--base", "device=cuda", "--base", "compute=reference"),
            ("batch_invariant", "set compute='triton'"),
        ),
        (("--option", "page_size", "--values", "0,16"), ("page_size is 0",)),
        (("--option", "num_pages"), ("num_pages", "give two")),
        (("--option", "compute", "--base", "speed=9"), ("speed=9", "NAME=VALUE")),
    ],
)
def test_bench_ablate_refuses_what_makes_no_experiment(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = invoke("ablate", *arguments)
    assert result.exit_code == 2
    text = " ".join(result.stderr.replace("│", " ").split())
    assert all(word in text for word in words), text


def test_every_trial_can_be_run_and_is_off_first() -> None:
    for option, (off, on, needs) in ablate.TRIALS.items():
        sides = [ablate.settings(option, value, needs) for value in (off, on)]
        assert sides[0] != sides[1], option
        standard = EngineConfig() if option in ablate.ENGINE_OPTIONS else SamplingParams()
        assert off == getattr(standard, option) or option == "page_size", option


def test_values_are_json_or_words() -> None:
    assert ablate.parse_values("1,32") == [1, 32]
    assert ablate.parse_values("None, True") == [None, True]
    assert ablate.parse_values("torch,packed") == ["torch", "packed"]
    assert ablate.parse_values('null,{"5": -3.5}') == [None, {"5": -3.5}]
    assert ablate.parse_values("[1,2],[3]") == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.5, 1.1], "pays off"),
        ([0.9, 0.5], "costs"),
        ([0.9, 1.5], "makes no clear difference"),
        ([1.01, 1.02], "makes no clear difference"),
    ],
)
def test_the_conclusion_needs_every_round(ratios: list[float], verdict: str) -> None:
    off, on = (
        ablate.Side(value, replace(FIGURES, memory_bytes=memory), 5_000_000)
        for value, memory in ((1, 9_000_000), (2, 4_000_000))
    )
    text = ablate.Ablation("page_size", off, on, ratios, 0.5, 0.25, 1, 4).conclusion
    assert f"page_size=2 instead of 1 {verdict}" in text
    assert f"x{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" in text
    assert "TTFT x0.50, TPOT x0.25, peak memory -5 MB, and 1 of 4 requests got other ids." in text
