"""``mini-engine bench grammar``: the grammar backends beside each other: masks, steps of an engine, forced text.

``fsm`` runs in one process with its peers, the libraries xgrammar, llguidance and outlines-core: the same vocabulary,
the same grammars, the same texts, in turn. Times of the libraries are given with and without our adapters around them.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from tokenizers import Tokenizer

from mini_engine.bench.grammar.coverage import measure_coverage, print_coverage, read_schemas
from mini_engine.bench.grammar.loads import (
    GRAMMARS,
    JUMP_SCHEMAS,
    NUM_COLUMNS,
    large_tokenizer,
    tiny_tokenizer,
)
from mini_engine.bench.grammar.masks import MaskBench, MaskRow, SetUp, mask_goals
from mini_engine.bench.grammar.steps import JumpRow, Served, StepRow, measure_jumps, measure_steps, step_goals
from mini_engine.bench.machine import SHAPES, chosen, machine, make_checkpoint
from mini_engine.config import Dtype, EngineConfig
from mini_engine.grammar.tokens import TokenTable
from mini_engine.llm import load_model
from mini_engine.tiny.corpus import IM_END

PARTS = ("masks", "step", "jump")
COVERAGE = "coverage"  # a part that needs schemas, and no model
BACKENDS = ("fsm", "xgrammar", "llguidance", "outlines")
JUMPING = ("fsm", "xgrammar", "llguidance")  # outlines-core cannot say what is forced
LIBRARIES = ("xgrammar", "llguidance", "outlines-core", "tokenizers", "numpy")
DTYPES: dict[str, Dtype] = {"tiny": "float32", "0.6b": "bfloat16"}


@dataclass(frozen=True)
class Size:
    """How much is run; ``quick`` shows that it runs and measures nothing worth telling."""

    rounds: int
    rows: tuple[int, ...]
    new_tokens: int
    requests: int
    grammars: list[str]
    schemas: list[str]

    @classmethod
    def of(cls, quick: bool, rounds: int) -> "Size":
        """Return the usual size, or a quick one."""
        if quick:
            return cls(rounds or 1, (1, 2), 6, 1, ["number", "person"], ["settings"])
        return cls(rounds or 3, (1, 16), 32, 4, list(GRAMMARS), list(JUMP_SCHEMAS))


@dataclass
class Report:
    """The rows of all parts, and why what is missing is missing."""

    set_up: list[SetUp] = field(default_factory=list)
    masks: list[MaskRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    jumps: list[JumpRow] = field(default_factory=list)
    coverage: list[dict[str, Any]] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def goals(self) -> list[tuple[str, float, bool]]:
        """What was promised for two CPU cores, what was reached, and whether that is enough."""
        return mask_goals(self.masks) + step_goals(self.steps)


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries, ``None`` for one that is not installed."""
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def describe(table: TokenTable) -> dict[str, int]:
    """Return the size of a vocabulary, for the report."""
    spelled = [spelling for spelling in table.token_bytes if spelling]
    return {"columns": table.vocab_size, "tokens": len(spelled), "bytes": sum(map(len, spelled))}


def run_model(
    name: str, parts: Sequence[str], backends: Sequence[str], size: Size, seed: int, report: Report
) -> dict[str, int]:
    """Run the parts on one model's vocabulary and weights, and return what the vocabulary is. Mutates the report."""
    tokenizer = tiny_tokenizer() if name == "tiny" else large_tokenizer(seed)
    columns = tokenizer.get_vocab_size() if name == "tiny" else NUM_COLUMNS
    stop = tokenizer.token_to_id(IM_END)
    assert stop is not None, "both vocabularies have it"
    table = TokenTable.from_tokenizer(tokenizer, columns, frozenset({stop}))
    masks = MaskBench(tokenizer, table, backends)
    report.unavailable |= masks.unavailable
    if "masks" in parts:
        report.set_up += masks.set_up
        report.masks += masks.measure(size.rounds, size.grammars)
        report.unavailable |= masks.unavailable
    able = list(masks.backends)
    if {"step", "jump"} & set(parts):
        served = serve(name, tokenizer, seed)
        for rows in size.rows if "step" in parts else ():
            report.steps += measure_steps(served, rows, able, size.rounds, size.new_tokens, seed)
        if "jump" in parts:
            jumping = [backend for backend in able if backend in JUMPING]
            often = (
                (size.requests, size.rounds) if name == "tiny" else (1, 1)
            )  # a token alone takes a tenth of a second
            report.jumps += measure_jumps(served, jumping, size.schemas, *often, seed)
    return describe(table)


def serve(name: str, tokenizer: Tokenizer, seed: int) -> Served:
    """Load a model with random weights, or the embedded one."""
    config = EngineConfig.serving(dtype=DTYPES[name], preemption=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(name, Path(scratch) / name, seed)
        return Served(name, load_model(folder, config), tokenizer, config)


def bench_grammar(
    parts: Annotated[str, typer.Option(help=f"{','.join(PARTS)},{COVERAGE} or some of them.")] = ",".join(PARTS),
    model: Annotated[list[str] | None, typer.Option(help="tiny, 0.6b (random weights, 151,936 ids); both.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(BACKENDS)}; all. Coverage: fsm, or auto.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Counted rounds; 0: 3, quick 1; jumps at 0.6b always 1.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="The embedded model alone, and little of everything.")] = False,
    schemas: Annotated[Path | None, typer.Option(help="Coverage: a folder of *.json, or a file of JSON lines.")] = None,
    count: Annotated[int, typer.Option(help="Coverage: schemas drawn from it; 0 takes all.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of vocabulary, weights, prompts, drawn schemas and their texts.")] = 0,
) -> None:
    """Compile grammars, fill masks, step an engine and jump forward, with every backend; the last line is JSON."""
    wanted = chosen(parts.split(","), (*PARTS, COVERAGE), "part")
    if (schemas is None) == (COVERAGE in wanted):
        raise typer.BadParameter(f"the part {COVERAGE} and the option --schemas need each other")
    models = chosen(model, SHAPES, "model") if model or not quick else ["tiny"]
    models = models if wanted != [COVERAGE] else []
    backends = chosen(backend, BACKENDS if models else (*BACKENDS, "auto"), "backend")
    size = Size.of(quick, rounds)
    if threads:
        torch.set_num_threads(threads)
    command = (
        f"mini-engine bench grammar --parts {','.join(wanted)} --rounds {size.rounds} --seed {seed}"
        + "".join(f" --model {name}" for name in models)
        + "".join(f" --backend {name}" for name in backend or ())
        + " --quick" * quick
        + f" --schemas {schemas} --count {count}" * (schemas is not None)
    )
    where = machine(torch.get_num_threads()) | versions()
    typer.echo(f"{command}\n{json.dumps(where)}")
    transformers.logging.set_verbosity_error()
    report = Report()
    vocabularies = {name: run_model(name, wanted, backends, size, seed, report) for name in models}
    if schemas is not None:
        report.coverage += measure_coverage(read_schemas(schemas, count, seed), backend or ["fsm"], seed)
    print_report(report)
    for text, reached, enough in report.goals:
        typer.echo(f"{text}: {reached:.2f}, {'reached' if enough else 'MISSED'}")
    everything = {"command": command, "machine": where, "vocabularies": vocabularies, **asdict(report)}
    typer.echo(json.dumps({**everything, "goals": report.goals}))


def number(value: float | None, width: int, digits: int = 1) -> str:
    """Return a number in its column, a dash for none."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def print_report(report: Report) -> None:
    """Print the tables of the parts that ran."""
    if report.masks:
        print_masks(report)
    if report.steps:
        print_steps(report.steps)
    if report.jumps:
        print_jumps(report.jumps)
    if report.coverage:
        print_coverage(report.coverage)
    for name, reason in report.unavailable.items():
        typer.echo(f"{name}: not here: {reason}")


def print_masks(report: Report) -> None:
    """Print what a vocabulary, a grammar, a mask and a token cost."""
    typer.echo(f"\n{'vocabulary':>10}  {'backend':12}{'once, ms':>10}")
    for one in report.set_up:
        typer.echo(f"{one.vocab:10}  {one.backend:12}{one.ms:10.1f}")
    typer.echo(
        f"\n{'vocabulary':>10}  {'grammar':10}{'backend':12}{'compile ms':>11}{'/ xgr':>7}"
        f"{'new state p50':>14}{'p99':>9}{'max us':>9}{'known':>8}{'raw us':>8}{'accept':>8}{'raw us':>8}"
    )
    for row in report.masks:
        typer.echo(
            f"{row.vocab:10}  {row.grammar:10}{row.backend:12}{row.compile_ms:11.1f}"
            f"{number(row.compile_over_xgrammar, 7)}{row.first_p50:14.1f}{row.first_p99:9.1f}{row.first_max:9.1f}"
            f"{row.fill:8.1f}{number(row.raw_fill, 8)}{row.accept:8.1f}{number(row.raw_accept, 8)}"
        )


def print_steps(rows: Sequence[StepRow]) -> None:
    """Print what grammars cost a decode step."""
    typer.echo(
        f"\n{'model':6}{'rows':>5}  {'grammar':12}{'step ms':>9}{'x plain':>9}{'poll':>8}{'mask':>8}{'accept ms':>10}"
        f"{'share':>8}{'new states':>12}"
    )
    for row in rows:
        poll, mask, accept = (row.parts_ms[part] for part in ("poll", "mask", "accept"))
        typer.echo(
            f"{row.model:6}{row.rows:5}  {row.backend:12}{row.step_ms:9.2f}{row.over_plain:9.2f}{poll:8.3f}{mask:8.3f}"
            f"{accept:10.3f}{row.share:8.1%}{row.cold_share:12.1%}"
        )


def print_jumps(rows: Sequence[JumpRow]) -> None:
    """Print what forced text saves."""
    typer.echo(
        f"\n{'model':6}{'grammar':12}{'schema':12}{'tokens':>13}{'passes':>13}{'forced':>8}{'x faster':>9}"
        f"{'canonical':>15}{'tokens over it':>16}{'same text':>11}"
    )
    for row in rows:
        pairs = [f"{a} → {b}" for a, b in (row.tokens, row.passes)]
        spelled = [f"{a:{form}} → {b:{form}}" for (a, b), form in ((row.canonical, ".0%"), (row.excess, ".2f"))]
        typer.echo(
            f"{row.model:6}{row.backend:12}{row.schema:12}{pairs[0]:>13}{pairs[1]:>13}{row.forced:8.0%}"
            f"{row.speedup:9.2f}{spelled[0]:>15}{spelled[1]:>16}{row.same_text:11.0%}"
        )
