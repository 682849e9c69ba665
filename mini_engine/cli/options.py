"""The options that commands share, and what they build: an engine's configuration, a request's sampling parameters.

Owns: names and help of options, and the checks that only make sense on a command line. Must not know: commands.
"""

from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from mini_engine.config import Compute, Dtype, EngineConfig
from mini_engine.sampler.params import PRESETS, SamplingParams

ENGINE_PANEL, SAMPLING_PANEL = "How the engine runs", "How tokens are chosen"


Model = Annotated[
    str | None, typer.Option(help="Checkpoint folder or hub id of a dense Qwen3; the embedded model if not given.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
DtypeOption = Annotated[str, typer.Option(help="float32 or bfloat16.", rich_help_panel=ENGINE_PANEL)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …", rich_help_panel=ENGINE_PANEL)]
COMPUTE_HELP = (
    "reference: the bits of transformers. packed: weights packed once, 2-3 times faster on a CPU. fast: packed, and "
    "faster decode steps in bfloat16. compiled: compiled loops, fastest for a small model on a CPU. triton: the "
    "course's kernels, on an NVIDIA GPU or with TRITON_INTERPRET=1."
)
ComputeOption = Annotated[str, typer.Option("--compute", help=COMPUTE_HELP, rich_help_panel=ENGINE_PANEL)]
ServingCompute = Annotated[
    str | None,
    typer.Option("--compute", help=f"The fastest if not given. {COMPUTE_HELP}", rich_help_panel=ENGINE_PANEL),
]
Engine = Annotated[
    Path | None,
    typer.Option(
        help="Folder whose modules stand in for the engine's own, such as your work/.", rich_help_panel=ENGINE_PANEL
    ),
]
BatchInvariant = Annotated[
    bool, typer.Option(help="Bits that do not depend on batch, chunks or threads.", rich_help_panel=ENGINE_PANEL)
]

Preset = Annotated[
    str | None,
    typer.Option(help=f"Start from {', '.join(PRESETS)}; other options change it.", rich_help_panel=SAMPLING_PANEL),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0: always the likeliest token. 1: the model's own distribution.", rich_help_panel=SAMPLING_PANEL
    ),
]
TopK = Annotated[int | None, typer.Option(help="Only the k likeliest tokens can come.", rich_help_panel=SAMPLING_PANEL)]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Only the likeliest tokens that together reach this probability.", rich_help_panel=SAMPLING_PANEL
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Nothing less likely than this share of the likeliest token.", rich_help_panel=SAMPLING_PANEL),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: seen tokens become less likely.", rich_help_panel=SAMPLING_PANEL)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Taken off a logit for every time the token came.", rich_help_panel=SAMPLING_PANEL)
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken off a logit once the token came.", rich_help_panel=SAMPLING_PANEL)
]
MinNewTokens = Annotated[
    int | None, typer.Option(help="No end of the text before this many tokens.", rich_help_panel=SAMPLING_PANEL)
]
LogprobsOption = Annotated[
    int | None, typer.Option("--logprobs", help="Report each token's log-probability and that many alternatives.")
]
Trace = Annotated[bool, typer.Option("--trace", help="Print, for every token, the distribution after every stage.")]
Samples = Annotated[int, typer.Option("--n", help="So many answers, generated side by side.")]
BestOf = Annotated[int | None, typer.Option(help="Generate so many and show the --n likeliest.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=SAMPLING_PANEL)]


def make_config(dtype: str, device: str, compute: str, batch_invariant: bool, **changes: Any) -> EngineConfig:
    """Build the configuration, which checks the words, with ``changes`` to other options.

    Raises ``ValueError`` for a device that is not there.
    """
    check_device(device)
    return EngineConfig(
        dtype=cast(Dtype, dtype),
        device=device,
        compute=cast(Compute, compute),
        batch_invariant=batch_invariant,
        **changes,
    )


def check_device(device: str) -> None:
    """Raise ``ValueError`` for a device that is not there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {device!r} cannot be used ({str(error).splitlines()[0]}); try --device cpu"
        ) from error


def make_params(preset: str | None, **given: Any) -> SamplingParams:
    """Build the parameters from the options that were given (``None`` means not given).

    Raises ``ValueError`` for an option that greedy decoding would ignore, beside the errors of ``SamplingParams``.
    """
    changes = {name: value for name, value in given.items() if value is not None}
    params = SamplingParams.preset(preset, **changes) if preset else SamplingParams(**changes)
    for name in ("top_k", "top_p", "min_p", "seed"):
        if params.is_greedy and name in changes:
            raise ValueError(
                f"--{name.replace('_', '-')} changes nothing at temperature 0, where the likeliest token is taken; "
                "add --temperature"
            )
    return params
