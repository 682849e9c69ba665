"""``mini-engine bench kernels``: the Triton kernels compared with the limits of the GPU, torch and other peers.

A large copy and a large product measure bandwidth and matrix rate in the same run, and shares are shares of these. A
kernel is compared with its reference before it is timed. One that differs, or does not run, has no figure, and the exit
code is 1. Without a GPU everything runs on toy shapes in Triton's interpreter, which shows only that it runs.
"""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import torch
import transformers
import typer
from tqdm import tqdm

from mini_engine.bench.kernels.timer import HostTimer, Sample, Timer, device_timer, num_sets
from mini_engine.bench.machine import chosen, machine

if TYPE_CHECKING:  # they import Triton, which is optional
    from mini_engine.bench.kernels.cases import Case, Setting
    from mini_engine.bench.kernels.engine import EngineRow

# Where the cases of each part come from.
CASES = {
    "norm": ("kernels.cases", "norm_cases"),
    "store": ("kernels.cases", "store_cases"),
    "decode": ("kernels.attention", "decode_cases"),
    "prefill": ("kernels.attention", "prefill_cases"),
    "sampling": ("kernels.sampling", "sampling_cases"),
    "matmul": ("kernels.cases", "matmul_cases"),
}
ENGINE = "engine"
PARTS = (*CASES, ENGINE)
MODELS = ("0.6b", "4b")
COPY_BYTES = 1 << 30
PRODUCT_SIZE = 8192
REFERENCE = "torch"
GOALS = {"bandwidth": "bandwidth_share", "matmul": "matmul_share"}  # limits and the figures that are shares of them


@dataclass(frozen=True)
class Limits:
    """The limits of the device: bytes per second of a copy, read and written, and operations of a product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Row:
    """One operation at one size. Times are microseconds on the device; ``host_us``: to queue it.

    ``ratios``: how many times longer each peer takes; ``None`` if it cannot run here. Without a GPU there are no limits
    and no shares.
    """

    part: str
    operation: str
    size: str
    us: float
    us_p10: float
    us_p90: float
    host_us: float
    bytes_per_s: float
    flops_per_s: float
    bandwidth_share: float | None
    matmul_share: float | None
    ratios: dict[str, float | None]
    goal: tuple[str, float] | None

    @property
    def promised(self) -> tuple[str, float, bool] | None:
        """The promise, the measured value, and whether it is kept; ``None`` without a goal or a GPU."""
        if self.goal is None or self.bandwidth_share is None:
            return None
        against, least = self.goal
        value = getattr(self, GOALS[against]) if against in GOALS else self.ratios[against]
        text = f"{self.operation} {self.size}: {against} >= {least:g}"
        return None if value is None else (text, value, value >= least)


def make_row(case: "Case", own: Sample, peers: dict[str, Sample | None], limits: Limits | None) -> Row:
    """Turn times into figures."""
    num_bytes, num_flops = case.num_bytes / own.median, case.num_flops / own.median
    return Row(
        part=case.part,
        operation=case.name,
        size=case.size,
        us=own.median * 1e6,
        us_p10=own.p10 * 1e6,
        us_p90=own.p90 * 1e6,
        host_us=own.host * 1e6,
        bytes_per_s=num_bytes,
        flops_per_s=num_flops,
        bandwidth_share=num_bytes / limits.bytes_per_s if limits else None,
        matmul_share=num_flops / limits.flops_per_s if limits else None,
        ratios={name: None if peer is None else peer.median / own.median for name, peer in peers.items()},
        goal=case.goal,
    )


class Bench:
    """One run: a timer, the limits of the device, failed cases, and why some cases have no figure."""

    def __init__(self, timer: Timer, limits: Limits | None, seed: int) -> None:
        """Begin with nothing measured."""
        self.timer = timer
        self.limits = limits
        self.seed = seed
        self.failed: dict[str, str] = {}
        self.unavailable: dict[str, str] = {}

    @torch.inference_mode()
    def measure(self, case: "Case") -> Row | None:
        """Compare a kernel with its reference and time both and the peers; ``None`` for one without a figure."""
        try:
            case.verify(self.seed)
            sets = [case.make(self.seed + 10 * n) for n in range(num_sets(case.num_bytes))]
            own = self.timer.measure(lambda n: case.kernel(*sets[n % len(sets)]))
        except torch.OutOfMemoryError as error:
            self.unavailable[f"{case.name} {case.size}"] = first_line(error)
            return None
        except Exception as error:  # of a compiler, or a wrong result; other kernels are measured nevertheless
            self.failed[f"{case.name} {case.size}"] = first_line(error)
            return None
        others = {REFERENCE: case.reference} if case.is_reference_timed else {}
        peers = {name: self.time_peer(case, name, call, sets) for name, call in {**others, **case.peers}.items()}
        return make_row(case, own, peers, self.limits)

    def time_peer(
        self, case: "Case", name: str, call: Callable[..., object], sets: Sequence[tuple[Any, ...]]
    ) -> Sample | None:
        """Time a peer; ``None`` if it fails, and the reason is recorded."""
        try:
            return self.timer.measure(lambda n: call(*sets[n % len(sets)]))
        except Exception as error:  # whatever a library raises where it does not support something
            self.unavailable[f"{case.name} {case.size}, {name}"] = first_line(error)
            return None


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def measure_limits(timer: Timer, device: torch.device, dtype: torch.dtype) -> Limits:
    """Time a copy of ``COPY_BYTES`` and a square product of ``PRODUCT_SIZE``."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy = timer.measure(lambda n: target.copy_(source))
    a, b = torch.randn((2, PRODUCT_SIZE, PRODUCT_SIZE), device=device, dtype=dtype)
    product = timer.measure(lambda n: a @ b)
    return Limits(2 * COPY_BYTES / copy.median, 2 * PRODUCT_SIZE**3 / product.median)


def find_device() -> tuple[torch.device, torch.dtype]:
    """Return where kernels run, and in which dtype. Raises ``ValueError`` if they cannot run here."""
    try:
        launch = import_module("mini_engine.kernels.launch")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("bench kernels needs Triton; pip install 'mini-engine[kernels]' (Linux alone)") from None
    if launch.INTERPRETED:
        return torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    raise ValueError(
        "bench kernels found no NVIDIA GPU; run it where there is one, or set TRITON_INTERPRET=1 to run toy shapes in "
        "Triton's interpreter, which shows that the kernels are right and nothing about their speed"
    )


def describe_device(device: torch.device) -> dict[str, Any]:
    """Describe the device and the versions."""
    triton = import_module("triton").__version__
    if device.type != "cuda":
        return {"device": "Triton's interpreter, times not comparable", "triton": triton}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "triton": triton,
    }


def make_setting(model: str, device: torch.device, dtype: torch.dtype, quick: bool) -> "Setting":
    """Return shapes and sizes: those of ``model`` on a GPU, toys in the interpreter."""
    cases = import_module("mini_engine.bench.kernels.cases")
    on_gpu = device.type == "cuda"
    sizes = (cases.QUICK if quick else cases.FULL) if on_gpu else cases.TOY
    setting: Setting = cases.Setting(
        cases.SHAPES[model if on_gpu else "toy"], sizes, device, dtype, compiled=on_gpu and not quick
    )
    return setting


def run_cases(bench: Bench, parts: Sequence[str], setting: "Setting") -> Iterator[Row]:
    """Run the cases of ``parts`` in turn. The inputs of one case are freed before the next."""
    for part in parts:
        if part == ENGINE:
            continue
        module, name = CASES[part]
        cases = list(getattr(import_module(f"mini_engine.bench.{module}"), name)(setting))
        for case in tqdm(cases, desc=part, unit="case"):
            row = bench.measure(case)
            if row is not None:
                yield row
            release_memory(setting.device)


def run_engine(bench: Bench, models: Sequence[str], setting: "Setting") -> Iterator["EngineRow"]:
    """Run the whole engine in the shape of each model, one model on the device at a time."""
    engine, shapes = (import_module(f"mini_engine.bench.{name}") for name in ("kernels.engine", "kernels.cases"))
    for name in models if setting.device.type == "cuda" else ["toy"]:
        try:
            yield from engine.measure_engine(name, replace(setting, shape=shapes.SHAPES[name]), bench.seed)
        except Exception as error:  # the next model is measured nevertheless
            bench.failed[f"engine {name}"] = first_line(error)
        release_memory(setting.device)


def release_memory(device: torch.device) -> None:
    """Free unused memory, so that every case begins with the same device."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # after an illegal access every call fails
            torch.cuda.empty_cache()


ROW_HEAD = (
    f"\n{'operation':20}{'size':24}{'us':>10}{'p10':>10}{'p90':>10}{'host us':>10}{'GB/s':>8}{'share':>7}"
    f"{'TFLOP/s':>9}{'share':>7}  peers' times over ours"
)
ENGINE_HEAD = (
    f"\n{'engine':8}{'system':14}{'batch':>6}{'decode tok/s':>14}{'x':>7}{'all tok/s':>12}{'+ peak MB':>11}"
    f"{'same ids':>10}"
)


def limits_line(limits: Limits | None) -> str:
    """Return what is known of the device."""
    if limits is None:
        return "interpreter, not comparable: the times show that the kernels run, and nothing else"
    return f"copy {limits.bytes_per_s / 1e9:.0f} GB/s, product {limits.flops_per_s / 1e12:.0f} TFLOP/s"


def row_line(row: Row) -> str:
    """Return one line of the table of operations."""
    shares = ["-" if share is None else f"{share:.0%}" for share in (row.bandwidth_share, row.matmul_share)]
    peers = ", ".join(f"{name} {'-' if x is None else f'{x:.3g}x'}" for name, x in row.ratios.items())
    return (
        f"{row.operation:20}{row.size:24}{row.us:10.1f}{row.us_p10:10.1f}{row.us_p90:10.1f}{row.host_us:10.1f}"
        f"{row.bytes_per_s / 1e9:8.1f}{shares[0]:>7}{row.flops_per_s / 1e12:9.1f}{shares[1]:>7}  {peers}"
    )


def engine_line(row: "EngineRow") -> str:
    """Return one line of the table of whole engines."""
    return (
        f"{row.shape:8}{row.system:14}{row.batch:6}{row.decode_tokens_per_s:14.1f}{row.decode_ratio:7.2f}"
        f"{row.tokens_per_s:12.1f}{row.peak_bytes / 1e6:11.0f}{row.same_ids:10.0%}"
    )


def printed(rows: Iterator[Any], head: str, line: Callable[[Any], str]) -> list[Any]:
    """Print rows as they come, so that an interrupted run shows what it measured, and return them."""
    typer.echo(head)
    found = []
    for row in rows:
        typer.echo(line(row))
        found.append(row)
    return found


def bench_kernels(
    parts: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(PARTS)}; all.")] = ",".join(PARTS),
    shape: Annotated[
        str | None, typer.Option(help=f"{' or '.join(MODELS)}: Qwen3's sizes; kernels 4b, the engine both.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A few sizes and calls, no torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of inputs and weights.")] = 0,
) -> None:
    """Speed of the Triton kernels on a GPU beside its limits, torch and transformers; the last line is JSON."""
    names = chosen([part.strip() for part in parts.split(",") if part.strip()], PARTS, "part")
    models = chosen([shape] if shape else None, MODELS, "shape")
    try:
        device, dtype = find_device()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    command = f"mini-engine bench kernels --parts {','.join(names)} --seed {seed}"
    command += "".join([f" --shape {shape}" if shape else "", " --quick" if quick else ""])
    where = {**machine(torch.get_num_threads()), **describe_device(device)}
    typer.echo(f"{command}\n{json.dumps(where)}")
    transformers.logging.set_verbosity_error()
    on_gpu = device.type == "cuda"
    timer: Timer = device_timer(device, quick) if on_gpu else HostTimer()
    limits = measure_limits(timer, device, dtype) if on_gpu else None
    typer.echo(limits_line(limits))
    setting = make_setting(models[-1], device, dtype, quick)
    bench = Bench(timer, limits, seed)
    rows: list[Row] = printed(run_cases(bench, names, setting), ROW_HEAD, row_line)
    engine_rows = printed(run_engine(bench, models, setting), ENGINE_HEAD, engine_line) if ENGINE in names else []
    promised = [row.promised for row in rows if row.promised is not None]
    if engine_rows and on_gpu:
        promised += import_module("mini_engine.bench.kernels.engine").engine_goals(engine_rows)
    print_end(promised, bench)
    report = {
        "command": command,
        "machine": where,
        "comparable": on_gpu,
        "limits": asdict(limits) if limits else None,
        "rows": [asdict(row) for row in rows],
        "engine": [asdict(row) for row in engine_rows],
        "failed": bench.failed,
        "unavailable": bench.unavailable,
        "goals": promised,
    }
    typer.echo(json.dumps(report))
    if bench.failed:
        raise typer.Exit(1)


def print_end(promised: Sequence[tuple[str, float, bool]], bench: Bench) -> None:
    """Print which goals were reached, and which cases have no figure."""
    for text, value, enough in promised:
        typer.echo(f"{text}: {value:.2f}, {'reached' if enough else 'MISSED'}")
    for what, why in bench.unavailable.items():
        typer.echo(f"not measured: {what}: {why}")
    for what, why in bench.failed.items():
        typer.echo(f"FAILED: {what}: {why}")
