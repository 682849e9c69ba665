"""What a checkpoint stores as defaults of requests: who takes it, who does not, and that neither is silent."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GenerationConfig, Qwen3ForCausalLM
from typer.testing import CliRunner, Result

from mini_engine.checkpoint import TINY_MODEL, load_eos_ids
from mini_engine.cli.app import app
from mini_engine.hf_files import DEFAULTS
from mini_engine.llm import LLM, load_defaults
from mini_engine.sampler.params import SamplingParams

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}  # generation_config.json of Qwen3-0.6B
SHORT = ("--max-new-tokens", "12")


def store(folder: Path, **fields: object) -> Path:
    """Copy the embedded checkpoint with these fields in its generation_config.json."""
    made = Path(shutil.copytree(TINY_MODEL, folder / "model"))
    file = made / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return made


def invoke(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=text)


def of_transformers(folder: Path) -> dict[str, object]:
    """The oracle: class names and numbers of the processors that transformers puts together for ``generate``."""
    model = Qwen3ForCausalLM.from_pretrained(folder)
    config, _ = model._prepare_generation_config(None)
    found = model._get_logits_processor(config, input_ids_seq_length=3)
    names = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p"}
    names |= {"MinPLogitsWarper": "min_p", "RepetitionPenaltyLogitsProcessor": "repetition_penalty"}
    inside = {"repetition_penalty": "penalty"}
    known = {names[type(each).__name__]: each for each in found}
    return {name: getattr(each, inside.get(name, name)) for name, each in known.items()} | (
        {} if config.do_sample else {"temperature": 0.0}
    )


STORED = [
    {},
    QWEN,
    {**QWEN, "repetition_penalty": 1.05},
    {**QWEN, "do_sample": False, "repetition_penalty": 1.05},
    {"do_sample": True, "top_k": 0, "min_p": 0.1},
    {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.8},
    {"do_sample": False},
    {"repetition_penalty": 1.2},
]


@pytest.mark.parametrize("fields", STORED, ids=str)
def test_the_stored_defaults_are_those_that_transformers_applies(tmp_path: Path, fields: dict[str, object]) -> None:
    """Where the file says whether to draw, all engines agree."""
    folder = store(tmp_path, **fields)
    ours = SamplingParams(**load_defaults(folder, "auto"))
    theirs = SamplingParams(**{"temperature": 1.0, **of_transformers(folder)})
    assert ours == theirs
    assert load_eos_ids(folder) == load_eos_ids(TINY_MODEL)
    assert load_defaults(folder, "none") == {}


def test_a_temperature_without_do_sample_is_taken_as_vllm_and_sglang_do(tmp_path: Path) -> None:
    """Both read these five fields and no do_sample: ``ModelConfig.get_diff_sampling_param``."""
    fields = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}
    assert load_defaults(store(tmp_path, **fields), "auto") == fields


def test_stop_strings_are_stops_and_config_json_counts_where_the_other_file_is_absent(tmp_path: Path) -> None:
    folder = store(tmp_path, stop_strings=["\n", "fox"], max_new_tokens=4)
    assert load_defaults(folder, "auto") == {"stop": ["\n", "fox"]}
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"do_sample": True, "temperature": 0.6, "top_k": 20}))
    assert of_transformers(folder) == load_defaults(folder, "auto")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("watermarking_config", {"greenlist_ratio": 0.3}),
        ("typical_p", 0.9),
        ("epsilon_cutoff", 0.001),
        ("eta_cutoff", 0.001),
        ("encoder_repetition_penalty", 1.2),
        ("min_new_tokens", 3),
        ("num_beams", 2),
        ("num_return_sequences", 2),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    folder = store(tmp_path, **{field: value})
    with pytest.raises(ValueError, match=rf"generation_config.json has {field} .*; this engine does not take it"):
        load_eos_ids(folder)


def test_every_field_at_the_defaults_of_transformers_asks_for_nothing(tmp_path: Path) -> None:
    whole = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()
    folder = store(tmp_path, **{name: value for name, value in whole.items() if not name.endswith("_token_id")})
    load_eos_ids(folder)
    assert SamplingParams(**load_defaults(folder, "auto")) == SamplingParams()


def test_a_stored_value_that_no_request_can_have_is_named_by_those_who_take_it(tmp_path: Path) -> None:
    folder = store(tmp_path, temperature=-1.0)
    with pytest.raises(ValueError, match=r"model stores defaults that cannot be taken: temperature is -1"):
        load_defaults(folder, "auto")
    with pytest.raises(ValueError, match=r"generation_config is 'of'; choose one of auto, none"):
        load_defaults(folder, "of")
    (folder / "generation_config.json").write_text('{"top_k": "20"}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_k is '20'"):
        load_defaults(folder, "auto")


ODD = [None, "", "0.7", [], [0.7], {}, True, -1, 10**400, 1e999, float("nan"), "\ud800", 2**63]
TAKEN: dict[str, list[object]] = {
    "do_sample": [True],
    "temperature": [],
    "top_k": [-1, 10**400, 2**63],
    "top_p": [],
    "min_p": [],
    "repetition_penalty": [],
    "stop_strings": ["0.7", [], "\ud800"],
    "eos_token_id": [[]],
    "num_beams": [],
}


@pytest.mark.parametrize("field", TAKEN)
def test_an_odd_value_is_named_where_no_request_can_have_it(tmp_path: Path, field: str) -> None:
    """A ``null`` is a field that is not there."""
    folder = store(tmp_path)
    file = folder / "generation_config.json"
    taken, words = list[object](), list[str]()
    for value in ODD:
        file.write_text(json.dumps({field: value}))
        try:
            load_eos_ids(folder)
            SamplingParams(**load_defaults(folder, "auto"))
        except ValueError as error:
            words.append(str(error))
        else:
            taken.append(value)
    assert [said for said in words if not re.search(rf"{field}|{DEFAULTS.get(field)}", said)] == []
    assert list(map(repr, taken)) == list(map(repr, [None, *TAKEN[field]]))


def test_chats_given_to_llm_take_them_and_texts_and_own_parameters_do_not(tmp_path: Path) -> None:
    folder = store(tmp_path, do_sample=True, temperature=0.9, repetition_penalty=1.3, stop_strings=" was")
    with LLM(folder) as llm, LLM() as plain:
        taken = SamplingParams(temperature=0.9, repetition_penalty=1.3, stop=" was")
        assert llm.chat_params == taken
        seen = list[SamplingParams]()
        add = llm.engine.add_request
        llm.engine.add_request = lambda ids, params, *more, **options: (  # type: ignore[method-assign]
            seen.append(params),
            add(ids, params, *more, **options),
        )[1]
        with pytest.warns(UserWarning, match="greedily"):
            llm.generate([CHAT, "A fox", [5, 6]])
        assert seen == [taken, SamplingParams(), SamplingParams()]
        own = SamplingParams(max_new_tokens=9)
        assert llm.generate([CHAT], own)[0].token_ids == plain.generate([CHAT])[0].token_ids[:9]
        seeded = replace(taken, seed=3, max_new_tokens=20)
        llm.chat_params = seeded
        streamed = [delta.token_id for delta in llm.stream(CHAT) if delta.token_id is not None]
        assert streamed == plain.generate(CHAT, seeded)[0].token_ids
    with LLM(folder, generation_config="none") as llm:
        assert llm.chat_params == SamplingParams()


def test_the_command_chat_takes_them_and_says_so(tmp_path: Path) -> None:
    folder = str(store(tmp_path, **QWEN))
    talk = f"{CHAT[0]['content']}\n"
    took = invoke("chat", "--model", folder, "--seed", "5", *SHORT, text=talk)
    options = ("--temperature", "0.6", "--top-k", "20", "--top-p", "0.95", "--seed", "5", *SHORT)
    assert took.stdout == invoke("chat", *options, text=talk).stdout != invoke("chat", *SHORT, text=talk).stdout
    said = "the checkpoint's defaults are taken: temperature 0.6, top_k 20, top_p 0.95; --generation-config none turns"
    assert said in took.stderr
    off = invoke("chat", "--model", folder, "--generation-config", "none", *SHORT, text=talk)
    assert off.stdout == invoke("chat", *SHORT, text=talk).stdout
    assert "checkpoint's defaults" not in off.stderr
    cold = invoke("chat", "--model", folder, "--temperature", "0", *SHORT, text=talk)
    assert cold.stdout == off.stdout
    assert "are taken: top_k 20, top_p 0.95;" in cold.stderr
    assert invoke("chat", "--model", folder, "--preset", "code", *SHORT, text=talk).stdout == off.stdout
    for more in ([], ["--preset", "code"]):
        wrong = invoke("chat", "--generation-config", "of", *more, text=talk)
        assert "choose one of auto, none" in wrong.stderr


def test_commands_that_take_none_of_them_say_so(tmp_path: Path) -> None:
    folder = str(store(tmp_path, **QWEN, stop_strings=["a", "b"]))
    file = tmp_path / "requests.jsonl"
    file.write_text("A fox\n")
    said = "the checkpoint's defaults are not taken here: temperature 0.6, top_k 20, top_p 0.95, stop ['a', 'b']"
    for command in (["generate", "A fox", *SHORT], ["batch", str(file), *SHORT], ["cache", "A fox", "A fox"]):
        own = invoke(*command, "--model", folder)
        assert own.exit_code == 0
        assert said in own.stderr
        assert "checkpoint's defaults" not in invoke(*command).stderr
    assert invoke("generate", "A fox", *SHORT, "--model", folder).stdout == invoke("generate", "A fox", *SHORT).stdout
    options = ("--temperature", "0.6", "--top-k", "20", "--stop", "a", "--stop", "b")
    assert "not taken here: top_p 0.95;" in invoke("batch", str(file), *SHORT, "--model", folder, *options).stderr
