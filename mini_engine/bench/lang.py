"""``mini-engine bench lang``: programs of the frontend language, the same without a cache, and on transformers.

The programs are those of the paper (Zheng et al., 2024), with what the embedded model can write. Its answers mean
little; work and time are what is measured. The systems take turns in every round, each with a cold cache, and the
median of the ratios within a round is reported.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from mini_engine import lang
from mini_engine.bench.machine import machine
from mini_engine.checkpoint import TINY_MODEL, load_eos_ids, load_tokenizer
from mini_engine.lang.backends import Backend, Call, InProcess, finish
from mini_engine.llm import LLM
from mini_engine.outputs import RequestOutput
from mini_engine.prompts import encode_text
from mini_engine.sampler.logprobs import TokenLogprob
from mini_engine.sampler.params import SamplingParams

NAMES = ("Mila", "Tom", "Ben", "Anna", "Leo", "Ida", "Max", "Eva")
ANIMALS = ("fox", "dog", "cat", "owl", "bear", "bird", "frog", "mouse")
SHOTS = "".join(
    f"Record: name = {name}, animal = {animal}, age = {age}\nKind: {'wild' if age % 2 else 'tame'}\n\n"
    for age, (name, animal) in enumerate(zip(NAMES, ANIMALS, strict=True))
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
}


@lang.program
def few_shot(s: lang.State, name: str, animal: str) -> None:
    """Classify a record after eight examples."""
    s += SHOTS + f"Record: name = {name}, animal = {animal}, age = 9\nKind:"
    s += lang.select("kind", [" wild", " tame", " not known"])


@lang.program
def tree_of_thought(s: lang.State, name: str, animal: str) -> None:
    """Propose three steps, score them, and go on from the best, twice."""
    s += SHOTS + f"Once upon a time there was a {animal} named {name}."
    for depth in range(2):
        branches = s.fork(3)
        for index in range(3):
            branches[index] += f" Idea {index + 1}:" + lang.gen("step", max_new_tokens=16, stop=".")
            branches[index] += ". This is" + lang.select("worth", [" good", " bad"])
        best = max(branches, key=lambda branch: branch.answer("worth").scores["mean"][0])
        s += f" Step {depth + 1}:{best['step']}."


@lang.program
def skeleton(s: lang.State, name: str, animal: str) -> None:
    """Write the points of a story, then every point at the same time."""
    s += SHOTS + f"A story about the {animal} {name} in three points:" + lang.gen("points", max_new_tokens=24)
    parts = s.fork(3)
    for index in range(3):
        parts[index] += f"\nPoint {index + 1}:" + lang.gen("part", max_new_tokens=24)
    s.join(parts)


@lang.program
def judge(s: lang.State, name: str, animal: str) -> None:
    """Look at a text from four sides, and give it a grade."""
    s += lang.system("You judge stories. " + SHOTS) + lang.user(f"The {animal} {name} went home and was happy.")
    sides = s.fork(4)
    for index, side in enumerate(("words", "plot", "end", "name")):
        sides[index] += lang.assistant(f"The {side}:" + lang.gen("opinion", max_new_tokens=16, stop="."))
    s.join(sides)
    s += lang.assistant("".join(f"{text}." for text in s["opinion"]) + lang.select("grade", [" A", " B", " C"]))


@lang.program
def json_record(s: lang.State, name: str, animal: str) -> None:
    """Write a record as JSON."""
    s += SHOTS + f"The {animal} {name} as JSON: " + lang.gen("record", json_schema=SCHEMA, max_new_tokens=60)


@lang.program
def chat(s: lang.State, name: str, animal: str) -> None:
    """Talk for four turns."""
    s += lang.system("You tell stories. " + SHOTS)
    for question in (f"Who is {name}?", f"What does the {animal} like?", "And then?", "How does it end?"):
        s += lang.user(question) + lang.assistant(lang.gen(max_new_tokens=16))


@lang.program
def tools(s: lang.State, name: str, animal: str) -> None:
    """Think, choose a tool and read what it gives, three times."""
    s += SHOTS + f"Where does the {animal} {name} live?"
    for turn in range(3):
        s += f"\nThought {turn + 1}:" + lang.gen("thought", max_new_tokens=16, stop="\n")
        s += "\nAction:" + lang.select("action", [" look", " ask", " end"])
        s += f"\nSeen: {len(s['action'])} trees"


@lang.program
def nothing_shared(s: lang.State, name: str, animal: str) -> None:
    """Go on from a text that begins unlike all others."""
    s += f"{name} the {animal} lived in a small house near the river." + lang.gen("rest", max_new_tokens=32)


SHARING = (few_shot, tree_of_thought, skeleton, judge, json_record, chat, tools)
OWN_ROUNDS = 5  # of the program that shares nothing, for each of the others: its rounds are short
SHARED, ALONE, PEER, PLAIN = "programs", "without cache", "transformers", "Engine.generate"


class Transformers:
    """Calls of ``transformers``, one after the other, as a program without an engine makes them. No grammars."""

    def __init__(self, model: Any) -> None:
        """Compute with ``model``."""
        self.model = model
        self.tokenizer = load_tokenizer(TINY_MODEL)
        self.eos_token_ids = load_eos_ids(TINY_MODEL)
        self.stats: Counter[str] = Counter()
        self.calls: list[Call] = []

    def submit(self, call: Call) -> None:
        """Queue a call."""
        self.calls.append(call)

    def abort(self, call: Call) -> None:
        """Forget a call."""
        self.calls.remove(call)

    @torch.inference_mode()
    def advance(self) -> None:
        """Compute the oldest call."""
        call = self.calls.pop(0)
        ids = torch.tensor([call.ids])
        if call.start is not None:
            rows = self.model(ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()
            report = [None, *([TokenLogprob(token, row, 0)] for token, row in zip(call.ids[1:], rows, strict=True))]
            finish(call, RequestOutput("", call.ids, prompt_logprobs=report, finish_reason="length"), self.stats)
            return
        limit = call.params.max_new_tokens
        stop = list(call.params.stop)
        options: dict[str, Any] = {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
        mask = torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=limit, **options)
        new = out[0, len(call.ids) :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        places = [place for each in stop if (place := text.find(each)) >= 0]
        reason: Any = "length" if len(new) == limit and not places else "stop"
        text = text[: min(places, default=None)]
        finish(call, RequestOutput("", call.ids, new, text, reason, matched=stop[0] if places else None), self.stats)


@dataclass(frozen=True)
class LangRow:
    """A program on a system. ``ratio``: programs per second to those of ``peer``. ``computed``: prompt tokens."""

    program: str
    system: str
    peer: str
    programs_per_second: float
    ratio: float
    latency_s: float
    calls: int
    prompt_tokens: int
    computed: int


def make_backends() -> dict[str, Callable[[], Backend]]:
    """Return what makes a backend of each system, with a cold cache."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    return {
        SHARED: lambda: InProcess(LLM(**lang.ALWAYS_SHARE)),
        ALONE: lambda: InProcess(LLM()),
        PEER: lambda: Transformers(model),
    }


def measure(program: lang.Program, make: Callable[[], Backend], inputs: list[dict[str, Any]]) -> LangRow:
    """Run ``inputs`` together, and one of them alone, each with a cold cache."""
    backend = make()
    began = time.perf_counter()
    states = program.run_batch(inputs, backend=backend)
    seconds = time.perf_counter() - began
    for state in states:
        if state.error is not None:
            raise state.error
    single = make()
    began = time.perf_counter()
    program.run(**inputs[0], backend=single)
    latency = time.perf_counter() - began
    stats = backend.stats
    name = program.function.__name__
    computed = stats["prompt_tokens"] - stats["cached_tokens"]
    speed = len(inputs) / seconds
    return LangRow(name, "", "", speed, 1.0, latency, stats["calls"], stats["prompt_tokens"], computed)


def measure_plain(inputs: list[dict[str, Any]]) -> float:
    """Return requests per second of ``Engine.generate`` with the calls that ``nothing_shared`` makes."""
    backend = InProcess(LLM(**lang.ALWAYS_SHARE))
    prompts = [f"{each['name']} the {each['animal']} lived in a small house near the river." for each in inputs]
    began = time.perf_counter()
    ids = [encode_text(backend.tokenizer, prompt) for prompt in prompts]
    backend.engine.generate(ids, SamplingParams(max_new_tokens=32))
    return len(inputs) / (time.perf_counter() - began)


def median_row(rows: list[LangRow], peers: list[float], system: str, peer: str) -> LangRow:
    """Return one row for all rounds: medians, and the median of the ratios within a round."""
    middle = {
        name: statistics.median(getattr(row, name) for row in rows) for name in ("programs_per_second", "latency_s")
    }
    ratio = statistics.median(row.programs_per_second / other for row, other in zip(rows, peers, strict=True))
    return LangRow(**{**asdict(rows[-1]), **middle, "ratio": ratio, "system": system, "peer": peer})


def bench_lang(
    programs: Annotated[int, typer.Option(help="Programs that run together.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds over all programs.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
) -> None:
    """Programs of the frontend language beside the same on transformers; the last line is JSON."""
    torch.set_num_threads(threads)
    command = f"mini-engine bench lang --programs {programs} --rounds {rounds} --threads {threads}"
    where = machine(threads)
    typer.echo(f"{command}\n{json.dumps(where)}")
    pairs = [{"name": NAMES[i % 8], "animal": ANIMALS[i // 8 % 8]} for i in range(programs)]
    systems = make_backends()
    rows: list[LangRow] = []
    for program in tqdm(SHARING, unit="program"):
        names = [SHARED, ALONE] if program is json_record else [SHARED, ALONE, PEER]
        peer = names[-1]
        measured = [{name: measure(program, systems[name], pairs) for name in names} for _ in range(rounds)]
        peers = [each[peer].programs_per_second for each in measured]
        rows += [median_row([each[name] for each in measured], peers, name, peer) for name in names]
    own = [(measure(nothing_shared, systems[SHARED], pairs), measure_plain(pairs)) for _ in range(OWN_ROUNDS * rounds)]
    rows.append(median_row([row for row, _ in own], [plain for _, plain in own], SHARED, PLAIN))
    typer.echo(f"{'program':<16}{'system':<16}{'programs/s':>11}{'x':>7}{'latency s':>11}{'calls':>7}{'computed':>15}")
    for row in rows:
        share = f"{row.computed} of {row.prompt_tokens}"
        typer.echo(
            f"{row.program:<16}{row.system:<16}{row.programs_per_second:11.1f}{row.ratio:7.2f}{row.latency_s:11.3f}"
            f"{row.calls:7}{share:>15}"
        )
    typer.echo(json.dumps({"command": command, "machine": where, "rows": [asdict(row) for row in rows]}))
