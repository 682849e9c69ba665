"""Figures: they hold the data they are given, say the right numbers, stay readable, and change nothing they look at."""

import html
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3ForCausalLM

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.driver import GreedyDriver
from mini_engine.llm import load_driver, load_model
from mini_engine.model import rms_norm
from mini_engine.viz import decoding, difference, forward, paging, peer, tokens
from mini_engine.viz.decoding.measure import Crossroads, StepCost
from mini_engine.viz.difference import Difference
from mini_engine.viz.figure import Figure
from mini_engine.viz.forward.measure import ErrorCurve
from mini_engine.viz.paging.measure import BatchCost, Cost
from tests.support.figures import check_drawn, check_figures, texts

IDS = [7, 100, 3, 3, 58, 121, 0, 44]


def distribution_of(*probabilities: float) -> decoding.measure.StepDistribution:
    return decoding.measure.describe_step(torch.tensor(probabilities).log(), k=3)


# Probabilities whose entropies and gaps are whole or half bits.
STEPS = [
    distribution_of(0.5, 0.25, 0.125, 0.125),  # entropy 1.75, gap 1
    distribution_of(0.0, 1.0, 0.0, 0.0),  # entropy 0, gap infinite in exact arithmetic
    distribution_of(0.25, 0.25, 0.25, 0.25),  # entropy 2, gap 0
    distribution_of(0.0625, 0.9375, 0.0, 0.0),
]
STEPS[1] = decoding.measure.StepDistribution([1, 0, 2], [0.98, 0.01, 0.01], 0.25, math.log2(98))  # a finite gap to draw
TAKEN = ["␣a", "␣fox", ".", "$x$"]


def batch_of_three():
    """Sequences a (3 new after 2), b (1 after 3) and c (2 new) in scattered pages of 2."""
    return pack_batch(
        [SequenceChunk([1, 2, 3], 2, [4, 0, 6]), SequenceChunk([4], 3, [5, 1]), SequenceChunk([5, 6], 0, [3])], 2
    )


@pytest.fixture(scope="module")
def run(untied):
    return forward.trace_forward(load_model(untied, EngineConfig()), IDS)


DIFFERENCES = [Difference("one", 0.13, 3, 5, 1), Difference("two", 0.0, 0, 5, 0), Difference("three", 1e-6, 5, 5, 0)]
COSTS = [
    BatchCost("prompts", Cost(30, 400, 64, 0.002), Cost(120, 1600, 128, 0.008)),
    BatchCost("decodes", Cost(4, 50, 64, 0.00285), Cost(4, 100, 128, 0.003)),  # 95 %: the label lies on the line of 100
]


@pytest.fixture(scope="module")
def figures(run) -> dict[str, Figure]:
    names = [f"t{i}" for i in range(len(IDS))]
    curves = [ErrorCurve("first", [0.0, 1e-7, 2e-7, 2e-7, 3e-7]), ErrorCurve("second", [0.0] * 5)]
    fork = Crossroads(2, 0.5, (0.5, 0.35), [1], [2])
    return {
        "residual_sizes": forward.residual_sizes(run, names),
        "attention_overview": forward.attention_overview(run),
        "attention_map": forward.attention_map(run.weights[0][0], names, "Layer 0, head 0"),
        "error_growth": forward.error_growth(curves, run.stages),
        "difference_chart": forward.difference_chart(DIFFERENCES, "Title"),
        "page_map": paging.page_map({"a": [4, 0, 6], "b": [5, 1]}, {"a": 5, "b": 4}, 8, 2),
        "slot_map": paging.slot_map(batch_of_three()),
        "packed_mask": paging.packed_mask(batch_of_three()),
        "mask_alignment": paging.mask_alignment(3, 8),
        "padding_cost": paging.padding_cost(COSTS),
        "bits_table": paging.bits_table({"off": DIFFERENCES, "on": DIFFERENCES[1:2] * 3}),
        "top_tokens": decoding.top_tokens(STEPS, [["x", "y", "z"]] * 4, [0, 1, 3], TAKEN),
        "probability_bars": decoding.probability_bars(STEPS, TAKEN),
        "uncertainty": decoding.uncertainty(STEPS, TAKEN),
        "crossroads_chart": decoding.crossroads_chart([fork], [("a b", "c " * 22, "d")]),
        "cache_cost": decoding.cache_cost([StepCost(8, 0.004), StepCost(1, 0.001)], [StepCost(8, 0.004)] * 2),
    }


# --------------------------------------------------------------------------------------------- every figure is readable


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, forward.draw, paging.draw, decoding.draw)


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "cache_cost": (
            [8, 1, 4],
            "with a KV cache 9 tokens are fed in 5 ms, without one 16 in 8 ms: 1.8 times",
        ),
        "uncertainty": ([1.75, 2, 1], "The most open is step 2 ('.') with 2.00 bits."),
        "difference_chart": ([0.13, 1e-6], "one: 3 of 5 rows differ, by 1.3e-01 at most, and 1 greedy choice changed."),
        "error_growth": ([1e-7, 3e-7], "second: the same bits everywhere."),
        "crossroads_chart": ([50, 35], "Step 2, after 'a b': taken 'c c c"),
        "padding_cost": ([25, 50, 100], "prompts: 30 rows instead of 120, 400 scores instead of 1600, 64 slots"),
    }
    check_drawn(figures, drawn)


def test_display_shows_the_picture_with_the_summary_as_its_text():
    figure = Figure(forward.difference_chart(DIFFERENCES, "Title").figure, 'a "quoted" <b> & summary. 2.5 is more.')
    shown = figure._repr_html_()
    assert figure.caption == 'a "quoted" <b> & summary.'
    assert shown.count(html.escape(figure.summary)) == 1
    assert shown.endswith(f"<p>{html.escape(figure.caption)}</p>")
    assert "<b>" not in shown
    assert repr(figure) == str(figure) == figure.summary
    assert figure.png().startswith(b"\x89PNG")


# --------------------------------------------------------------------------------------------------- L1: looking inside


def test_trace_agrees_with_what_transformers_reports(untied):
    """Weights and residual stream are those that transformers returns for the same checkpoint."""
    theirs = Qwen3ForCausalLM.from_pretrained(untied, attn_implementation="eager")
    with torch.inference_mode():
        out = theirs(torch.tensor([IDS]), output_attentions=True, output_hidden_states=True)
    ours = forward.trace_forward(load_model(untied, EngineConfig()), IDS)
    for mine, other in zip(ours.weights, out.attentions, strict=True):
        torch.testing.assert_close(mine, other[0], rtol=0, atol=1e-6)
    for mine, other in zip(ours.residual[:-1:2], out.hidden_states[:-1], strict=True):  # the last one is normed there
        torch.testing.assert_close(mine, other[0], rtol=1e-6, atol=1e-6)
    assert ours.stages == ["embedding", "attn 0", "mlp 0", "attn 1", "mlp 1"]
    for before, update, after in zip(ours.residual, ours.updates, ours.residual[1:], strict=False):
        assert torch.equal(before + update, after)


def test_rows_go_through_a_product_one_by_one():
    calls = []
    counting = forward.RowByRow()
    counting.inner = SimpleNamespace(linear=lambda w, bias: lambda row: calls.append(len(row)) or row @ w.T)
    counting.linear(torch.eye(48))(torch.zeros(7, 48))
    assert calls == [1] * 7


def test_what_a_block_adds_lies_over_the_stream(figures):
    axes = figures["residual_sizes"].figure.axes[0]
    added = [line for line in axes.lines if line.get_label().startswith("added by")]
    stream = [each for each in (*axes.lines, *axes.collections) if each not in added]
    assert (len(added), len(stream)) == (2, 2)
    assert min(line.get_zorder() for line in added) > max(each.get_zorder() for each in stream)


def test_fused_norm_is_the_same_formula():
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 2, 12)
    torch.testing.assert_close(forward.measure.fused_rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6))


def test_strongest_head_is_the_one_with_most_weight():
    weights = [torch.zeros(3, 4, 4) for _ in range(2)]
    weights[0][2, -1, 1] = 0.6
    weights[1][1, -1, 1] = 0.4
    weights[1][1, -1, 2] = 0.3
    weights[1][0, 2, 1] = 1.0
    made = forward.measure.ForwardTrace([], [], weights, torch.zeros(0))
    assert forward.strongest_head(made, -1, [1]) == (0, 2)
    assert forward.strongest_head(made, -1, [1, 2]) == (1, 1)


def test_attention_map_says_where_the_last_token_looks():
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.7, 0.1, 0.2]])
    figure = forward.attention_map(weights, ["<a>", "␣b", "c"], "Head")
    assert figure.summary == (
        "The last of 3 tokens, 'c', looks at '<a>' at position 0 (70%), 'c' at position 2 (20%), "
        "'␣b' at position 1 (10%). Head."
    )
    image = figure.figure.axes[0].images[0].get_array()
    assert image.mask.tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert "last token looks at <a>: 70%" in texts(figure)


def test_overview_names_the_most_focused_head():
    even = torch.full((2, 2), 0.5)
    made = forward.measure.ForwardTrace(
        [], [], [torch.stack([even, even]), torch.stack([torch.eye(2), even])], torch.zeros(0)
    )
    assert "4 heads in 2 layers" in forward.attention_overview(made).summary
    assert "head is layer 1 head 0: on average a token gives 100%" in forward.attention_overview(made).summary


def test_differences_are_counted_by_row():
    a = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 0.5]])
    b = torch.tensor([[1.0, 2.0], [3.0, 3.5], [0.0, 0.25]])
    assert difference.compare_logits("x", a, b) == Difference("x", 2.5, 2, 3, 1)
    assert difference.compare_logits("x", a, a.clone()) == Difference("x", 0.0, 0, 3, 0)
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(2, 2\)"):
        difference.compare_logits("x", a, b[:2])
    assert [d.name for d in difference.smallest_first(DIFFERENCES)] == ["two", "three", "one"]
    assert forward.measure.relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(0.2)
    assert difference.same_bits(a, a.clone())
    assert not difference.same_bits(a, a.double())


# ------------------------------------------------------------------------------------------------- L2: where things lie


def test_slot_map_says_the_slot_mapping(figures):
    """Slots by hand: a2, a3 in page 0, a4 in page 6; b3 in page 1; c0, c1 in page 3; two slots a page."""
    summary = figures["slot_map"].summary
    assert "cu_seqlens_q is [0, 3, 4, 6]: 3 sequences in 6 packed rows" in summary
    for row, slot in enumerate([0, 1, 12, 3, 6, 7]):
        assert f"row {row} to slot {slot}" in summary
    assert {"a2", "a3", "a4", "b3", "c0", "c1", "page 6"} <= set(texts(figures["slot_map"]))
    assert "page 4" not in texts(figures["slot_map"]), "nothing is written there"


def test_packed_mask_has_a_dot_for_every_pair_that_is_seen(figures):
    """Rows a2 a3 a4, b3, c0 c1 against keys a0 to a4, b0 to b3, c0 c1; what a row sees, by hand."""
    axes = figures["packed_mask"].figure.axes[0]
    seen = {0: range(3), 1: range(4), 2: range(5), 3: range(5, 9), 4: range(9, 10), 5: range(9, 11)}
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"}
    assert dots == {(key + 0.5, row + 0.5) for row, keys in seen.items() for key in keys}
    assert "6 packed rows against 11 keys are 66 pairs, and 43 of them" in figures["packed_mask"].summary
    assert "Of the other 23, 19 are seen and 4 are future" in figures["packed_mask"].summary


def test_mask_alignment_numbers(figures):
    assert "sees 6 keys and the last sees all 8. Aligned top-left, they see 1 and 3: 15 of 21 pairs are lost" in (
        figures["mask_alignment"].summary
    )
    assert paging.mask_alignment(4, 4).summary.endswith("they see 1 and 4: the same.")


def test_measured_padding_counts_like_brute_force(untied):
    driver = load_driver(untied, EngineConfig(page_size=4))
    cost = paging.measure_padding(driver, "x", [(0, 5), (3, 2), (9, 1)])
    assert (cost.packed.rows, cost.packed.scores, cost.packed.slots) == (8, 25 + 10 + 10, 8 + 8 + 12)
    assert (cost.padded.rows, cost.padded.scores, cost.padded.slots) == (15, 3 * 5 * 14, 3 * 16)
    assert cost.packed.seconds > 0


# ---------------------------------------------------------------------------------------------------- L3: distributions


def test_distribution_of_known_probabilities():
    first, _, even, sure = STEPS
    assert first.token_ids == [0, 1, 2]
    assert first.probabilities == pytest.approx([0.5, 0.25, 0.125])
    assert (first.entropy_bits, first.gap_bits) == pytest.approx((1.75, 1.0))
    assert (even.entropy_bits, even.gap_bits) == pytest.approx((2.0, 0.0))
    assert even.token_ids == [0, 1, 2], "the lowest id wins a tie, as argmax does"
    assert sure.token_ids[:2] == [1, 0]
    assert decoding.max_entropy_bits(torch.zeros(8)) == 3.0


def test_closest_and_contrasting_steps():
    assert decoding.closest_steps(STEPS, 2) == [2, 0]
    assert decoding.contrasting_steps(STEPS, 2) == [1, 2]
    assert decoding.contrasting_steps(STEPS, 9) == [0, 1, 2, 3]


def test_probability_bars_stack_to_one_hundred(figures):
    (axes,) = figures["probability_bars"].figure.axes
    heights = torch.tensor([[bar.get_height() for bar in box.patches] for box in axes.containers])
    assert heights.sum(0).tolist() == pytest.approx([100] * 4, abs=1e-3)
    assert heights[0].tolist() == pytest.approx([50, 98, 25, 93.75])
    assert heights[3].tolist() == pytest.approx([12.5, 0, 25, 0], abs=1e-3)
    summary = figures["probability_bars"].summary
    assert "In 2 of 4 steps the taken token had more than 90 %" in summary
    assert "its mean is 67%, the runner-up's 14%" in summary
    assert "The lowest taken probability is 25%, at step 2 ('.')" in summary
    assert [label.get_text() for label in axes.get_xticklabels()] == TAKEN, "a dollar sign is no formula"


def test_the_other_way_continues_greedily_from_the_runner_up(untied):
    driver = load_driver(untied)
    steps = list(driver.steps(IDS, 8))
    described = decoding.describe_steps(steps)
    assert [d.token_ids[0] for d in described] == [step.token_id for step in steps]
    fork = decoding.take_other_way(driver, IDS, steps, described, 3, length=4)
    runner_up = steps[3].logits.topk(2).indices[1].item()
    before = IDS + [step.token_id for step in steps[:3]]
    expected = peer.Peer(untied).greedy([*before, runner_up], 3, driver.eos_token_ids)
    assert fork.other == [runner_up, *expected]
    assert fork.taken == [step.token_id for step in steps[3:7]]
    ends = GreedyDriver(driver.model, driver.config, frozenset([runner_up]))
    assert decoding.take_other_way(ends, IDS, steps, described, 3, length=4).other == [runner_up]


def test_measured_decode_takes_the_best_of_its_runs_step_by_step(untied, monkeypatch):
    runs = [[5.0, 1.0], [3.0, 2.0], [4.0, 4.0]]
    clock = iter([time for run in runs for seconds in run for time in (10.0, 10.0 + seconds)])
    monkeypatch.setattr(decoding.measure, "perf_counter", lambda: next(clock))
    costs = decoding.measure_decode(load_driver(untied), IDS, 2, use_kv_cache=True)
    assert [cost.seconds for cost in costs] == [3.0, 1.0]


# ---------------------------------------------------------------------------------------------------------- token names


def test_token_names_are_visible_and_whole():
    tokenizer = load_tokenizer(TINY_MODEL)
    ids = tokenizer.encode("a fox\n\té")
    names = tokens.token_names(tokenizer, ids)
    assert "␣fox" in names
    assert not any(mark in name for name in names for mark in (" ", "\n", "\t", "\N{REPLACEMENT CHARACTER}"))


def test_token_at_finds_where_a_word_begins():
    tokenizer = load_tokenizer(TINY_MODEL)
    ids = tokens.chat_ids(tokenizer, "Mila has a ball. Trozeka has a lamp. Who is Trozeka?")
    at = tokens.token_at(tokenizer, ids, "Trozeka")
    assert tokenizer.decode(ids[at:]).startswith((" Trozeka has a lamp", "Trozeka has a lamp"))
    assert tokens.token_at(tokenizer, ids, "<|im_start|>") == 0
    with pytest.raises(ValueError, match="'Bob' does not occur"):
        tokens.token_at(tokenizer, ids, "Bob")


def test_chat_ids_are_the_template_without_thinking():
    tokenizer = load_tokenizer(TINY_MODEL)
    text = tokenizer.decode(tokens.chat_ids(tokenizer, "Hello!"))
    assert text == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(tokens.chat_ids(tokenizer, "Hello!", "Hi")) == text + "Hi"


def test_crossroads_texts_have_whole_words_before_and_bounded_length():
    tokenizer = load_tokenizer(TINY_MODEL)
    generated = tokenizer.encode("Once upon a time there was a fox named Mila who lived in a small town.")
    step = len(generated) - 3
    fork = Crossroads(step, 0.1, (0.5, 0.4), generated[step:], tokenizer.encode(" word" * 30))
    ((before, taken, other),) = decoding.crossroads_texts(tokenizer, generated, [fork])
    assert tokenizer.decode(generated[:step]).endswith(" " + before)
    assert len(before.split()) >= 3
    assert taken == tokenizer.decode(generated[step:]).strip()
    assert len(other) == decoding.measure.LABEL_LENGTH
