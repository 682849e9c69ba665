"""``measure`` and ``progress``: counts that can be worked out by hand, on the reference and on starters."""

import math
from functools import cache

import pytest
import typer
from typer.testing import CliRunner

from mini_engine.checkpoint import TINY_MODEL, load_config, load_tokenizer
from smoke.commands.measure import entry_of, register, said
from smoke.course.measure import ASKED, BEGINNINGS, LOADS, NAMES, NEW_TOKENS, OPENING, Side, in_turns
from smoke.course.starter import empty, starter_files
from smoke.framework.manifest import COURSE, ENGINE, load_manifest


@cache
def measured(lesson):
    """Run a load on the reference; the command does so in a process of its own, over a student's modules."""
    return [side.figures for side in LOADS[lesson].run(None)]


def test_a_storys_figures_are_those_that_are_measured():
    for lesson in load_manifest().written:
        if lesson.id in LOADS and lesson.id != "L8":  # how many operations torch starts depends on its version
            words = said(lesson.id, entry_of([{"figures": figures} for figures in measured(lesson.id)]))
            story = (COURSE / lesson.text_file).read_text()
            assert f"`python -m smoke measure {lesson.id}`, without and with: {words.partition(':')[0]}" in story


def lengths(texts):
    """The number of tokens of each text, by the tokenizer's own call."""
    return [len(load_tokenizer(TINY_MODEL)(text).input_ids) for text in texts]


def test_rows_are_those_of_whole_texts_and_of_packed_steps():
    without, packed = measured("L2")
    own = lengths(BEGINNINGS)
    assert without["rows computed"] == sum(length + token for length in own for token in range(NEW_TOKENS))
    assert packed["rows computed"] == sum(own) + len(own) * (NEW_TOKENS - 1)


def test_a_kept_key_saves_all_rows_but_one():
    without, kept = measured("L3")
    (length,) = lengths([OPENING * 2])
    assert without["rows computed"] == sum(length + token for token in range(NEW_TOKENS))
    assert kept["rows computed"] == length + NEW_TOKENS - 1
    assert LOADS["L3"].gain(30, 10) == 3


def test_drawn_stories_differ_and_the_likeliest_is_one():
    greedy, drawn = measured("L4")
    assert (greedy["different stories"], drawn["different stories"]) == (1, 8)


def test_a_batch_takes_as_many_steps_as_its_longest_answer():
    alone, together = measured("L5")
    assert alone["steps"] == sum(6 * (place + 1) for place in range(8))
    assert together["steps"] == 48


def test_a_cached_prompt_computes_whole_pages_once():
    without, cached = measured("L6")
    own = lengths([OPENING + name for name in NAMES])
    shared = (lengths([OPENING])[0] // 16) * 16
    assert without["prompt tokens computed"] == sum(own)
    assert cached["prompt tokens computed"] <= sum(own) - 7 * (shared - 16)


def test_masks_make_every_answer_valid():
    asked, masked = measured("L7")
    assert asked["valid answers"] == 0
    assert masked["valid answers"] == 8


def test_kernels_start_fewer_operations():
    pytest.importorskip("triton", reason="Triton is built for Linux alone")
    torch_alone, kernels = measured("L8")
    assert kernels["operations in a step"] < torch_alone["operations in a step"] / 2


def test_drafts_save_steps_and_a_step_gives_one_token_without():
    without, drafted = measured("L10")
    answers = [f"<think>\n{question[: question.index('.') + 1]}" for question in ASKED]
    assert without["steps"] > sum(lengths(answers))
    assert drafted["steps"] < without["steps"] / 1.3


def test_of_several_turns_the_fastest_counts():
    """The machine is busy now in one side's turn, now in the other's."""
    times = {"before": [5.0, 80.0, 70.0], "after": [90.0, 7.0, 60.0]}
    order = []

    def run(name):
        order.append(name)
        return Side(name, {"steps": 3, "tokens/s": times[name][order.count(name) - 1]})

    sides = in_turns(lambda: run("before"), lambda: run("after"))
    assert [side.figures["tokens/s"] for side in sides] == [80.0, 90.0]
    assert order == ["before", "after"] * 3


def test_weights_in_8_bits_have_half_the_bytes():
    plain, rounded = measured("L11")
    config = load_config(TINY_MODEL)
    shapes = [shape for shape in config.weight_shapes().values() if len(shape) == 2]
    norms = sum(size for (size, *others) in config.weight_shapes().values() if not others)
    numbers, rows = sum(map(math.prod, shapes)), sum(count for count, _ in shapes)
    both = 2 * norms + 4 * config.head_dim // 2  # the rotary embedding has a float32 for each pair of channels
    assert plain["kB of weights"] == (2 * numbers + both) // 1000
    assert rounded["kB of weights"] == (numbers + 2 * rows + both) // 1000


def test_each_of_two_ranks_has_half_of_every_layer_and_half_of_the_head():
    alone, shared = measured("L12")
    shapes = load_config(TINY_MODEL).weight_shapes()
    layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    norms = sum(size for (size, *others) in shapes.values() if not others)
    table = math.prod(shapes["model.embed_tokens.weight"])
    assert alone["kB of weights a process"] == 4 * (layers + norms + table) // 1000
    assert shared["kB of weights a process"] == 4 * (layers // 2 + norms + table + table // 2) // 1000


def run_command(*words):
    """Run a command as the student does; return what it prints."""
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, list(words))
    return result.output


def test_a_measurement_of_own_code_is_remembered_and_drawn(tmp_path):
    (tmp_path / "driver.py").write_text((ENGINE / "driver.py").read_text())
    shown = run_command("measure", "L3", "--engine", str(tmp_path))
    assert "prefill once, then one row a token" in shown
    drawn = run_command("progress", "--engine", str(tmp_path)).splitlines()
    assert len(drawn) == len(LOADS) + 1
    assert "█" in drawn[1]
    assert "rows computed instead of" in drawn[1]
    assert all("█" not in line for number, line in enumerate(drawn) if number != 1)
    assert drawn[-1].startswith("A full bar is ")


def test_what_is_not_written_is_the_references_and_not_remembered(tmp_path):
    for file, text in starter_files(load_manifest().lesson("L3")).items():
        (tmp_path / file).write_text(text)
    assert "not written yet, so from the reference: L3.A, L3.B" in run_command(
        "measure", "L3", "--engine", str(tmp_path)
    )
    assert "█" not in run_command("progress", "--engine", str(tmp_path))


def test_an_optional_task_that_is_not_written_hides_no_measurement(tmp_path):
    lesson = load_manifest().lesson("L6")
    for file in lesson.files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(empty(file, lesson.optional))
    assert "not written yet, so from the reference: L6." in run_command("measure", "L6", "--engine", str(tmp_path))
    assert "prompt tokens computed instead of" in run_command("progress", "--engine", str(tmp_path))
