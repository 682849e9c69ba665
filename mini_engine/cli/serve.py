"""``mini-engine serve``: the engine behind the HTTP interface of OpenAI."""

import gc
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mini_engine.cli.options import (
    BatchInvariant,
    Device,
    DraftsOption,
    DtypeOption,
    Engine,
    GenerationConfig,
    MaxModelLen,
    Model,
    QuantizeOption,
    ServingCompute,
    TensorParallel,
    TensorParallelMode,
    config_option,
    with_groups,
)
from mini_engine.config import Drafts, Dtype, EngineConfig, Exchange, Quantize


def server_option(*names: str, help: str, **more: Any) -> Any:
    """Return an option under the heading of the server's."""
    return typer.Option(*names, help=help, rich_help_panel="How the server answers", **more)


@dataclass(frozen=True)
class Running:
    """How the engine of a server runs."""

    dtype: DtypeOption = "float32"
    device: Device = "cpu"
    compute: ServingCompute = None
    batch_invariant: BatchInvariant = False
    running: Annotated[int, config_option("max_running_requests")] = 32
    step_tokens: Annotated[int, config_option("max_tokens_per_step")] = 512
    prefix_cache: Annotated[bool, config_option("prefix_cache")] = True
    pages: Annotated[int | None, config_option("num_pages")] = None
    max_model_len: MaxModelLen = None
    drafts: DraftsOption = "off"
    quantize: QuantizeOption = "off"
    tensor_parallel: TensorParallel = 1
    tensor_parallel_mode: TensorParallelMode = "gather"
    engine: Engine = None

    def config(self) -> EngineConfig:
        """Build the configuration. Raises ``ValueError``."""
        changes: dict[str, Any] = {} if self.compute is None else {"compute": self.compute}
        return EngineConfig.serving(
            dtype=cast(Dtype, self.dtype),
            device=self.device,
            batch_invariant=self.batch_invariant,
            max_running_requests=self.running,
            max_tokens_per_step=self.step_tokens,
            prefix_cache="radix" if self.prefix_cache else None,
            num_pages=self.pages,
            max_model_len=self.max_model_len,
            drafts=cast(Drafts, self.drafts),
            quantize=cast(Quantize, self.quantize),
            tensor_parallel=self.tensor_parallel,
            tensor_parallel_mode=cast(Exchange, self.tensor_parallel_mode),
            **changes,
        )


@dataclass(frozen=True)
class Answering:
    """What the server accepts, and from whom."""

    host: Annotated[
        str | None,
        server_option(
            help="Address to listen at; 0.0.0.0 is open to the network. By default 127.0.0.1, for requests to this "
            "machine's own names."
        ),
    ] = None
    port: Annotated[int, server_option(help="Port to listen at.")] = 8000
    name: Annotated[str | None, server_option(help="Name of the model; its folder's or hub id's if not given.")] = None
    api_key: Annotated[
        str | None, server_option(help="Clients must send this key. $MINI_ENGINE_API_KEY works too.")
    ] = None
    max_waiting: Annotated[int, server_option(help="More requests that wait than this are refused with 429.")] = 256
    timeout: Annotated[float, server_option(help="A request ends with an error after so many seconds.")] = 600.0
    drain: Annotated[float, server_option(help="After SIGTERM, requests have so many seconds to end.")] = 30.0
    allow_origin: Annotated[
        list[str] | None,
        server_option(help="Pages of this origin may call the server; '*' allows all. Can be repeated."),
    ] = None
    tool_parser: Annotated[
        str | None, server_option(help="Form of calls of functions: hermes; the chat template says it if not given.")
    ] = None


@with_groups
def serve(
    *,
    model: Model = None,
    generation_config: GenerationConfig = "auto",
    page: Annotated[
        bool | None, server_option(help="Show at / what the engine does, all texts too; by default on loopback alone.")
    ] = None,
    answering: Answering,
    running: Running,
) -> None:
    """Serve a model over HTTP, for every client of OpenAI's interface."""
    from mini_engine.cli.start import input_errors, start, take_defaults  # torch, which the help does without

    with input_errors():
        build_server = from_extra("server", "mini_engine.server.build", "build_server")
        config = running.config()
        folder, stored = take_defaults(model, generation_config)
        driver, tokenizer = start(folder, running.engine, config)
        name = answering.name or model_name(model)
        server = build_server(driver, tokenizer, name, answering, stored, page)
    most = server.config.app.state.service.max_model_len
    address = f"http://{server.config.host}:{answering.port}/v1"
    typer.secho(f"serving {name} at {address}, at most {most} positions a request", dim=True, err=True)
    gc.collect()
    gc.freeze()  # what is loaded stays; to look through it takes 0.15 s, in which no stream goes on
    server.run()


def model_name(model: str | None) -> str:
    """Return what a model is called that has no name of its own: its folder, its hub id, or the embedded one's."""
    return Path(model).name if model and Path(model).is_dir() else model or "tiny"


def from_extra(extra: str, module: str, name: str) -> Any:
    """Return what ``module`` defines. Raises ``ValueError`` if a library of the extra is not installed."""
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mini_engine"):
            raise
        raise ValueError(f"{error.name} is not installed; pip install 'mini-engine[{extra}]'") from None
