"""``mini-engine bench batch``: the cost of a line in files of growing length.

The command runs as a user runs it. Lines are short and ask for one token, so that the work apart from computing shows.
Time runs from answer ``FIRST`` to the last, so that loading the model and filling the engine do not count. The files
take turns, and the median round is reported.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from mini_engine.bench.machine import machine

FIRST = 256  # answers that are not timed
TOKENS = 900  # prompts are one token each, below this id, so that they differ


@dataclass(frozen=True)
class BatchRow:
    """One length of file: seconds per line, and their ratio to those of the shortest file."""

    lines: int
    seconds_per_line: float
    ratio: float


def write_lines(file: Path, count: int) -> None:
    """Write ``count`` requests for one token."""
    with file.open("w", encoding="utf-8") as stream:
        for index in range(count):
            stream.write(json.dumps({"token_ids": [index % TOKENS + 1], "max_new_tokens": 1}) + "\n")


def seconds_per_line(file: Path, count: int, threads: int) -> float:
    """Run the command over ``file`` -> seconds per line between answer ``FIRST`` and the last.

    Raises ``RuntimeError`` if it does not answer every line.
    """
    command = [sys.executable, "-m", "mini_engine", "batch", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None, "it is a pipe"
        came = [time.perf_counter() for _ in process.stdout]
    if process.returncode != 0 or len(came) != count:
        raise RuntimeError(f"{count} lines were asked and {len(came)} answered, exit code {process.returncode}")
    return (came[-1] - came[FIRST]) / (count - 1 - FIRST)


def bench_batch(
    lines: Annotated[
        list[int] | None, typer.Option(help="Lengths of files (1000, 10000, 100000).", min=2 * FIRST)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds over all files.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="Threads of the command.", min=1)] = 1,
) -> None:
    """Cost of a line of `mini-engine batch` in files of growing length; the last line is JSON."""
    counts = sorted(lines or [1_000, 10_000, 100_000])
    asked = " ".join(f"--lines {count}" for count in counts)
    command = f"mini-engine bench batch {asked} --rounds {rounds} --threads {threads}"
    where = machine(threads)
    typer.echo(f"{command}\n{json.dumps(where)}")
    times: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        for count in tqdm(counts * rounds, unit="run"):
            file = Path(folder) / f"{count}.jsonl"
            write_lines(file, count)
            times[count].append(seconds_per_line(file, count, threads))
    medians = {count: statistics.median(own) for count, own in times.items()}
    rows = [BatchRow(count, median, median / medians[counts[0]]) for count, median in medians.items()]
    typer.echo(f"{'lines':>9}{'ms a line':>12}{'x':>8}")
    for row in rows:
        typer.echo(f"{row.lines:9}{row.seconds_per_line * 1e3:12.3f}{row.ratio:8.2f}")
    typer.echo(json.dumps({"command": command, "machine": where, "rows": [asdict(row) for row in rows]}))
