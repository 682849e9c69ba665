"""The check of a whole program on the embedded model (L9.D): what it computes, and what a choice's scores are."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from smoke.checks.l9.machine import Words
from smoke.framework import peer
from smoke.framework.cases import MODEL_FOLDER, embedded_case
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
STORY = "Once upon a time there was a fox named Mila who lived in a small house near the river."
ASPECTS = (" The color is", " The name is", " A friend is")
CHOICES = [" big", " very small", " red"]


def engine_probe(seed: int) -> Values:
    """Run a program of forks, a join and a choice on two inputs, note every call, and run it once more."""
    from mini_engine import lang

    @lang.program
    def essay(s: Any, animal: str) -> None:
        s += STORY + f" Then came a {animal}."
        forks = s.fork(3)
        for place, aspect in enumerate(ASPECTS):
            forks[place] += aspect + lang.gen("fact", max_new_tokens=6, stop=".")
        s.join(forks)
        s += " It is" + lang.select("kind", CHOICES) + lang.gen("why", max_new_tokens=5)

    backend = noted_backend()
    states = essay.run_batch([{"animal": animal} for animal in ("dog", "owl")], backend=backend)
    calls = list(backend.made)
    states.append(essay.run("dog", backend=backend))
    return {
        "errors": [str(state.error) for state in states],
        "equal programs": [states[0].text == states[2].text, states[0].ids == states[2].ids],
        "fact": states[0]["fact"],
        "scores": [list(row) for row in states[0].answer("kind").logprobs],
        "calls": [
            [list(call.ids), call.start, list(call.output.token_ids), call.output.num_cached_tokens] for call in calls
        ],
    }


def noted_backend() -> Any:
    """Return the embedded model with pages of one token, as a backend that keeps every call in ``made``."""
    from mini_engine.config import EngineConfig
    from mini_engine.lang.backends import ALWAYS_SHARE, InProcess
    from mini_engine.llm import load_driver, make_engine

    class Noted(InProcess):
        """Keeps every call."""

        def __init__(self, llm: Any) -> None:
            """Keep none yet."""
            super().__init__(llm)
            self.made: list[Any] = []

        def submit(self, call: Any) -> None:
            """Note it."""
            super().submit(call)
            self.made.append(call)

    config = EngineConfig(
        batch_invariant=True, max_running_requests=8, page_size=1, num_pages=16_384, preemption=True, **ALWAYS_SHARE
    )
    words = Words(Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json")))
    engine = make_engine(load_driver(None, config), words.backend_tokenizer)
    return Noted(SimpleNamespace(engine=engine, tokenizer=words))  # all that a backend takes of an LLM


def engine_verdict(seed: int, got: Values) -> list[Failure]:
    """Count the nodes of the tree of all calls, and ask transformers for the scores."""
    failures = differences(["None"] * 3, got["errors"], None, "errors")
    failures += differences([True, True], got["equal programs"], None, "two programs with the same input")
    calls = got["calls"]
    nodes = set[tuple[int, ...]]()
    for ids, _, out, _ in calls:
        whole = [*ids, *out[:-1]]  # the last token that a call writes is never computed
        nodes |= {tuple(whole[:end]) for end in range(1, len(whole) + 1)}
    own = sum(1 if start is None else len(ids) - start + 1 for ids, start, _, _ in calls)
    computed = sum(len(ids) + len(out[:-1]) - cached for ids, _, out, cached in calls)
    if not len(nodes) <= computed <= len(nodes) + own:
        failures.append(
            Failure("tokens computed", "", f"{len(nodes)} of the tree, and at most {own} again", str(computed))
        )
    scored = Counter(tuple(ids) for ids, start, _, _ in calls if start is not None and start > 1)
    for row, (ids, start) in zip(got["scores"], scored_choices(calls), strict=True):
        logits = peer.logits(embedded_case(), "float32", "sdpa", ids).double().log_softmax(-1)
        expected = [float(logits[place - 1, ids[place]]) for place in range(start, len(ids))]
        failures += differences(expected, row, 1e-4, f"log-probabilities of {ids[start:]}")
    failures += differences(2 * len(CHOICES), len(scored), None, "scored choices of two different programs")
    return failures


def scored_choices(calls: list[Any]) -> list[tuple[list[int], int]]:
    """Return the calls that score the choices of the first program, in the order of the choices."""
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    scoring = [(ids, start) for ids, start, _, _ in calls if start is not None and start > 1]
    own = [(ids, start) for ids, start in scoring if " dog" in tokenizer.decode(ids[:start])]
    return [next(each for each in own if each[0][each[1] :] == tokenizer.encode(c).ids) for c in CHOICES]


REGISTRY.add(
    "L9.D.engine",
    "On the embedded model a batch of programs computes the tokens of its prefix tree, and little else; the scores are "
    "the log-probabilities of transformers.",
    engine_probe,
    engine_verdict,
    needs=("L9.C",),
    seconds=60.0,
)
