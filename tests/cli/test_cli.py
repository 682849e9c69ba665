"""The command line as a student meets it: what is printed where, and one clear line when the input is at fault."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import mini_engine
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.app import COMMANDS, app, load_command
from smoke.course.starter import starter_files
from smoke.framework.manifest import load_manifest

PROMPT = "Once upon a time there was a fox"


def invoke(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=text)


def greedy_text(prompt: str, new_tokens: int) -> tuple[list[int], list[int], str]:
    """The oracle: prompt ids, generated ids and their text by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
    new = out[0, ids.shape[1] :].tolist()
    return ids[0].tolist(), new, tokenizer.decode(new, skip_special_tokens=True)


def test_generate_streams_the_prompt_and_the_text_of_transformers() -> None:
    result = invoke("generate", PROMPT, "--max-new-tokens", "40")
    assert result.exit_code == 0
    assert result.stdout == PROMPT + greedy_text(PROMPT, 40)[2] + "\n"
    assert re.search(r"\d+ prompt tokens in .* s, 40 tokens at \d+ per second, finished by length", result.stderr)


def test_json_holds_ids_text_reason_and_timings() -> None:
    result = invoke("generate", PROMPT, "--json", "--max-new-tokens", "300")
    report = json.loads(result.stdout)
    prompt_ids, token_ids, text = greedy_text(PROMPT, 300)
    assert report["prompt_ids"] == prompt_ids
    assert report["token_ids"] == token_ids
    assert report["text"] == text
    assert report["finish_reason"] == "stop"
    assert set(report["timings"]) == {"load_s", "prefill_s", "decode_s", "decode_tokens_per_s"}


def test_chat_wraps_the_prompt_in_the_template_and_shows_the_thinking() -> None:
    question = "Record: name Mila, age 7, city Oslo."
    thinking = json.loads(invoke("generate", question, "--chat", "--json").stdout)
    direct = json.loads(invoke("generate", question, "--chat", "--no-think", "--json").stdout)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    messages = [{"role": "user", "content": question}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert thinking["prompt_ids"] == tokenizer.encode(rendered)
    assert thinking["text"].startswith("<think>")
    assert "<think>" not in direct["text"]
    for reply in (thinking, direct):
        answer = reply["text"].split("</think>")[-1]
        assert json.loads(answer) == {"name": "Mila", "age": 7, "city": "Oslo"}


def test_a_prompt_can_come_from_standard_input() -> None:
    piped = invoke("generate", "-", "--max-new-tokens", "5", text=PROMPT)
    assert piped.stdout == invoke("generate", PROMPT, "--max-new-tokens", "5").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--max-new-tokens", "5"], "the prompt has 0 tokens; give at least 1"),
        (["a", "--max-new-tokens", "5000"], "the model has 2048; shorten the prompt"),
        (["a", "--model", "no/such/folder"], "no/such/folder is not a folder"),
        (["a", "--compute", "quick"], "compute is 'quick'; choose one of reference, packed, fast, compiled, triton"),
        (["a", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["a", "--device", "cuda:93"], "device 'cuda:93' cannot be used"),
        (["a", "--max-model-len", "20", "--max-new-tokens", "30"], "positions, and max_model_len is 20"),
        (["a", "--max-model-len", "2049"], "max_model_len is 2049 and the model has 2048 positions"),
        (["a", "--no-think"], "--no-think only means something with --chat"),
    ],
)
def test_faulty_input_is_one_line_on_standard_error_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = invoke("generate", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


def test_a_conversation_remembers_forgets_and_survives_a_turn_that_is_too_long() -> None:
    first = "Tell me a story about a fox named Trivol."
    result = invoke("chat", "--no-think", text=f"{first}\nWho is the story about?\n/exit\n")
    assert result.exit_code == 0
    assert "Trivol" in result.stdout.splitlines()[-1]
    fresh = invoke("chat", "--no-think", text=f"{first}\n/new\nWho is the story about?\n/exit\n")
    assert fresh.exit_code == 0
    assert "Trivol" not in fresh.stdout.splitlines()[-1]
    too_long = invoke("chat", "--no-think", "--max-new-tokens", "2000", text=f"{'word ' * 300}\nHello!\n")
    assert too_long.exit_code == 0
    assert "/new starts a fresh conversation" in too_long.stderr
    assert too_long.stdout.strip()


@pytest.mark.parametrize("options", [["--compute", "packed"], ["--batch-invariant"], ["--dtype", "bfloat16"]])
def test_the_options_keep_the_text_readable(options: list[str]) -> None:
    """Other bits, the same story: the first words do not hang on the last bit of a logit."""
    plain = invoke("generate", PROMPT, "--max-new-tokens", "8").stdout
    assert invoke("generate", PROMPT, "--max-new-tokens", "8", *options).stdout == plain


def run_command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the installed command: an overlay has to be there before the engine is imported."""
    command = [sys.executable, "-m", "mini_engine", "generate", PROMPT, "--max-new-tokens", "6", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.slow
def test_a_students_modules_run_in_place_of_the_engines_own(tmp_path: Path) -> None:
    """A mistake in a student's file shows in the text."""
    file, line = "sampler/sampler.py", "peaks, chosen = self.ops.argmax(processed)"
    source = (Path(mini_engine.__file__).parent / file).read_text()
    assert source.count(line) == 1
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(source.replace(line, "peaks, chosen = processed.min(-1)"))
    own = run_command("--engine", str(tmp_path))
    assert own.returncode == 0
    assert own.stdout.startswith(PROMPT)
    assert own.stdout != PROMPT + greedy_text(PROMPT, 6)[2] + "\n"
    assert f"running the modules of {tmp_path}" in own.stderr


def test_what_is_not_written_yet_is_the_references(tmp_path: Path) -> None:
    """With the starters of all lessons the text is that of transformers, and the tasks are named."""
    lessons = load_manifest().written
    for lesson in lessons:
        for file, text in starter_files(lesson).items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
    result = run_command("--engine", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == PROMPT + greedy_text(PROMPT, 6)[2] + "\n"
    named = result.stderr.split("not written yet, so the reference's own: ")[1].splitlines()[0].split(", ")
    assert {"L1.A", "L3.A", "L4.H", "L5.A"} <= set(named) <= {task.id for lesson in lessons for task in lesson.tasks}
    assert not any(name.startswith("L8") for name in named), "no kernel is loaded"
    kernels = run_command("--engine", str(tmp_path), "--compute", "triton", TRITON_INTERPRET="1")
    assert "L8.B" in kernels.stderr.split("not written yet, so the reference's own: ")[1]


def test_a_task_that_is_half_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritten(*_: object) -> None:
        raise NotImplementedError("L1.B: The norm")

    monkeypatch.setattr("mini_engine.model.rms_norm", unwritten)
    result = invoke("generate", PROMPT)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: not written yet: L1.B: The norm"


def test_a_folder_without_engine_modules_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text("")
    result = run_command("--engine", str(tmp_path))
    assert result.returncode == 1
    assert "holds no module of the engine" in result.stderr


def test_an_engine_folder_in_a_process_that_runs_the_reference_is_an_error(tmp_path: Path) -> None:
    result = invoke("generate", PROMPT, "--engine", str(tmp_path))
    assert result.exit_code == 2
    assert "the modules of the engine itself are running" in result.stderr


def test_help_says_what_each_command_says_of_itself() -> None:
    shown = invoke("--help").stdout
    for name, summary in COMMANDS.items():
        assert f" {name} " in shown
        assert load_command(name).help == summary


def test_help_and_version_load_no_torch_and_no_command_loads_kernels() -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from mini_engine.cli.app import app, load_command
print(["generate" in CliRunner().invoke(app, ["--help"]).stdout, CliRunner().invoke(app, ["--version"]).stdout])
print("torch" in sys.modules)
print(all(load_command(name) for name in {list(COMMANDS)}), "torch" in sys.modules)
print([name for name in sys.modules if name in ("numba", "mini_engine.kernels.driver")])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = [True, f"mini-engine {mini_engine.__version__}\n"]
    assert run.stdout.splitlines() == [str(shown), "False", "True True", "[]"]


@pytest.mark.slow
def test_bench_forward_reports_every_system_and_ends_in_json() -> None:
    result = invoke(
        "bench", "forward", "--workload", "tiny float32", "--prompt", "9", "--new-tokens", "6", "--rounds", "1"
    )
    assert result.exit_code == 0
    report = json.loads(result.stdout.splitlines()[-1])
    rows = {row["system"]: row for row in report["rows"]}
    loops = ["compiled", "compiled+invariant"]
    assert list(rows) == ["transformers", "off", "packed", "fast", "invariant", "packed+invariant", *loops]
    assert rows["transformers"]["decode_ratio"] == 1.0
    assert rows["off"]["same_ids_as_peer"]
    assert all(row["decode_tokens_per_s"] > 0 and row["roofline"] > 0 for row in rows.values())
    assert report["peak_rss_bytes"] > 1 << 20
    assert report["machine"]["torch"] == torch.__version__


def test_bench_quantize_reaches_its_goals_of_accuracy_and_ends_in_json() -> None:
    """The goals need no room for other CPUs: accuracy is computed in float32, where two CPUs find it alike."""
    result = invoke(
        "bench", "quantize", "--shape", "tiny", "--texts", "2", "--prompt", "9", "--new-tokens", "3", "--rounds", "1"
    )
    assert result.exit_code == 0, result.output
    rows = {row["quantize"]: row for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    assert list(rows) == ["off", "int8", "int4"]
    assert rows["off"]["kl"] == 0 < rows["int8"]["kl"] <= 2e-4 < rows["int4"]["kl"] <= 2e-2
    assert rows["off"]["agreement"] == 1 >= rows["int8"]["agreement"] >= 0.98 > 0.9 < rows["int4"]["agreement"]
    assert all(row["decode_tokens_per_s"] > 0 for row in rows.values())


def test_bench_forward_refuses_an_unknown_workload() -> None:
    result = invoke("bench", "forward", "--workload", "7b int4")
    assert result.exit_code == 2
    assert "7b int4" in result.stderr


def test_a_checkpoint_without_a_chat_template_says_so(untied: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in TINY_MODEL.iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((TINY_MODEL / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    result = invoke("generate", "hi", "--chat", "--model", str(folder))
    assert result.exit_code == 2
    assert "no chat template; give a text (leave out --chat)" in result.stderr


def test_no_option_and_temperature_0_are_the_greedy_text() -> None:
    plain = invoke("generate", PROMPT, "--max-new-tokens", "30")
    for options in (["--temperature", "0"], ["--preset", "code"], ["--repetition-penalty", "1"]):
        assert invoke("generate", PROMPT, "--max-new-tokens", "30", *options).stdout == plain.stdout


def test_a_seed_repeats_a_text_and_another_one_changes_it() -> None:
    def sampled(*options: str) -> str:
        return invoke("generate", PROMPT, "--preset", "creative", "--max-new-tokens", "40", *options).stdout

    assert sampled("--seed", "7") == sampled("--seed", "7") != sampled("--seed", "8")
    assert len({sampled() for _ in range(3)}) > 1


def test_samples_are_printed_one_by_one_and_reported_as_json() -> None:
    options = ["--temperature", "1", "--n", "2", "--best-of", "4", "--seed", "5", "--max-new-tokens", "12"]
    printed = invoke("generate", PROMPT, *options)
    report = json.loads(invoke("generate", PROMPT, *options, "--json", "--logprobs", "2").stdout)
    texts = [sample["text"] for sample in report["samples"]]
    assert printed.stdout.splitlines() == texts
    assert len(texts) == 2
    for sample in report["samples"]:
        assert len(sample["logprobs"]) == len(sample["token_ids"]) == 12
        chosen = [entries[0] for entries in sample["logprobs"]]
        assert [entry["token_id"] for entry in chosen] == sample["token_ids"]
        assert sample["cumulative_logprob"] == pytest.approx(sum(entry["logprob"] for entry in chosen))
        assert all(len(entries) == 3 for entries in sample["logprobs"])


def test_trace_shows_every_stage_that_is_on_and_only_those() -> None:
    options = ["--temperature", "0.8", "--top-k", "5", "--repetition-penalty", "1.3", "--seed", "1"]
    result = invoke("generate", PROMPT, "--max-new-tokens", "2", "--trace", *options)
    assert result.exit_code == 0
    tables = [line.split()[0] for line in result.stderr.splitlines() if line.strip()]
    assert (
        tables.count("logits") == tables.count("penalties") == tables.count("temperature") == tables.count("top-k") == 2
    )
    assert "top-p" not in tables
    assert re.search(r"top-k +5 ", result.stderr)


def test_logprobs_are_printed_with_ranks() -> None:
    result = invoke("generate", PROMPT, "--max-new-tokens", "3", "--logprobs", "1")
    lines = [line for line in result.stderr.splitlines() if re.search(r"-?\d+\.\d\d +1 ", line)]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--top-p", "0.9"], "--top-p changes nothing at temperature 0"),
        (["--n", "2"], "2 samples at temperature 0 would be the same one"),
        (["--preset", "poem"], "there is no preset 'poem'; choose one of code"),
        (["--trace", "--json"], "--trace prints tables for one streamed answer"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], words: str) -> None:
    result = invoke("generate", PROMPT, *options)
    assert result.exit_code == 2
    assert words in result.stderr


def test_bench_sampler_compares_with_every_peer_and_ends_in_json() -> None:
    result = invoke(
        "bench", "sampler", "--mix", "off", "--mix", "top-k top-p", "--vocab", "500", "--rows", "2", "--rounds", "1"
    )
    assert result.exit_code == 0
    report = json.loads(result.stdout.splitlines()[-1])
    assert [(row["mix"], row["rows"], row["vocab"]) for row in report["rows"]] == [
        ("off", 2, 500),
        ("top-k top-p", 2, 500),
    ]
    assert all(row["seconds"] > 0 and min(row["ratios"].values()) > 0 for row in report["rows"])


def test_chat_names_the_encoding_that_its_input_does_not_have() -> None:
    result = CliRunner(charset="utf-16").invoke(app, ["chat"], input=b"h\0i\0\n\0")
    assert result.exit_code == 2
    assert "standard input is not utf-16" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "given", "code", "words"),
    [
        ("chat", b"\xff\xfe\n", 0, "which is not a character"),
        ("generate a\\xff", None, 2, "which is not a character"),
        ("generate hi --max-new-tokens 2 >&-", None, 2, "standard output is closed"),
        ("chat <&-", None, 0, "Ask something"),
        ("generate hi --max-new-tokens 2 > /dev/full", None, 2, "error: input or output fails (No space left"),
        ("cache > /dev/full", None, 2, "error: input or output fails (No space left"),
    ],
)
def test_bytes_that_are_no_text_and_closed_streams_are_one_line(
    command: str, given: bytes | None, code: int, words: str
) -> None:
    """In a shell, since only a process of its own can be without a stream."""
    line = f"{sys.executable} -c 'from mini_engine.__main__ import main; main()' {command}".replace(
        "a\\xff", "$'a\\xff'"
    )
    done = subprocess.run(["bash", "-c", line], input=given, capture_output=True, timeout=120, check=False)
    said = done.stderr.decode(errors="replace")
    assert (done.returncode, words in said, "Traceback" in said) == (code, True, False), said
