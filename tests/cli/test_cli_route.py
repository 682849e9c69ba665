"""``mini-engine route``: what it refuses, and what it hands on to the servers that it starts."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import typer
from typer.testing import CliRunner

from mini_engine.cli.app import app
from mini_engine.cli.options import with_groups
from mini_engine.cli.route import OF_THE_ROUTER, as_options
from mini_engine.cli.serve import Answering, Running


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "there is no worker; give --replicas 2, or --worker with the URL of a server"),
        (["--worker", "10.0.0.5:8000"], "--worker is '10.0.0.5:8000'; give the URL"),
        (["--worker", "http://a:1/prefix"], "--worker is 'http://a:1/prefix'; give the URL"),
        (["--worker", "http://a:b"], "--worker is 'http://a:b'; give the URL"),
        (["--worker", "http://a:1", "--worker", "http://a:1/v1/"], "--worker names a:1 twice"),
        (["--worker", "http://[::1]:1", "--worker", "https://[::1]:1"], "--worker names [::1]:1 twice"),
        (["--ray"], "--ray runs the replicas; add --replicas 2"),
        (
            ["--worker", "http://a:1", "--allow-origin", "*", "--api-key", "k"],
            "--allow-origin is '*' and there is a key",
        ),
        (["--worker", "http://a:1", "--dtype", "float8"], "dtype"),
    ],
)
def test_errors_name_the_remedy(options, said):
    result = CliRunner().invoke(app, ["route", *options])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_how_to_get_it():
    result = CliRunner().invoke(app, ["route", "--replicas", "1", "--ray"])
    assert result.exit_code == 2
    assert "pip install 'mini-engine[ray]'" in result.output


RUNNING = Running(dtype="bfloat16", batch_invariant=True, prefix_cache=False, pages=77, running=5, drafts="ngram")
ANSWERING = Answering(name="it", max_waiting=3, timeout=1.5, drain=0.0, tool_parser="hermes")


@pytest.mark.parametrize("running", [Running(), RUNNING])
@pytest.mark.parametrize("answering", [Answering(), ANSWERING])
def test_a_replica_gets_the_options_of_the_router(running, answering):
    own = replace(answering, host="0.0.0.0", port=99, api_key="secret", allow_origin=["http://a"])
    read = []
    command = typer.Typer(add_completion=False)

    @command.command()
    @with_groups
    def serve(*, answering: Answering, running: Running) -> None:
        read.append((answering, running))

    options = as_options(own) + as_options(running)
    assert not {"secret", "99", "0.0.0.0"} & set(options)
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output
    assert read == [(replace(answering, **{name: getattr(Answering(), name) for name in OF_THE_ROUTER}), running)]
