"""What ``mini-engine batch`` does: it keeps a window of requests in the engine and writes each answer as it ends.

file ──► LineReader ──► a window of requests in the engine ──► AnswerWriter ──► file
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Self

import typer
from tqdm import tqdm

from mini_engine.cli.batch_lines import AnswerWriter, Line, LineReader, answered
from mini_engine.engine import Engine
from mini_engine.outputs import RequestOutput, StepOutput, best
from mini_engine.streams import silence
from mini_engine.view import EngineView

LEAST_WINDOW, WINDOWS = 128, 4  # requests in the engine: so many, or so many times those that run
FAILED, INTERRUPTED = 1, 130  # exit codes: requests have failed; Ctrl-C has ended the command


class Interrupt:
    """Ctrl-C: the first asks for an end (``asked``), the second raises ``KeyboardInterrupt``, as does any in a read."""

    def __init__(self) -> None:
        """Begin without a request to end."""
        self.asked = self.in_read = False

    def __enter__(self) -> Self:
        """Take over SIGINT. Mutates."""
        self.before = signal.signal(signal.SIGINT, self.on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Give SIGINT back. Mutates."""
        signal.signal(signal.SIGINT, self.before)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the first one. Mutates."""
        if self.asked or self.in_read:  # a read that waits for its line would go on waiting
            self.asked = True
            raise KeyboardInterrupt
        self.asked = True

    def reading(self, stream: BinaryIO) -> Iterator[bytes]:
        """Yield the lines of ``stream`` until it ends or an end is asked for. Mutates."""
        while not self.asked:
            try:
                self.in_read = True
                raw = stream.readline()
            except KeyboardInterrupt:
                return
            finally:
                self.in_read = False
            if not raw:
                return
            yield raw


@dataclass
class Tally:
    """What a run has done so far."""

    lines: int = 0
    tokens: int = 0
    failed: int = 0  # lines with an error
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0

    def add_step(self, step: StepOutput) -> None:
        """Count a step. Mutates."""
        if step.chunks:
            self.steps += 1
            self.rows += sum(size for _, _, size in step.chunks)
            self.seconds += sum(step.seconds.values())

    def add_answers(self, answers: list[RequestOutput]) -> None:
        """Count the answers of a line. Mutates."""
        self.lines += 1
        self.tokens += sum(len(answer.token_ids) for answer in answers)
        self.failed += any(answer.finish_reason == "error" for answer in answers)


@dataclass
class Flight:
    """A line in the engine: the names of its samples, and of those that have not ended."""

    line: Line
    names: list[str]
    left: set[str]


@dataclass
class BatchRun:
    """Keeps a window of ``lines`` in ``engine`` and hands every answer to ``writer``."""

    engine: Engine
    lines: Iterator[Line]
    writer: AnswerWriter
    interrupt: Interrupt
    tally: Tally = field(default_factory=Tally)
    flights: dict[str, Flight] = field(default_factory=dict)  # by the name of every sample that has not ended
    is_over: bool = False  # no line is left to be let in
    is_cut: bool = False  # because of Ctrl-C

    def run(self, progress: bool) -> None:
        """Answer every line. Raises ``ValueError`` if an answer cannot be written. Mutates."""
        with tqdm(disable=not progress, unit="line") as bar:
            while not self.is_over or self.flights:
                if not self.is_over:
                    self.fill()
                if self.interrupt.asked and not self.is_cut:
                    self.cut()
                if self.flights:
                    self.step()
                bar.update(self.tally.lines - bar.n)

    def fill(self) -> None:
        """Let lines in until the window is full or none is left. Mutates."""
        window = max(LEAST_WINDOW, WINDOWS * self.engine.driver.config.max_running_requests)
        while len(self.flights) < window:
            line = next(self.lines, None)
            if line is None:
                self.is_over = True
                return
            self.writer.expect(line)
            self.let_in(line)

    def let_in(self, line: Line) -> None:
        """Give a line to the engine; answer it at once if that cannot be. Mutates."""
        error = line.error
        if error is None:
            try:
                names = self.engine.add_samples(line.prompt_ids, line.params)
            except NotImplementedError:  # a student's engine with a task still open
                raise
            except Exception as fault:  # what a line asks for may break what looks at it
                error = f"the request cannot be run ({type(fault).__name__}: {fault})"
            else:
                entries = self.engine.entries
                left = {name for name in names if entries[name].output.finish_reason is None}
                flight = Flight(line, names, left)
                self.flights.update(dict.fromkeys(left, flight))
                if not left:
                    self.land(flight)
                return
        self.answer(line, [RequestOutput("", [], finish_reason="error", error=error)])

    def step(self) -> None:
        """Step the engine, and answer the lines that it ends. Mutates."""
        step = self.engine.step()
        self.tally.add_step(step)
        for name in [delta.request_id for delta in step.deltas if delta.finish_reason is not None]:
            flight = self.flights.pop(name, None)
            if flight is not None:
                flight.left.discard(name)
                if not flight.left:
                    self.land(flight)

    def land(self, flight: Flight) -> None:
        """Take the answers of a line out of the engine and write them. Mutates."""
        answers = [self.engine.take_output(name) for name in flight.names]
        self.answer(flight.line, best(answers, flight.line.params.n))

    def answer(self, line: Line, answers: list[RequestOutput]) -> None:
        """Write and count the answers of a line. Mutates."""
        self.writer.write(line, answers)
        self.tally.add_answers(answers)

    def cut(self) -> None:
        """Give up the lines that nothing was computed for, and let no more in; the others go on. Mutates.

        With ``--ordered`` only lines after the last one that runs are given up, so that no gap is left in the answers.
        """
        self.is_over = self.is_cut = True
        flights = list({flight.line.index: flight for flight in self.flights.values()}.values())
        running = [flight.line.index for flight in flights if self.has_begun(flight)]
        last = max(running, default=-1) if self.writer.ordered else -1
        for flight in flights:
            if flight.line.index > last and not self.has_begun(flight):
                self.give_up(flight)
        num_left = len({id(flight) for flight in self.flights.values()})
        typer.secho(
            f"\ninterrupted: {num_left} lines that have begun go on to their end; Ctrl-C again stops at once",
            fg="yellow",
            err=True,
        )

    def has_begun(self, flight: Flight) -> bool:
        """Whether anything was computed for a line."""
        return any(self.engine.entries[name].request.times.started is not None for name in flight.names)

    def give_up(self, flight: Flight) -> None:
        """Take a line back out of the engine. Mutates."""
        for name in flight.names:
            self.engine.abort(name)
            self.engine.take_output(name)
            self.flights.pop(name, None)
        self.writer.forget(flight.line)

    def summary(self) -> str:
        """Return one line about the whole run."""
        tally = self.tally
        text = (
            f"{tally.lines} requests, {tally.tokens} tokens in {tally.seconds:.2f} s "
            f"({tally.tokens / max(tally.seconds, 1e-9):.0f} per second), {tally.steps} steps of "
            f"{tally.rows / max(tally.steps, 1):.1f} rows"
        )
        tree = EngineView(self.engine).tree
        if tree is not None:
            text += f", {tree.stats.hit_rate:.0%} of the tokens from the prefix cache"
        return text


@contextmanager
def requests_of(file: str) -> Iterator[BinaryIO]:
    """Open the file of requests, "-" for standard input. Raises ``ValueError`` if that cannot be."""
    if file == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed; give a file of requests, or open it")
        yield sys.stdin.buffer
        return
    try:
        stream = open(file, "rb")  # noqa: SIM115 - closed below, and errors of reading are not errors of opening
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}); give a text file, a request on each line") from error
    with stream:
        yield stream


@contextmanager
def answers_to(output: Path | None, resume: bool) -> Iterator[tuple[BinaryIO, dict[int, str]]]:
    """Open the file of answers, ``None`` for standard output -> it, and which lines it has answers for.

    Raises ``ValueError`` for a file that has something and is not to be gone on with, and one that cannot be opened.
    """
    if output is None:
        if resume:
            raise ValueError("--resume goes on with a file and there is none; give it as --output FILE")
        if sys.stdout is None:
            raise ValueError("standard output is closed; give --output FILE, or open it")
        try:
            yield sys.stdout.buffer, {}
        except BaseException:
            silence(sys.stdout)
            raise
        return
    if output.is_file() and output.stat().st_size and not resume:
        raise ValueError(f"{output} has something in it; add --resume to go on with it, or write to another file")
    try:
        done = answered(output) if resume and output.exists() else {}
        stream = open(output, "ab")  # noqa: SIM115 - closed below, where a second error is passed over
    except OSError as error:
        raise ValueError(f"{output} cannot be written ({error}); give another --output") from error
    try:
        yield stream, done
    finally:
        with suppress(OSError):
            stream.close()


def how_to_go_on(file: str, output: Path | None, written: int) -> str:
    """Return what to do after an interrupted run."""
    if output is None:
        return f"{written} lines are answered; next time give --output FILE, which --resume can go on with"
    return (
        f"{written} lines of this run are in {output}; go on with: mini-engine batch {file} --output {output} --resume"
    )


def run_file(
    load: Callable[[], tuple[Engine, LineReader]], file: str, output: Path | None, resume: bool, ordered: bool
) -> None:
    """Answer the requests of ``file``. Raises ``ValueError`` for files that cannot be read or written.

    ``load`` is called when both are open: a model takes long to load.
    """
    with requests_of(file) as stream, answers_to(output, resume) as (answers, done):
        engine, reader = load()
        writer = AnswerWriter(answers, str(output or "standard output"), ordered)
        with Interrupt() as interrupt:
            run = BatchRun(engine, reader.lines(interrupt.reading(stream), done), writer, interrupt)
            try:
                run.run(progress=sys.stderr.isatty())
            except KeyboardInterrupt:
                run.is_cut = True
            except ValueError:  # it says how to go on
                raise
            except BaseException:
                typer.secho(how_to_go_on(file, output, writer.num_written), fg="yellow", err=True)
                raise
    skipped = f"{len(done)} answered before, " if done else ""
    typer.secho(skipped + run.summary(), dim=True, err=True)
    if run.tally.failed:
        said = f"{run.tally.failed} of {run.tally.lines} requests failed; their errors are in {writer.name}"
        typer.secho(said, fg="red", err=True)
    if run.is_cut:
        typer.secho(how_to_go_on(file, output, writer.num_written), fg="yellow", err=True)
        raise typer.Exit(INTERRUPTED)
    if run.tally.failed:
        raise typer.Exit(FAILED)
