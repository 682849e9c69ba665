"""A slider over the steps of an answer, with the effect of the mask below it."""

from collections.abc import Sequence

import ipywidgets  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from mini_engine.viz.figure import Figure
from mini_engine.viz.grammar.draw_answers import before_after, step_table
from mini_engine.viz.grammar.measure import MaskedStep
from mini_engine.viz.sliders import slider, with_picture
from mini_engine.viz.tokens import token_names

NUM_LIKELIEST = 6  # tokens shown of the distribution before the mask
NUM_ALLOWED = 4  # and of the one after it


def step_slider(steps: Sequence[MaskedStep], tokenizer: PreTrainedTokenizerBase, first: int = 0) -> ipywidgets.VBox:
    """Return a slider over the steps and, below it, the likeliest tokens there before the mask and after it."""
    step = slider("step", first, min=0, max=len(steps) - 1)

    def draw() -> str:
        return step_table(steps[step.value], *step_lines(steps, tokenizer, step.value))

    return with_picture([step], draw)


def draw_step(steps: Sequence[MaskedStep], tokenizer: PreTrainedTokenizerBase, number: int) -> Figure:
    """Draw the likeliest tokens of one step, before the mask and after it."""
    return before_after(steps[number], *step_lines(steps, tokenizer, number))


def step_lines(
    steps: Sequence[MaskedStep], tokenizer: PreTrainedTokenizerBase, number: int
) -> tuple[list[int], list[str], str]:
    """Return the ids to show of one step, their names, and a title."""
    step = steps[number]
    likeliest = step.before.topk(NUM_LIKELIEST).indices.tolist()
    allowed = step.after.topk(min(NUM_ALLOWED, step.num_allowed)).indices.tolist()
    shown = list(dict.fromkeys([*likeliest, *allowed]))
    before = "".join(token_names(tokenizer, [own.token_id for own in steps[:number]]))[-30:]
    title = f"Step {number}, after {before}" if before else "Step 0, the beginning"
    return shown, token_names(tokenizer, shown), title
