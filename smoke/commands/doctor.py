"""``doctor``: whether this machine is ready."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from smoke.commands.exits import Exit, stop
from smoke.framework.cases import MODEL_FOLDER
from smoke.framework.check import checks_of
from smoke.framework.manifest import ROOT, load_manifest
from smoke.runner.interpreter import triton_fault
from smoke.runner.runner import Candidate, Runner

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pytest")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor_command)


def print_invariance() -> None:
    """Print how ``batch_invariant`` computes here: the way and the largest block of rows of each product and attention.

    After each stand the seconds that its experiment took.

    The embedded model is tried in both dtypes; other models that were loaded on this machine are listed too.
    """
    from mini_engine.config import EngineConfig
    from mini_engine.invariant.findings import findings, path
    from mini_engine.llm import load_driver

    for dtype in ("float32", "bfloat16"):
        try:
            load_driver(engine=EngineConfig(dtype=dtype, compute="packed", batch_invariant=True))
        except ValueError as error:
            typer.echo(str(error))
    typer.echo(f"batch_invariant, as found on this machine (kept in {path()}):")
    for name, finding in sorted(findings(path()).items()):
        what, _, shape = name.partition(": ")
        found, seconds = finding["result"], finding["seconds"]
        if what == "invariant attention":
            kept = f"up to {found[-1]} query rows" if found else "cannot be kept"
            typer.echo(f"  {shape}: {kept} ({seconds:.3f} s)")
        elif what.startswith("invariant by"):
            way, rows = found
            kept = f"{way}, blocks of up to {rows[-1]} rows" if rows else "cannot be kept"
            typer.echo(f"  {shape}: {kept} ({seconds:.3f} s)")


def doctor_command() -> None:
    """Print versions, threads and how ``batch_invariant`` computes; L1's checks on the reference must pass."""
    import torch

    typer.echo(f"python {platform.python_version()} on {platform.platform()}")
    missing = []
    for package in PACKAGES:
        try:
            typer.echo(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    typer.echo(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    typer.echo(f"triton interpreter: {triton_fault() or 'works'}")
    if not missing:
        print_invariance()
    if missing:
        stop(Exit.ENVIRONMENT, f"{', '.join(missing)} not installed: pip install -e '.[dev]' in {ROOT}")
    if not (MODEL_FOLDER / "model.safetensors").is_file():
        stop(Exit.ENVIRONMENT, f"{MODEL_FOLDER} holds no model; is the checkout complete?")
    first = load_manifest().written[0]
    with Runner() as runner:
        results = runner.run(Candidate("reference"), checks_of([first])).results
    wrong = [result.check_id for result in results if not result.passed]
    if wrong:
        stop(Exit.ENVIRONMENT, f"the reference fails {', '.join(wrong)} here; please report it with the lines above")
    typer.echo(f"reference {first.id}: {len(results)} checks pass\nready: python -m smoke start {first.id}")
