"""``mini-engine route``: a server whose work is done by several processes, or by other servers."""

from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any

import typer

from mini_engine.cli.options import GenerationConfig, Model, with_groups
from mini_engine.cli.serve import Answering, Running, from_extra, model_name

OF_THE_ROUTER = ("host", "port", "api_key", "allow_origin")  # its replicas listen to it alone, and get its key


def router_option(*names: str, help: str, **more: Any) -> Any:
    """Return an option under the heading of the workers'."""
    return typer.Option(*names, help=help, rich_help_panel="Who does the work", **more)


@with_groups
def route(
    *,
    model: Model = None,
    generation_config: GenerationConfig = "auto",
    replicas: Annotated[
        int, router_option(help="Start so many servers on this machine. They end with the router.", min=0)
    ] = 0,
    ray: Annotated[
        bool, router_option("--ray", help="Let Ray run them, on any machine of the cluster that $RAY_ADDRESS names.")
    ] = False,
    worker: Annotated[
        list[str] | None,
        router_option(help="URL of a server that runs already, with the same model and key. Can be repeated."),
    ] = None,
    answering: Answering,
    running: Running,
) -> None:
    """Serve a model from several processes: each request goes where its beginning was computed before."""
    from mini_engine.checkpoint import resolve_folder  # with torch, which the help does without
    from mini_engine.cli.start import input_errors

    named = replace(answering, name=answering.name or model_name(model))
    with ExitStack() as stack:
        with input_errors():
            config = running.config()
            build_router = from_extra("server", "mini_engine.router.build", "build_router")
            workers = from_extra("server", "mini_engine.router.build", "servers_at")(worker or ())
            if ray and not replicas:
                raise ValueError("--ray runs the replicas; add --replicas 2")
            if ray:
                actors = from_extra("ray", "mini_engine.router.actors", "actors")
                make_app = partial(replica_app, model, generation_config, named, running)
                workers += stack.enter_context(actors(replicas, make_app))
            elif replicas:
                start = from_extra("server", "mini_engine.router.replicas", "replicas")
                options = ["--model", model] if model else []
                options += ["--generation-config", generation_config, *as_options(named), *as_options(running)]
                workers += stack.enter_context(start(replicas, options, answering.api_key))
            if not workers:
                raise ValueError("there is no worker; give --replicas 2, or --worker with the URL of a server")
            server = build_router(workers, resolve_folder(model), named.name, answering, config)
        names = ", ".join(each.name for each in workers)
        typer.secho(f"routing to {names} at http://{server.config.host}:{answering.port}/v1", dim=True, err=True)
        server.run()


def replica_app(model: str | None, generation_config: str, answering: Answering, running: Running) -> Any:
    """Return the application of one worker, in the process in which it is to run. Raises ``ValueError``."""
    from mini_engine.cli.start import start, take_defaults

    build_server = from_extra("server", "mini_engine.server.build", "build_server")
    folder, stored = take_defaults(model, generation_config)
    driver, tokenizer = start(folder, running.engine, running.config())
    return build_server(driver, tokenizer, answering.name or "", replace(answering, host=None), stored).config.app


def as_options(group: Any) -> list[str]:
    """Return the options of ``serve`` that say what a group of options says."""
    options = list[str]()
    for name in (each.name for each in fields(group) if each.name not in OF_THE_ROUTER):
        value = getattr(group, name)
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            options += [f"--{flag}", str(value)]
    return options
