"""``mini-engine bench drafts``: the engine with drafts and without, and prompt lookup of transformers.

All of them take turns in every round, and ratios are taken within a round. Two loads are written by the model itself.
In the others every answer is given beforehand: a logits processor lets no other token come. So it is known how much of
an answer stands in its prompt. The peer answers one request after the other, since it looks up for one at a time; its
rate is that of the first request of a load.
"""

import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import transformers
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from mini_engine.bench.machine import RANDOM, chosen, machine, make_checkpoint
from mini_engine.checkpoint import TINY_MODEL, load_eos_ids, load_tokenizer
from mini_engine.config import Dtype, EngineConfig
from mini_engine.llm import load_model, make_driver, make_engine
from mini_engine.model import Qwen3
from mini_engine.prompts import encode_chat
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.registry import register_processor
from mini_engine.tiny import corpus

LOOKED_UP = 10  # tokens that the peer drafts
CERTAIN = 1e4  # a logit above all others


@dataclass(frozen=True)
class Task:
    """A prompt, and the answer that is given beforehand; ``None``: the model's own, of at most ``most`` tokens."""

    prompt_ids: list[int]
    answer: list[int] | None
    most: int

    @property
    def params(self) -> SamplingParams:
        """Greedy parameters that give the answer."""
        own = {"recite": {"ids": self.answer}} if self.answer else None
        return SamplingParams(max_new_tokens=self.most, ignore_eos=self.answer is not None, logits_processors=own)


@register_processor("recite")
class Recite(LogitsProcessor[tuple[Sequence[int], int]]):
    """Lets the next token of a given text come, and no other."""

    @classmethod
    def start(
        cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary
    ) -> tuple[Sequence[int], int] | None:
        """``arguments``: ``ids``, the whole text."""
        return arguments["ids"], len(history.output_ids)

    def advance(self, state: tuple[Sequence[int], int], token_id: int) -> tuple[Sequence[int], int]:
        """Go on by one token."""
        return state[0], state[1] + 1

    def apply(self, logits: Tensor) -> None:
        """Lift the next token of each row above all others."""
        for row, (ids, place) in self.states.items():
            logits[row, ids[place]] = CERTAIN


def tiny_tasks(load: str, rng: random.Random) -> Task:
    """Draw a task of a load for the embedded model."""
    tokenizer = load_tokenizer(TINY_MODEL)

    def asked(text: str) -> list[int]:
        return encode_chat(tokenizer, [{"role": "user", "content": text}], think=False)

    if load == "stories":
        return Task(asked(corpus.story_task(rng).prompt), None, 120)
    if load == "records":
        return Task(asked(corpus.record_task(rng).prompt), None, 80)
    story = corpus.story_task(rng)
    sentences = re.findall(r"[^.!?]+[.!?]", story.answer)
    shorter = "".join(sentences[::2])  # a summary that quotes
    edited = story.answer.replace(str(story.facts["name"]), "Zuri")
    text = shorter if load == "summaries" else edited
    answer = tokenizer.encode(text, add_special_tokens=False)
    return Task(asked(f"Tell this again. {story.answer}"), answer, len(answer))


def random_task(load: str, rng: random.Random, vocab_size: int) -> Task:
    """Draw a prompt of 128 ids, and an answer that is its beginning ("copies") or has no id twice ("nothing")."""
    ids = rng.sample(range(vocab_size), 192)
    return Task(ids[:128], ids[:64] if load == "copies" else ids[128:], 64)


LOADS = {"tiny": ("stories", "records", "summaries", "edits", "nothing"), "0.6b": ("copies", "nothing")}


@dataclass(frozen=True)
class Served:
    """Seconds of a load, the tokens that came, the mean seconds of an answer, and what was drafted and accepted."""

    seconds: float
    num_tokens: int
    latency_s: float
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds


def serve(model: Qwen3, config: EngineConfig, eos: frozenset[int], tasks: Sequence[Task]) -> Served:
    """Answer all ``tasks`` together."""
    longest = max(len(task.prompt_ids) + task.most for task in tasks)
    pages = len(tasks) * -(-longest // config.page_size)
    engine = make_engine(make_driver(model, replace(config, num_pages=pages), eos))
    began = time.perf_counter()
    answers = [own for (own,) in engine.generate([t.prompt_ids for t in tasks], [t.params for t in tasks])]
    seconds = time.perf_counter() - began
    ends = [own.times.finished or 0.0 for own in answers if own.times is not None]
    counts = [sum(getattr(own, name) for own in answers) for name in ("num_drafted", "num_accepted")]
    return Served(seconds, sum(len(own.token_ids) for own in answers), statistics.mean(ends) - began, *counts)


def look_up(model: PreTrainedModel, task: Task) -> Served:
    """Answer one task with ``generate`` and prompt lookup."""
    ids = torch.tensor([task.prompt_ids])

    def recite(known: Tensor, scores: Tensor) -> Tensor:
        place = known.shape[1] - len(task.prompt_ids)
        if task.answer and place < len(task.answer):
            scores[:, task.answer[place]] = CERTAIN
        return scores

    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=task.most,
        prompt_lookup_num_tokens=LOOKED_UP,
        logits_processor=[recite] if task.answer else None,
        pad_token_id=0,
        **({"eos_token_id": None} if task.answer else {}),
    )
    seconds = time.perf_counter() - began
    return Served(seconds, out.shape[1] - len(task.prompt_ids), seconds)


@dataclass(frozen=True)
class Row:
    """A load with so many requests at a time: medians over the rounds.

    ``tokens_per_step``: of a request. ``acceptance``: the share of drafted tokens that came; ``None`` if none was
    drafted. ``over_off`` and ``over_peer``: tokens per second with drafts, over those without and those of the peer.
    """

    shape: str
    load: str
    requests: int
    tokens_per_step: float
    acceptance: float | None
    tokens_per_s: float
    latency_s: float
    latency_off_s: float
    over_off: float
    over_peer: float


def make_row(shape: str, load: str, requests: int, rounds: Sequence[tuple[Served, Served, Served]]) -> Row:
    """Reduce rounds of (off, drafts, peer) to a row."""

    def middle(value: Callable[[Served, Served, Served], float]) -> float:
        return statistics.median(value(*each) for each in rounds)

    on = rounds[0][1]
    return Row(
        shape,
        load,
        requests,
        tokens_per_step=on.num_tokens / (on.num_tokens - on.num_accepted),
        acceptance=on.num_accepted / on.num_drafted if on.num_drafted else None,
        tokens_per_s=middle(lambda _, on, __: on.rate),
        latency_s=middle(lambda _, on, __: on.latency_s),
        latency_off_s=middle(lambda off, *_: off.latency_s),
        over_off=middle(lambda off, on, _: on.rate / off.rate),
        over_peer=middle(lambda _, on, peer: on.rate / peer.rate),
    )


def measure(shape: str, folder: Path, loads: Sequence[str], requests: Sequence[int], rounds: int) -> list[Row]:
    """Measure every load of a model with every number of requests, after a round that is not counted."""
    dtype: Dtype = "float32" if shape == "tiny" else "bfloat16"
    config = EngineConfig.serving(dtype=dtype, grammar_backend="none")
    model, eos = load_model(folder, config), load_eos_ids(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    rows = []
    for load in tqdm([name for name in LOADS[shape] if name in loads], desc=shape, unit="load"):
        rng = random.Random(load)
        given = load in ("copies", "nothing")
        size = model.config.vocab_size
        tasks = [random_task(load, rng, size) if given else tiny_tasks(load, rng) for _ in range(max(requests))]
        for count in requests:
            turns = []
            for turn in range(rounds + 1):
                served = {}
                for drafts in ("off", "ngram")[:: 1 if turn % 2 else -1]:  # each is as often the first
                    served[drafts] = serve(model, replace(config, drafts=cast(Any, drafts)), eos, tasks[:count])
                turns.append((served["off"], served["ngram"], look_up(peer, tasks[0])))
            rows.append(make_row(shape, load, count, turns[1:]))
    return rows


def bench_drafts(
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(LOADS)} (all)")] = None,
    load: Annotated[list[str] | None, typer.Option(help="stories, records, … (all)")] = None,
    requests: Annotated[list[int] | None, typer.Option(help="Requests at a time (1, 4, 16)", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.", min=0)] = 0,
) -> None:
    """Tokens a step and speed with drafts, beside none and beside transformers; the last line is JSON."""
    if threads:
        torch.set_num_threads(threads)
    shapes = chosen(shape, LOADS, "shape")
    loads = chosen(load, dict.fromkeys(name for names in LOADS.values() for name in names), "load")
    where = machine(torch.get_num_threads())
    command = f"mini-engine bench drafts {' '.join(f'--shape {each}' for each in shapes)} --rounds {rounds}"
    typer.echo(f"{command}\n{json.dumps(where)}")
    transformers.logging.set_verbosity_error()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for each in shapes:
            folder = make_checkpoint(each, Path(scratch) / each, 0) if each in RANDOM else TINY_MODEL
            rows += measure(each, folder, loads, requests or (1, 4, 16), rounds)
    typer.echo(
        f"{'model':6}{'load':11}{'requests':>9}{'a step':>8}{'accepted':>10}{'tokens/s':>10}{'× off':>8}"
        f"{'× transformers':>16}{'latency s':>11}{'off':>8}"
    )
    for row in rows:
        share = "-" if row.acceptance is None else f"{row.acceptance:.0%}"
        typer.echo(
            f"{row.shape:6}{row.load:11}{row.requests:9}{row.tokens_per_step:8.2f}{share:>10}{row.tokens_per_s:10.1f}"
            f"{row.over_off:8.2f}{row.over_peer:16.2f}{row.latency_s:11.3f}{row.latency_off_s:8.3f}"
        )
    typer.echo(json.dumps({"command": command, "machine": where, "rows": [asdict(row) for row in rows]}))
