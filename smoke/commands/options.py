"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

LessonArgument = Annotated[str, typer.Argument(metavar="LESSON", help="L1, L2, …")]
TargetArgument = Annotated[
    str, typer.Argument(metavar="[WHAT]", help="L4, L4.B or L4.B.top_k; without it, where you are.")
]
EngineOption = Annotated[Path, typer.Option("--engine", help="The folder with your modules.")]
BaseOption = Annotated[
    str, typer.Option("--base", help="What lies beneath: reference, or own for your earlier lessons.")
]
PatternOption = Annotated[str, typer.Option("-k", help="Only checks whose id contains this, like L2.B.")]
FactorOption = Annotated[float, typer.Option("--time-factor", min=0.1, help="Stretch every time limit.")]
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="L2.B, …")]
