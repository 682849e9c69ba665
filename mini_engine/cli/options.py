"""The options that commands share, in groups, and what they build: an engine's configuration, a request's parameters.

A command has a parameter for each group, and ``with_groups`` makes an option of each of the group's fields.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, cast

import typer

from mini_engine.config import Compute, Drafts, Dtype, EngineConfig, Exchange, Quantize, options
from mini_engine.sampler.params import PRESETS, SamplingParams

ENGINE_PANEL, SAMPLING_PANEL = "How the engine runs", "How tokens are chosen"


def engine_option(*names: str, help: str) -> Any:
    """Return an option under the heading of the engine's."""
    return typer.Option(*names, help=help, rich_help_panel=ENGINE_PANEL)


def config_option(field: str, *names: str) -> Any:
    """Return an option that sets a field of ``EngineConfig``, with its meaning as help."""
    return engine_option(*names, help=options()[field][1])


def sampling_option(*names: str, help: str) -> Any:
    """Return an option under the heading of the sampler's."""
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING_PANEL)


Model = Annotated[
    str | None, typer.Option(help="Checkpoint folder or hub id (see families); the embedded model if not given.")
]
GenerationConfig = Annotated[
    str,
    sampling_option(help="auto: take the defaults that generation_config.json stores. none: take none."),
]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
DtypeOption = Annotated[str, config_option("dtype")]
Device = Annotated[str, config_option("device")]
ComputeOption = Annotated[str, config_option("compute")]
ServingCompute = Annotated[
    str | None, engine_option("--compute", help=f"The fastest if not given. {options()['compute'][1]}")
]
Engine = Annotated[
    Path | None, engine_option(help="Folder whose modules stand in for the engine's own, such as your work/.")
]
BatchInvariant = Annotated[bool, config_option("batch_invariant")]
MaxModelLen = Annotated[int | None, config_option("max_model_len")]
DraftsOption = Annotated[str, config_option("drafts")]
QuantizeOption = Annotated[str, config_option("quantize")]
TensorParallel = Annotated[int, config_option("tensor_parallel")]
TensorParallelMode = Annotated[str, config_option("tensor_parallel_mode")]


@dataclass(frozen=True)
class Computing:
    """How one request at a time is computed."""

    dtype: DtypeOption = "float32"
    device: Device = "cpu"
    compute: ComputeOption = "reference"
    quantize: QuantizeOption = "off"
    batch_invariant: BatchInvariant = False
    max_model_len: MaxModelLen = None
    drafts: DraftsOption = "off"
    tensor_parallel: TensorParallel = 1
    tensor_parallel_mode: TensorParallelMode = "gather"
    engine: Engine = None

    def config(self, **changes: Any) -> EngineConfig:
        """Build the configuration, which checks the words, with ``changes`` to other options."""
        return EngineConfig(
            dtype=cast(Dtype, self.dtype),
            device=self.device,
            compute=cast(Compute, self.compute),
            quantize=cast(Quantize, self.quantize),
            batch_invariant=self.batch_invariant,
            max_model_len=self.max_model_len,
            drafts=cast(Drafts, self.drafts),
            tensor_parallel=self.tensor_parallel,
            tensor_parallel_mode=cast(Exchange, self.tensor_parallel_mode),
            **changes,
        )


@dataclass(frozen=True)
class Drawing:
    """How a token is drawn. ``None``: not given."""

    preset: Annotated[
        str | None, sampling_option(help=f"Start from {', '.join(PRESETS)}; other options change it.")
    ] = None
    temperature: Annotated[
        float | None, sampling_option(help="0: always the likeliest token. 1: the model's own distribution.")
    ] = None
    top_k: Annotated[int | None, sampling_option(help="Only the k likeliest tokens can come.")] = None
    top_p: Annotated[
        float | None, sampling_option(help="Only the likeliest tokens that together reach this probability.")
    ] = None
    min_p: Annotated[
        float | None, sampling_option(help="Nothing less likely than this share of the likeliest token.")
    ] = None
    seed: Annotated[int | None, sampling_option(help="The same seed gives the same text.")] = None


@dataclass(frozen=True)
class Shaping:
    """What changes logits before a token is drawn. ``None``: not given."""

    repetition_penalty: Annotated[float | None, sampling_option(help="Above 1: seen tokens become less likely.")] = None
    frequency_penalty: Annotated[
        float | None, sampling_option(help="Taken off a logit for every time the token came.")
    ] = None
    presence_penalty: Annotated[float | None, sampling_option(help="Taken off a logit once the token came.")] = None
    min_new_tokens: Annotated[int | None, sampling_option(help="No end of the text before this many tokens.")] = None


@dataclass(frozen=True)
class Answers:
    """How many answers there are and what is reported of them. ``None``: not given."""

    logprobs: Annotated[
        int | None, typer.Option(help="Report each token's log-probability and that many alternatives.")
    ] = None
    n: Annotated[int, typer.Option("--n", help="So many answers, generated side by side.")] = 1
    best_of: Annotated[int | None, typer.Option(help="Generate so many and show the --n likeliest.")] = None


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has an option for each field of its parameters that are groups (dataclasses)."""
    parameters = inspect.signature(command).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    flat = list[inspect.Parameter]()
    for name, each in parameters.items():
        if name in groups:
            members = fields(groups[name])
            flat += [inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type) for f in members]
        else:
            flat.append(each.replace(kind=keyword))

    def run(**given: Any) -> None:
        built = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**given, **built)

    run.__doc__ = command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in flat}
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return run


def make_params(
    *groups: Drawing | Shaping | Answers, stored: Mapping[str, Any] = MappingProxyType({}), **given: Any
) -> SamplingParams:
    """Build the parameters from the options that were given (``None`` means not given).

    ``stored``: what the checkpoint stores instead of them. Raises ``ValueError`` for an option that greedy decoding
    would ignore, and as ``SamplingParams`` does.
    """
    for group in groups:
        given |= vars(group)
    changes = {name: value for name, value in given.items() if value is not None}
    preset = changes.pop("preset", None)
    params = SamplingParams.preset(preset, **changes) if preset else SamplingParams(**{**stored, **changes})
    for name in ("top_k", "top_p", "min_p", "seed"):
        if params.is_greedy and name in changes:
            raise ValueError(
                f"--{name.replace('_', '-')} changes nothing at temperature 0, where the likeliest token is taken; "
                "add --temperature"
            )
    return params
