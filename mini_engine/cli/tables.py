"""The tables that commands print: log-probabilities of tokens, the stages of the sampler.

Tables go to standard error, as everything does that is not generated text.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from mini_engine.sampler.logprobs import TokenLogprob
from mini_engine.sampler.trace import SamplingTrace
from mini_engine.texts import AfterText

FIGURE_WIDTH, LABEL_WIDTH = 7, 16  # of figures and of what they are about


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return a token as Python would write it, so that spaces and line breaks show; special tokens by their name."""
    return repr(AfterText(tokenizer.backend_tokenizer).decode([token_id], skip_special_tokens=False))


def make_table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table: text on the left, figures, and a last column that gives way on a narrow terminal."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    label, *figures, last = columns
    table.add_column(label, no_wrap=True, width=LABEL_WIDTH)
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True, width=FIGURE_WIDTH)
    table.add_column(last, no_wrap=True, ratio=1)
    return table


def show(table: Table) -> None:
    """Print a table to standard error, at most as wide as the terminal."""
    Console(stderr=True, highlight=False, markup=False).print(table)


def print_trace(trace: SamplingTrace, tokenizer: PreTrainedTokenizerBase, token_id: int) -> None:
    """Print what every stage did to the row that ``token_id`` was chosen from."""
    table = make_table(f"-> {token_text(tokenizer, token_id)}", ["stage", "tokens", "bits", "kept", "likeliest"])
    for stage in trace.stages(0):
        likeliest = "  ".join(f"{token_text(tokenizer, token)} {prob:.3f}" for token, prob in stage.top)
        table.add_row(stage.name, str(stage.support), f"{stage.entropy:.2f}", f"{stage.kept:.1%}", likeliest)
    show(table)


def print_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[Sequence[TokenLogprob]]) -> None:
    """Print one line per token: its log-probability and rank, and the alternatives."""
    table = make_table("log-probabilities", ["token", "logprob", "rank", "likeliest"])
    for chosen, *others in tokens:
        likeliest = "  ".join(f"{token_text(tokenizer, entry.token_id)} {entry.logprob:.2f}" for entry in others)
        table.add_row(token_text(tokenizer, chosen.token_id), f"{chosen.logprob:.2f}", str(chosen.rank), likeliest)
    show(table)
