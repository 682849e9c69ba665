"""``mini-engine bench``: one command for each benchmark."""

from importlib.util import find_spec

import typer

from mini_engine.bench.ablate import bench_ablate
from mini_engine.bench.batch import bench_batch
from mini_engine.bench.drafts import bench_drafts
from mini_engine.bench.forward import bench_forward
from mini_engine.bench.grammar.command import bench_grammar
from mini_engine.bench.kernels.command import bench_kernels
from mini_engine.bench.prefix import bench_prefix
from mini_engine.bench.quantize import bench_quantize
from mini_engine.bench.ranks import bench_ranks
from mini_engine.bench.replicas import bench_route
from mini_engine.bench.route_latency import bench_route_latency
from mini_engine.bench.sampler import bench_sampler
from mini_engine.bench.serve import bench_serve
from mini_engine.bench.serving import bench_serving

bench = typer.Typer(help="Measure the engine beside a peer, in the same process.", no_args_is_help=True)
bench.command("forward")(bench_forward)
bench.command("sampler")(bench_sampler)
bench.command("serving")(bench_serving)
bench.command("serve")(bench_serve)
bench.command("route-latency")(bench_route_latency)
bench.command("ablate")(bench_ablate)
bench.command("prefix")(bench_prefix)
bench.command("grammar")(bench_grammar)
bench.command("kernels")(bench_kernels)
bench.command("batch")(bench_batch)
bench.command("drafts")(bench_drafts)
bench.command("quantize")(bench_quantize)
bench.command("route")(bench_route)
bench.command("ranks")(bench_ranks)
if find_spec("greenlet") is not None:  # the extra "lang"
    from mini_engine.bench.lang import bench_lang

    bench.command("lang")(bench_lang)
