"""``measure`` and ``progress``: what a lesson's idea saves on a student's engine, and what all of them saved so far."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mini_engine.overlay import overlay_files
from smoke.commands.exits import Exit, stop
from smoke.commands.options import EngineOption, LessonArgument
from smoke.course.measure import LOADS
from smoke.course.work import Work
from smoke.framework.manifest import ROOT, load_manifest

BAR_WIDTH = 40
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="A checkpoint folder. Without it, the embedded model.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("measure")(measure_command)
    app.command("progress")(progress_command)


def measure_command(lesson: LessonArgument, engine: EngineOption = Path("work"), model: ModelOption = None) -> None:
    """Run a lesson's load on your engine, without the lesson's idea and with it, and say what each cost."""
    chosen = load_manifest().lesson(lesson)
    if chosen.id not in LOADS:
        raise ValueError(f"{chosen.id} has no load to measure; there are {', '.join(LOADS)}")
    overlay_files(engine)  # refuses a folder without modules before a process is started
    words = [sys.executable, "-m", "smoke.course.measure", str(engine.resolve()), chosen.id]
    words += [] if model is None else [str(model.resolve())]
    own_cpu = {"TRITON_INTERPRET": "1"} if chosen.id == "L8" and not Path("/dev/nvidia0").exists() else {}
    run = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True, env=os.environ | own_cpu)
    if run.returncode != 0:
        stop(Exit.CHECK_FAILED, f"the load of {chosen.id} ended with an error\n{run.stderr}")
    found = json.loads(run.stdout.splitlines()[-1])
    typer.echo(f"{chosen.id} {chosen.title}: {LOADS[chosen.id].title}")
    typer.echo("\n".join(table(found["sides"])))
    entry = entry_of(found["sides"])
    typer.echo(said(chosen.id, entry))
    if found["missing"]:
        typer.echo(f"not written yet, so from the reference: {', '.join(found['missing'])}")
    if all(load_manifest().task(task).is_optional for task in found["missing"]):
        remember(Work(engine), chosen.id, entry)


def entry_of(sides: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is remembered of a measurement: the first column, before and after."""
    (unit, before), (_, after) = (next(iter(side["figures"].items())) for side in sides)
    return {"unit": unit, "before": before, "after": after}


def table(sides: list[dict[str, Any]]) -> list[str]:
    """Return the sides as lines of one table, columns aligned to the right."""
    columns = list(sides[0]["figures"])
    width = max(len(side["name"]) for side in sides)
    lines = ["  ".join([" " * (width + 2), *columns])]
    for side in sides:
        cells = [shown(side["figures"][name]).rjust(len(name)) for name in columns]
        lines.append("  ".join([f"  {side['name']:<{width}}", *cells]))
    return lines


def shown(number: float) -> str:
    """Return a number with a decimal place where it is small and not whole."""
    return f"{number:,.0f}" if number >= 20 or number == round(number) else f"{number:.1f}"


def remember(work: Work, lesson: str, entry: dict[str, Any]) -> None:
    """Keep the newest measurement of a lesson. Mutates the state file."""
    state = work.load()
    state.setdefault("measured", {})[lesson] = entry
    work.save(state)


def progress_command(engine: EngineOption = Path("work")) -> None:
    """Draw what your lessons have saved so far: a bar for each, doubled gain by doubled gain."""
    measured = Work(engine).load().get("measured", {})
    gains = {name: LOADS[name].gain(entry["before"], entry["after"]) for name, entry in measured.items()}
    most = max([2.0, *gains.values()])
    titles = {lesson: load_manifest().lesson(lesson).title for lesson in LOADS}
    width = max(map(len, titles.values()))
    for lesson in LOADS:
        words = said(lesson, measured[lesson]) if lesson in measured else f"python -m smoke measure {lesson}"
        typer.echo(f"{lesson:<3}  {titles[lesson]:<{width}} {bar(gains.get(lesson, 1.0), most)}  {words}")
    typer.echo(f"A full bar is {most:.1f} times as good; every doubling adds the same length.")


def bar(gain: float, most: float) -> str:
    """Return a bar on a logarithmic scale from 1 to ``most``."""
    full = min(BAR_WIDTH, max(0, round(BAR_WIDTH * math.log(max(gain, 1.0)) / math.log(most))))
    return "█" * full + "░" * (BAR_WIDTH - full)


def said(lesson: str, entry: dict[str, Any]) -> str:
    """Return a measurement in words."""
    words = f"{entry['after']:,.0f} {entry['unit']} instead of {entry['before']:,.0f}"
    load = LOADS[lesson]
    return f"{words}: {load.gain(entry['before'], entry['after']):.1f} times fewer" if load.less_is_better else words
