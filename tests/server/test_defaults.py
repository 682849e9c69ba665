"""What a request leaves out is the checkpoint's stored default, field by field, and a client can read it beforehand."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mini_engine import lang
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.app import app
from mini_engine.llm import LLM
from mini_engine.sampler.params import SamplingParams
from mini_engine.server.life import Server
from mini_engine.server.schema import ChatBody
from tests.server.conftest import Running, serving

STORED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3, "stop": [" old"]}
GIVEN: dict[str, list[Any]] = {
    "temperature": [None, 0, 0.3],
    "top_k": [None, 0, 5],
    "top_p": [None, 1.0, 0.5],
    "repetition_penalty": [None, 1.0],
    "stop": [None, [], "fox"],
}
BODIES = [dict(zip(GIVEN, values, strict=True)) for values in product(*GIVEN.values())]
ASKED = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 16}


@pytest.fixture(scope="module")
def tuned() -> Iterator[Running]:
    with serving(defaults=STORED) as running:
        yield running


@pytest.mark.parametrize("stored", [{}, STORED, {"temperature": 0.0}], ids=["none", "stored", "do_sample false"])
def test_a_request_goes_before_what_is_stored_field_by_field(tuned: Running, stored: dict[str, Any]) -> None:
    """As vLLM's ``to_sampling_params``: the request, else what is stored, else OpenAI's temperature 1."""
    service = tuned.service
    kept, service.defaults = service.defaults, {"temperature": 1.0, **stored}
    try:
        for fields in BODIES:
            wanted = dict[str, Any](temperature=1.0)
            for name in GIVEN:
                if fields[name] is not None:
                    wanted[name] = fields[name]
                elif name in stored:
                    wanted[name] = stored[name]
            body = ChatBody(**ASKED, **fields)
            assert service.params(body, 16, None) == SamplingParams(**wanted, max_new_tokens=16), fields
    finally:
        service.defaults = kept


def test_the_defaults_can_be_read_and_pinned(tuned: Running, server: Running) -> None:
    with tuned.http() as http, server.http() as plain:
        (card,) = http.get("/v1/models").json()["data"]
        assert card["default_sampling_params"] == STORED
        assert plain.get("/v1/models/tiny").json()["default_sampling_params"] == {"temperature": 1.0}
        pinned = plain.post("/v1/chat/completions", json={**ASKED, **card["default_sampling_params"], "seed": 4}).json()
        taken = http.post("/v1/chat/completions", json={**ASKED, "seed": 4}).json()
        assert taken["choices"] == pinned["choices"]
        asked = {"prompt": "A fox", "temperature": 0, "repetition_penalty": 1, "stop": []}
        texts = [each.post("/v1/completions", json=asked).json()["choices"] for each in (http, plain)]
        assert texts[0] == texts[1]


def test_programs_say_what_they_want_and_take_no_default_of_a_server(tuned: Running) -> None:
    @lang.program
    def story(s: Any) -> None:
        s += "Once upon a time there was a fox" + lang.gen("greedy", max_new_tokens=12)
        s += lang.gen("drawn", max_new_tokens=12, temperature=0.9, seed=1)

    with LLM(batch_invariant=True) as llm:
        here = story.run(backend=llm)
        there = story.run(backend=lang.Endpoint(f"{tuned.url}/v1"))
        assert (there["greedy"], there["drawn"]) == (here["greedy"], here["drawn"])


def test_the_command_serve_never_looks_through_what_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full garbage collection takes 0.15 s, in which no stream goes on."""
    looked_at = list[int]()
    monkeypatch.setattr(Server, "run", lambda _: looked_at.append(len(gc.get_objects())))
    try:
        assert CliRunner().invoke(app, ["serve", "--port", "0", "--no-page"]).exit_code == 0
    finally:
        gc.unfreeze()
    assert looked_at[0] < len(gc.get_objects()) / 100


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_the_command_serve_takes_them_and_says_so(tmp_path: Path, choice: str) -> None:
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sample": True, "temperature": 0.6, "top_k": 20}))
    command = [sys.executable, "-m", "mini_engine", "serve", "--model", str(folder), "--port", "0", "--no-page"]
    process = subprocess.Popen(
        [*command, "--generation-config", choice], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        lines = list[str]()
        for line in process.stderr or ():
            lines.append(line)
            if found := re.search(r"running on (http://\S+)", line, re.IGNORECASE):
                break
        card = httpx.get(f"{found[1]}/v1/models").json()["data"][0] if found else {}
    finally:
        process.terminate()
        process.wait(30)
    taken = {"temperature": 0.6, "top_k": 20} if choice == "auto" else {"temperature": 1.0}
    assert card["default_sampling_params"] == taken
    assert ("the checkpoint's defaults are taken: temperature 0.6, top_k 20;" in "".join(lines)) == (choice == "auto")
