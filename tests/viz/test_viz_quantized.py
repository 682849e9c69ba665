"""What L11's figures show agrees with sums by hand, with a search of all values and with the engine's own model."""

import math

import pytest
import torch

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.checkpoint import TINY_MODEL, load_config
from mini_engine.config import EngineConfig
from mini_engine.fast.quantized import dequantize_int4, quantize_int4
from mini_engine.llm import load_model
from mini_engine.viz import quantized
from mini_engine.viz.figure import Figure
from mini_engine.viz.kernels.work import Roof
from mini_engine.viz.quantized import draw, measure
from mini_engine.viz.quantized.measure import GroupError, Product
from tests.support.figures import check_drawn, check_figures

ROW = torch.tensor([[0.25 * (place % 7) - 0.5 for place in range(31)] + [7.0] + [0.125] * 32])
ERRORS = {4: GroupError(0.02, 1.5), 8: GroupError(0.04, 1.0), 32: GroupError(0.0625, 0.625)}
STEPS = {"wide": Product(1, 1_000_000, 2_000_000.0), "narrow": Product(64, 1_000_000, 500_000.0)}
ROOF = Roof("a machine", 10e9, 100e9)


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {
        "level_chart": quantized.level_chart(ROW, quantized.row_values(ROW)),
        "error_chart": quantized.error_chart(ERRORS),
        "kl_chart": quantized.kl_chart({"table": 0.01, "layer 1": 0.0025, "all of them": 0.0175}),
        "speed_chart": quantized.speed_chart(STEPS, (10e9, 20e9)),
        "roof_chart": quantized.roof_chart(STEPS, ROOF),
    }


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, draw)


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "level_chart": ([-0.5, 7.0, 0.125], "Root mean square error of 64 weights in 4 bits: "),
        "error_chart": ([2, 4, 6.25, 1.5, 0.625], "2.0 % (groups of 4), 4.0 % (groups of 8), 6.2 % (groups of 32)."),
        "kl_chart": ([0.01, 0.0025, 0.0175], "KL divergence in nats: 0.0100 (table), 0.0025 (layer 1), "),
        "speed_chart": ([2, 5000, 10_000], "wide, 10 GB/s: at most 5000 tokens a second."),
        "roof_chart": ([1, 256, 10, 100], "narrow: arithmetic limits it, and it takes at least 1.3 ms."),
    }
    check_drawn(figures, drawn)


def test_a_row_has_the_nearest_of_the_levels_that_are_drawn():
    for values, groups in quantized.row_values(ROW).values():
        width = ROW.shape[1] // len(groups)
        for column, (exact, value) in enumerate(zip(ROW[0].tolist(), values.tolist(), strict=True)):
            levels = groups[column // width]
            assert math.isclose(abs(value - exact), min(abs(level - exact) for level in levels), abs_tol=1e-5)
            assert any(math.isclose(value, level, abs_tol=1e-5) for level in levels)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(quantized.row_of(name, 3, 9), measure.stored_weights()[name][3:4, :9])


def test_errors_of_32_columns_are_the_engines_and_other_sizes_come_and_go():
    weights = {"a": torch.randn(6, 64), "norm": torch.ones(64), "b": torch.randn(3, 128)}
    errors = quantized.group_errors(weights, (8, 32, 64))
    lost = total = 0.0
    for weight in (weights["a"], weights["b"]):
        gaps = dequantize_int4(*quantize_int4(weight)) - weight
        lost, total = lost + float(gaps.square().sum()), total + float(weight.square().sum())
    assert math.isclose(errors[32].error, math.sqrt(lost / total), rel_tol=1e-5)
    assert errors[8].error < errors[32].error < errors[64].error
    assert [error.num_bytes for error in errors.values()] == [1.0, 0.625, 0.5625]


def test_parts_are_rounded_alone_and_nothing_moves_without_them(monkeypatch):
    monkeypatch.setattr(measure, "rounded", lambda weight: weight)
    distances = quantized.kl_by_part(1)
    assert list(distances) == ["table and head", *(f"layer {i}" for i in range(1, 6)), "all of them"]
    assert all(abs(distance) < 1e-12 for distance in distances.values())
    changed = []
    monkeypatch.setattr(measure, "rounded", lambda weight: (changed.append(weight.shape), weight * 1.01)[1])
    assert min(quantized.kl_by_part(1).values()) > 1e-6
    config = load_config(TINY_MODEL)
    matrices = [shape for shape in config.weight_shapes().values() if len(shape) == 2]
    assert len(changed) == 2 * len(matrices)  # each part once, and all of them


def test_the_plain_model_of_the_measurement_is_the_engines():
    config, rows = load_config(TINY_MODEL), measure.texts(1)
    model = load_model(TINY_MODEL, EngineConfig())
    with torch.inference_mode():
        logits = [model(torch.tensor(ids), torch.arange(len(ids)), DenseAttention(sdpa_attention)) for ids in rows]
    expected = torch.cat(logits).double().log_softmax(-1)
    assert torch.equal(measure.logprobs(config, measure.stored_weights(), rows), expected)


def test_a_step_reads_all_matrices_and_the_head_never_in_4_bits():
    config = load_config(TINY_MODEL)
    shapes = config.weight_shapes()
    layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    head = config.vocab_size * config.hidden_size
    steps = quantized.step_bytes(config, {"a": ("bfloat16", 1), "b": ("int8", 1), "c": ("int4", 7)})
    assert [step.num_bytes for step in steps.values()] == [
        2 * (layers + head),
        layers + head,
        layers * 0.625 + head,
    ]
    assert steps["c"].intensity == 14 * (layers + head) / (layers * 0.625 + head)
    assert draw.seconds(STEPS["wide"], ROOF) == 2e6 / 10e9
    assert draw.seconds(STEPS["narrow"], ROOF) == 128e6 / 100e9


def test_the_slider_shows_the_error_of_its_size():
    box = quantized.group_slider(ERRORS, first=8)
    control, picture = box.children
    assert "4.0 % of the weights" in picture.value
    assert "1.000 of 2 bytes" in picture.value
    control.value = 32
    assert "6.2 % of the weights" in picture.value
    assert "Groups of 32 columns" in picture.value
