"""``mini-engine play``: a page in the browser on which one sees the engine think."""

import time
import webbrowser
from dataclasses import dataclass
from threading import Thread
from typing import Annotated, Any, cast

import typer

from mini_engine.cli.options import ComputeOption, DraftsOption, DtypeOption, Engine, Model, config_option, with_groups
from mini_engine.cli.serve import Answering, from_extra, model_name
from mini_engine.config import Compute, Drafts, Dtype, EngineConfig
from mini_engine.sampler.params import SamplingParams


@dataclass(frozen=True)
class Small:
    """An engine so small that its limits are seen: prompts come in chunks, pages run out."""

    dtype: DtypeOption = "float32"
    compute: ComputeOption = "reference"
    running: Annotated[int, config_option("max_running_requests")] = 6
    step_tokens: Annotated[int, config_option("max_tokens_per_step")] = 24
    pages: Annotated[int, config_option("num_pages")] = 48
    page_size: Annotated[int, config_option("page_size")] = 8
    eviction: Annotated[str, config_option("eviction")] = "lru"
    drafts: DraftsOption = "off"
    engine: Engine = None

    def config(self) -> EngineConfig:
        """Build the configuration. Raises ``ValueError``."""
        return EngineConfig.serving(
            dtype=cast(Dtype, self.dtype),
            compute=cast(Compute, self.compute),
            max_running_requests=self.running,
            max_tokens_per_step=self.step_tokens,
            num_pages=self.pages,
            page_size=self.page_size,
            prefix_cache="radix",
            eviction=self.eviction,
            drafts=cast(Drafts, self.drafts),
        )


@with_groups
def play(
    *,
    model: Model = None,
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any that is free.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    small: Small,
) -> None:
    """Open a page in the browser on which one sees the engine think. Only this machine can reach it."""
    from mini_engine.cli.start import input_errors, start  # torch, which the help does without

    with input_errors():
        build_server = from_extra("server", "mini_engine.server.build", "build_server")
        driver, tokenizer = start(model, small.engine, small.config(), SamplingParams())  # the page has knobs for them
        server = build_server(driver, tokenizer, model_name(model), Answering(port=port), page=True)
    server.config.app.state.modules = None if small.engine is None else small.engine.name
    Thread(target=show_page, args=(server, browser), daemon=True).start()
    server.run()


def show_page(server: Any, browser: bool) -> None:
    """Wait until ``server`` listens, say where, and open the page in the ``browser`` if asked."""
    while not server.started:
        time.sleep(0.05)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    typer.secho(f"see the engine think at http://{host}:{port}/ (Ctrl-C ends it)", err=True)
    if browser:
        webbrowser.open(f"http://{host}:{port}/")
