"""The benchmark of the kernels: its timer on a fake device, its arithmetic, its comparisons, and one run of toys."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from mini_engine.bench import ablate, serving
from mini_engine.bench.kernels import attention as kernels_attention
from mini_engine.bench.kernels import cases as kernels_cases
from mini_engine.bench.kernels import command as bench
from mini_engine.bench.kernels import engine as kernels_engine
from mini_engine.bench.kernels import sampling as kernels_sampling
from mini_engine.bench.kernels.timer import DeviceTimer, Sample, num_sets
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.app import app
from mini_engine.config import EngineConfig
from mini_engine.kernels import launch
from mini_engine.sampler import filters

CPU = torch.device("cpu")
TOY = kernels_cases.Setting(kernels_cases.SHAPES["toy"], kernels_cases.TOY, CPU, torch.float32)
LIMITS = bench.Limits(bytes_per_s=4e12, flops_per_s=8e14)
FACTORIES = (
    kernels_cases.norm_cases,
    kernels_cases.store_cases,
    kernels_attention.decode_cases,
    kernels_attention.prefill_cases,
    kernels_sampling.sampling_cases,
    kernels_cases.matmul_cases,
)
TOYS = [case for make in FACTORIES for case in make(TOY)]
NAMES = [f"{case.name} {case.size}" for case in TOYS]


def sizes(shape, dtype=torch.bfloat16):
    """Return the cases of a real shape by name and size. Nothing of that size is allocated."""
    setting = kernels_cases.Setting(kernels_cases.SHAPES[shape], kernels_cases.FULL, CPU, dtype)
    return {(case.name, case.size): case for make in FACTORIES for case in make(setting)}


# The timer.


class FakeDevice:
    """A device that works through a queue, and a host that takes its time to fill it. Both clocks are seconds."""

    def __init__(self, queueing, computing):
        self.queueing = queueing
        self.computing = computing
        self.host = self.device = 0.0
        self.waits = 0
        self.calls = []

    def clock(self):
        return self.host

    def run(self, seconds):
        self.device = max(self.device, self.host) + seconds

    def call(self, n):
        self.calls.append(n)
        self.host += self.queueing
        self.run(self.computing)

    def synchronize(self):
        self.waits += 1
        self.host = max(self.host, self.device)

    def Event(self, enable_timing):  # noqa: N802, as in torch.cuda
        assert enable_timing
        device = self

        class Event:
            def record(self):
                self.moment = device.device = max(device.device, device.host)

            def elapsed_time(self, end):
                return (end.moment - self.moment) * 1e3

        return Event()


def test_what_the_host_needs_to_queue_a_call_is_not_counted_as_the_device():
    device = FakeDevice(queueing=50e-6, computing=20e-6)
    idle = DeviceTimer(device, lambda: None, 0.01, device.clock).measure(device.call)
    assert idle.median == pytest.approx(50e-6), "an idle device waits for the host: this is what the head start is for"
    device = FakeDevice(queueing=50e-6, computing=20e-6)
    own = DeviceTimer(device, lambda: device.run(500e-6), 0.01, device.clock).measure(device.call)
    assert (own.median, own.p10, own.p90) == pytest.approx((20e-6,) * 3)
    assert own.host == pytest.approx(50e-6)


def test_percentiles_and_the_number_of_the_call():
    device = FakeDevice(queueing=0.0, computing=0.0)
    own = DeviceTimer(device, lambda: None, 1.0, lambda: device.host)

    def call(n):
        device.run(1e-6 * (n + 1))
        device.call(n)

    sample = own.measure(call)
    counted = range(sample.calls)
    assert device.calls[-sample.calls :] == list(counted)
    assert sample.median == pytest.approx(1e-6 * (sample.calls + 1) / 2)
    assert sample.p10 == pytest.approx(1e-6 * (1 + 0.1 * (sample.calls - 1)))
    assert sample.p90 == pytest.approx(1e-6 * (1 + 0.9 * (sample.calls - 1)))


@pytest.mark.parametrize(
    ("num_bytes", "sets"), [(1, 4), (60_000_000, 4), (100_000_000, 2), (199_000_000, 2), (200_000_000, 1), (8 << 30, 1)]
)
def test_inputs_are_four_times_the_cache_together(num_bytes, sets):
    assert num_sets(num_bytes) == sets


# Bytes, operations, shares.


@pytest.mark.parametrize(
    ("shape", "name", "size", "num_bytes"),
    [
        ("0.6b", "rms_norm", "32768 x 1024", 134_219_776),  # 2 * 64 MiB and a weight of 2 KiB
        ("0.6b", "store_kv", "32768 x 2 x 8 x 128", 268_697_600),  # 4 * 64 MiB and slots of 8 bytes
        ("0.6b", "apply_token_bitmask", "256 x 151936", 160_141_312),  # 256 * (4,748 words + 151,640 banned) * 4
        ("4b", "split_attention", "4 x 4096, GQA 4", 67_108_864),  # 4 * 4096 tokens, 4 KiB for K and V each
        ("4b", "paged_attention", "1 x 512, GQA 4", 10_485_760),  # q and out 4 MiB each, K and V 1 MiB each
        ("4b", "invariant_matmul", "16 x 2560 x 19456", 100_319_232),  # 2 * (16*2560 + 19456*2560 + 16*19456)
        ("0.6b", "apply_top_p", "64 x 151936", 77_791_232),
        ("0.6b", "apply_penalties", "64 x 512 of 151936", 1_310_720),  # 40 bytes for each of 32,768
    ],
)
def test_bytes_are_those_that_cannot_be_avoided(shape, name, size, num_bytes):
    assert sizes(shape)[name, size].num_bytes == num_bytes


def test_goals_are_about_something_measured():
    for case in sizes("4b").values():
        assert case.goal is None or case.goal[0] in (*bench.GOALS, *case.peers)


CASE = kernels_cases.Case("norm", "op", "1 x 2", lambda seed: (), print, print, 2_000_000, 4_000_000_000)


def sample_of(seconds):
    return Sample(seconds, seconds / 2, seconds * 2, 3e-6, 10)


def test_rows_are_shares_of_what_the_device_does_and_ratios_to_peers():
    row = bench.make_row(CASE, sample_of(1e-6), {"torch": sample_of(5e-6), "other": None}, LIMITS)
    assert (row.us, row.us_p10, row.us_p90, row.host_us) == pytest.approx((1, 0.5, 2, 3))
    assert (row.bytes_per_s, row.flops_per_s) == pytest.approx((2e12, 4e15))
    assert (row.bandwidth_share, row.matmul_share) == pytest.approx((0.5, 5.0))
    assert row.ratios == {"torch": pytest.approx(5), "other": None}
    assert row.promised is None


@pytest.mark.parametrize(
    ("goal", "value", "enough"),
    [(("bandwidth", 0.6), 0.5, False), (("matmul", 0.8), 5.0, True), (("torch", 3.0), 5.0, True)],
)
def test_what_was_promised_is_compared_with_what_was_reached(goal, value, enough):
    case = replace(CASE, goal=goal)
    peers = {"torch": sample_of(5e-6), "other": None}
    text, reached, verdict = bench.make_row(case, sample_of(1e-6), peers, LIMITS).promised
    assert text.startswith(f"op 1 x 2: {goal[0]}")
    assert (reached, verdict) == (pytest.approx(value), enough)
    assert bench.make_row(case, sample_of(1e-6), peers, None).promised is None, "the interpreter promises nothing"
    missing = bench.make_row(replace(CASE, goal=("other", 1.0)), sample_of(1e-6), peers, LIMITS)
    assert missing.promised is None


# Whether a result is right.


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[1.0, 2.0], [100.0, 101.0]], [[1.0, 4.0], [100.0, 100.0]], 0.5),
        ([[float("nan"), 2.0]], [[1.0, 2.0]], torch.inf),
        ([[float("nan"), 2.0]], [[float("nan"), 2.0]], torch.inf),
        ([[-torch.inf, 2.0]], [[1.0, 2.0]], torch.inf),
        ([[-torch.inf, 2.0]], [[torch.inf, 2.0]], torch.inf),
        ([[-torch.inf, 3.0]], [[-torch.inf, 2.0]], 0.5),
        ([1, 2], [1, 3], torch.inf),
    ],
)
def test_errors_are_relative_to_the_largest_number_of_a_row(got, expected, error):
    assert kernels_cases.largest_error((torch.tensor(got), None), (torch.tensor(expected), None)) == error


def spoil(result):
    """Change a result a little: floats by an eighth and two of each row by much, integers by one."""
    for tensor in kernels_cases.tensors_of(result):
        if tensor.is_floating_point():
            tensor[..., -1] = torch.where(tensor[..., -1] > -torch.inf, tensor[..., -1] * 1.125 + 1, 0.0)
            tensor[..., :2] = torch.where(tensor[..., :2] > -torch.inf, -torch.inf, 0.0)
        else:
            tensor.add_(1)


@pytest.mark.parametrize("case", TOYS, ids=NAMES)
def test_no_case_takes_a_wrong_result_for_a_right_one(case):
    def wrong(*inputs):
        result = case.reference(*inputs)
        spoil(inputs if case.in_place else result)
        return result

    replace(case, kernel=case.reference).verify(1)
    with pytest.raises(AssertionError, match="differs from its reference"):
        replace(case, kernel=wrong).verify(1)


def test_a_cut_may_differ_in_one_token_of_a_row_and_changes_no_logit():
    expected = torch.tensor([[3.0, -torch.inf, 2.0, -torch.inf, 1.0]] * 2)
    one, two, changed = expected.clone(), expected.clone(), expected.clone()
    one[:, 1] = 0.5
    two[0, 1] = 0.5
    two[0, 4] = -torch.inf
    changed[1, 2] = 2.5
    assert kernels_sampling.same_cut(one, expected, ()) is None
    assert "2 tokens" in kernels_sampling.same_cut(two, expected, ())
    assert "changed" in kernels_sampling.same_cut(changed, expected, ())


@pytest.mark.parametrize(("token", "right"), [(0, False), (1, True), (2, False), (3, False)])
def test_a_draw_is_right_within_its_share(token, right):
    logits = torch.tensor([[0.5, 0.25, 0.25, 1e-30]]).log()
    off = torch.tensor([0]), torch.ones(1, dtype=torch.float64), torch.zeros(1)
    uniform = torch.tensor([0.6], dtype=torch.float64)
    fault = kernels_sampling.same_draw(torch.tensor([token]), None, (logits, *off, uniform))
    assert (fault is None) == right


def test_the_sort_cuts_as_lesson_four_does():
    logits = torch.randn(6, 97, generator=torch.Generator().manual_seed(0)) * 3
    k = torch.tensor([1, 5, 20, 97, 97, 40])
    p = torch.tensor([1.0, 0.9, 0.5, 0.8, 1.0, 0.3], dtype=torch.float64)
    expected = filters.apply_top_p(filters.apply_top_k(logits, k), p)
    p = torch.where(p < 1, p, kernels_sampling.OFF)  # a rounded sum may reach 1 before the last token
    assert torch.equal(kernels_sampling.sort_cut(logits, k, p), expected)
    drawn = kernels_sampling.sort_draw(logits, k, p)
    assert bool((expected.gather(-1, drawn[:, None]) > -torch.inf).all())


# What fails.


class Once:
    def measure(self, call):
        call(0)
        return sample_of(1e-6)


def failing(error):
    def call(*_):
        raise error

    return call


def test_a_wrong_kernel_has_no_figure_and_a_peer_that_fails_is_named():
    run = bench.Bench(Once(), LIMITS, 0)
    case = replace(CASE, make=lambda seed: (torch.ones(2),), kernel=torch.neg, reference=torch.neg)
    row = run.measure(replace(case, peers={"good": torch.neg, "bad": failing(RuntimeError("no\nmore"))}))
    assert row.ratios == {"torch": 1, "good": 1, "bad": None}
    assert run.unavailable == {"op 1 x 2, bad": "RuntimeError: no"}
    assert run.measure(replace(case, size="2", kernel=torch.abs)) is None
    assert run.measure(replace(case, size="3", kernel=failing(ValueError("spilt")))) is None
    assert run.measure(replace(case, size="4", kernel=failing(torch.OutOfMemoryError("full")))) is None
    assert list(run.failed) == ["op 2", "op 3"]
    assert "differs from its reference" in run.failed["op 2"]
    assert run.unavailable["op 4"] == "OutOfMemoryError: full"


def test_a_failed_kernel_ends_the_command_with_an_error(monkeypatch):
    wrong = replace(TOYS[0], kernel=lambda *inputs: inputs[0] * 0)
    monkeypatch.setattr(kernels_cases, "norm_cases", lambda setting: [wrong, TOYS[3]])
    result = CliRunner().invoke(app, ["bench", "kernels", "--parts", "norm"])
    assert result.exit_code == 1
    report = json.loads(result.stdout.splitlines()[-1])
    assert list(report["failed"]) == ["rms_norm 3 x 24"]
    assert [row["operation"] for row in report["rows"]] == ["silu_and_mul"], "the others are measured"


# The engine.


def generated(times, ids):
    return kernels_engine.Generated(10.0, times, ids, 7)


def test_engine_rows_are_ratios_to_transformers_and_the_goal_is_that_of_kernels():
    slow = generated([[11.0, 12.0, 13.0]], [[1, 2, 3]])
    fast = generated([[10.5, 10.7, 10.9]], [[1, 9, 3]])
    rows = kernels_engine.engine_rows("0.6b", 1, {"transformers": slow, "torch": slow, "triton": fast})
    assert [row.decode_ratio for row in rows] == pytest.approx([1, 1, 5])
    assert [row.same_ids for row in rows] == pytest.approx([1, 1, 1 / 3])
    assert [row.peak_bytes for row in rows] == [7] * 3
    ((text, value, enough),) = kernels_engine.engine_goals(rows)
    assert (value, enough) == (pytest.approx(5), True)
    assert "0.6b" in text


def test_kernels_are_ablated_with_the_driver_that_uses_them(monkeypatch):
    """Both ways once shared one model, and neither got the driver of the kernels."""
    from mini_engine.kernels.sampler import KernelOps

    monkeypatch.setattr(serving, "warm_up", lambda system: None)
    models = serving.Models(TINY_MODEL)
    off, on, needs = ablate.trial("compute", "reference,triton")
    drivers = [models.system(EngineConfig.serving(**{**needs, "compute": value}))[0].driver for value in (off, on)]
    assert [type(driver.sampler.ops) is KernelOps for driver in drivers] == [False, True]
    assert drivers[0].model is not drivers[1].model


def message(result):
    assert result.exit_code == 2
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("base", [(), ("--base", "device=cpu")])
def test_kernels_are_not_ablated_where_none_runs(base, monkeypatch):
    """The references stand in for kernels on a CPU, and the conclusion was once about them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = message(
        CliRunner().invoke(app, ["bench", "ablate", "--option", "compute", "--values", "reference,triton", *base])
    )
    assert "measures no kernel" in text


# The command.

interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="toys run in Triton's interpreter; here is a GPU")


@pytest.mark.slow
@interpreted
def test_toys_run_in_the_interpreter_and_say_that_their_times_mean_nothing():
    result = CliRunner().invoke(app, ["bench", "kernels", "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert "interpreter, not comparable" in result.stdout
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["comparable"], report["limits"], report["failed"], report["goals"]) == (False, None, {}, [])
    assert report["command"].endswith("--parts norm,store,decode,prefill,sampling,matmul,engine --seed 3")
    assert report["machine"]["triton"]
    assert [(row["operation"], row["size"]) for row in report["rows"]] == [(case.name, case.size) for case in TOYS]
    for row, case in zip(report["rows"], TOYS, strict=True):
        assert row["us"] > 0
        assert row["bandwidth_share"] is None
        assert row["ratios"].keys() == case.peers.keys() | ({"torch"} if case.is_reference_timed else set())
        assert all(ratio for ratio in row["ratios"].values()), "every peer runs on a CPU, too"
    assert [(row["system"], row["same_ids"]) for row in report["engine"]] == [
        ("transformers", 1.0),
        ("reference", 1.0),
        ("triton", 1.0),
    ]


def test_without_a_gpu_both_ways_are_named(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = message(CliRunner().invoke(app, ["bench", "kernels"]))
    assert "no NVIDIA GPU" in text
    assert "TRITON_INTERPRET=1" in text
