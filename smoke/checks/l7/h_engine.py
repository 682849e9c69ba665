"""The checks of the engine with grammars (L7.H to L7.J): an answer is in its own language, whatever shares the step.

Owns: a backend whose grammars are a few sentences, guests that come and go, and what their answers must be: at every
step the token that the specs choose among the allowed ones, and with everything off the bits of an engine that knows no
grammars. The backend needs no other task of L7: a compile takes as long as the probe says.
"""

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smoke.checks.l4 import spec_distribution as distribution
from smoke.checks.l4 import spec_histories as histories
from smoke.checks.l4.k_driver import make_params
from smoke.checks.l4.spec_histories import Past
from smoke.checks.l5.j_engine import agreement, answer, build_engine
from smoke.checks.l5.spec_text import decoded
from smoke.checks.l7 import spec_sentences as specs
from smoke.checks.l7.k_jump import FRUIT, LANGUAGES, PEOPLE, build_sentences
from smoke.framework.cases import embedded_case, embedded_eos_ids, prompts
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
MOST_STEPS = 400
BREVITY = {"max_new_tokens": 9, "min_new_tokens": 9}
MOST = 30  # tokens: enough for every sentence, unless it is drawn in single letters
OWLS = LANGUAGES["one goes on where the other ends"]
THINK, THINK_END = 1022, 1023
STOPS = tuple(sorted(embedded_eos_ids()))


@dataclass(frozen=True)
class Guest:
    """A request: which prompt, its parameters, its sentences, and before which steps it comes and is aborted.

    ``opened``: the prompt ends in the mark that begins a thought.
    """

    prompt: int
    params: dict[str, Any]
    sentences: tuple[str, ...] = ()
    arrives: int = 0
    aborted: int | None = None
    opened: bool = False

    def prompt_ids(self, seed: int) -> list[int]:
        """Return the prompt."""
        return [*prompts(seed)[self.prompt], *[THINK] * self.opened]

    def sampling_params(self) -> Any:
        """Build the parameters; the sentences are the text of a regex, which the backend reads in its own way."""
        grammar = {"regex": json.dumps(self.sentences)} if self.sentences else {}
        return make_params({**self.params, **grammar})


def register_backend(gates: dict[str, threading.Event]) -> None:
    """Let the engine find the backend "sentences". A text in ``gates`` is compiled when its gate is open."""
    from mini_engine.grammar.base import GrammarBackend, GrammarError, register_grammar_backend

    class Backend(GrammarBackend):
        """Reads sentences."""

        name = "sentences"

        def build(self, kind: Any, text: str) -> Any:
            if text in gates:
                gates[text].wait(20.0)
            if not text.startswith("["):
                raise GrammarError(f"{text} are no sentences")
            return build_sentences(json.loads(text), STOPS)

    register_grammar_backend("sentences")(Backend)


def engine_of(gates: dict[str, threading.Event] | None = None, **options: Any) -> Any:
    """Build the candidate's engine with the embedded model and the backend of sentences."""
    register_backend(gates or {})
    given = {"grammar_backend": "sentences", "batch_invariant": True, **options}
    return build_engine(embedded_case(), eos=STOPS, with_text=True, **given)


def drive(engine: Any, guests: Sequence[Guest], seed: int, *, squeeze: bool = False) -> dict[str, Any]:
    """Run guests through the engine, and keep what each was sent.

    ``squeeze`` lets requests in as if none would grow, so that pages run out.
    """
    names = dict[str, int]()
    deltas = [list[Any]() for _ in guests]
    preempted = 0
    forced = [0] * len(guests)
    waiting = list[int]()
    for number in range(MOST_STEPS):
        for index, guest in enumerate(guests):
            if guest.arrives == number:
                names[engine.add_request(guest.prompt_ids(seed), guest.sampling_params())] = index
        for name in [name for name, index in names.items() if guests[index].aborted == number]:
            engine.abort(name)
        engine.scheduler.growth.ratio = 0.0 if squeeze else engine.scheduler.growth.ratio
        output = engine.step()
        engine.scheduler.check_pages()
        preempted = preempted + len(output.preempted)
        waiting = [*waiting, output.num_compiling]
        for delta in output.deltas:
            deltas[names[delta.request_id]].append(delta)
        for name, count in output.forced.items():
            forced[names[name]] += count
        if len(names) == len(guests) and not engine.has_work and not engine.deltas:
            break
    outputs = {index: engine.take_output(name) for name, index in names.items()}
    free = engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages
    answers = [plain_answer(deltas[index], outputs[index], forced[index]) for index in range(len(guests))]
    return {"answers": answers, "preempted": preempted, "all pages free": free, "waiting": waiting}


def plain_answer(deltas: Sequence[Any], output: Any, forced: int) -> dict[str, Any]:
    """Return what a request was sent, which of its tokens were sampled, and what became of its grammar."""
    raise_missing(output.error)
    tokens = [delta for delta in deltas if delta.token_id is not None]
    plain = answer([delta for delta in deltas if delta.token_id is None or delta.logits is not None], output)
    stats = output.grammar_stats
    return {
        **plain,
        "ids": [int(delta.token_id) for delta in tokens],
        "sampled": [delta.logits is not None for delta in tokens],
        "text": "".join(delta.text for delta in deltas),
        "finish_reason": [str(delta.finish_reason) for delta in deltas if delta.finish_reason is not None],
        "logprobs": plain["output"]["logprobs"],
        "matched": output.matched,
        "complete": output.is_grammar_complete,
        "forced": [forced, None if stats is None else int(stats.num_forced_tokens)],
        "masks": None if stats is None else int(stats.num_masks),
    }


def raise_missing(error: str | None) -> None:
    """Raise what a task's missing code raised: the engine made a request's reason of it."""
    found = re.search(r"NotImplementedError\('(L\d+\.[^']*)'\)", error or "")
    if found is not None:
        raise NotImplementedError(found[1])


# What an answer must be ---------------------------------------------------------------------------------------------


def choose(row: Sequence[float], past: Past, params: dict[str, Any], allowed: set[int]) -> int:
    """Choose a token by the specs of all stages, the grammar after every other ban."""
    processed = list(histories.processed(list(row), past, params, STOPS))
    masked = [value if token in allowed else -torch.inf for token, value in enumerate(processed)]
    if not params.get("temperature"):
        return histories.greedy(torch.tensor(masked, dtype=torch.float32).tolist())
    position = len(past.prompt) + len(past.output) - 1
    return distribution.seeded(histories.filtered(masked, params), params["seed"], position)


def judge_choices(guest: Guest, got: dict[str, Any], seed: int, case: str, sentences: Sequence[str]) -> list[Failure]:
    """Ask every sampled token for the specs' choice among what is allowed, and every forced one to be allowed."""
    prompt = guest.prompt_ids(seed)
    ids = got["ids"]
    sampled = 0
    for place, token in enumerate(ids):
        said = specs.spelled(ids[:place])
        allowed = specs.allowed(sentences, said, STOPS)
        where = f"{case}, token {place} after {said.decode(errors='replace')!r}"
        if token not in allowed:
            return [Failure(where, "", "a token that its grammar allows", str(token))]
        if got["sampled"][place]:
            want = choose(
                got["logits"][sampled].tolist(), Past(tuple(prompt), tuple(ids[:place])), guest.params, allowed
            )
            if token != want:
                return [Failure(where, "", f"token {want}, the specs' choice", f"token {token}")]
            sampled += 1
    return []


def judge_whole(guest: Guest, got: dict[str, Any], seed: int, case: str) -> list[Failure]:
    """Ask an answer for one of its sentences and then one stop token, if it had room for them."""
    failures = judge_choices(guest, got, seed, case, guest.sentences)
    if len(got["ids"]) == guest.params["max_new_tokens"] and got["ids"][-1] not in STOPS:  # in single letters
        return failures + differences(["length"], got["finish_reason"], None, case) + agreement(got, case)
    want = {"finish_reason": ["stop"], "complete": True}
    failures += differences(want, {part: got[part] for part in want}, None, case)
    failures += differences(
        [True], [token in STOPS for token in got["ids"][-1:]], None, f"{case}: it ends in a stop token"
    )
    if got["text"] not in guest.sentences or decoded(got["ids"][:-1]) != got["text"]:
        failures.append(Failure(case, "text", f"one of {list(guest.sentences)}", repr(got["text"])))
    return failures + agreement(got, case)


# Together -----------------------------------------------------------------------------------------------------------

PLANS: tuple[Guest, ...] = (
    Guest(3, {"max_new_tokens": MOST}, PEOPLE),
    Guest(0, {"max_new_tokens": 12, "logprobs": 0}),
    Guest(1, {"max_new_tokens": MOST, "temperature": 1.5, "seed": 5}, FRUIT),
    Guest(4, {"max_new_tokens": 9, "temperature": 0.9, "seed": 6, "repetition_penalty": 1.4}, (), 1),
    Guest(8, {"max_new_tokens": MOST, "logit_bias": {5: 100.0, 88: -50.0}, "frequency_penalty": 1.0}, FRUIT, 2),
    Guest(2, {"max_new_tokens": MOST, "temperature": 3.0, "seed": 7, "top_k": 3}, OWLS, 3),
    Guest(5, {"max_new_tokens": 20, "min_new_tokens": 10}, (), 0, 6),
    Guest(6, {"max_new_tokens": MOST, "temperature": 2.0, "seed": 8}, PEOPLE, 4, 9),
)
LOADS: dict[str, dict[str, Any]] = {
    "all at once": {"num_pages": 60},
    "pages run out": {"num_pages": None, "page_size": 1, "preemption": True, "policy": "shortest"},
}


def together_probe(seed: int) -> Values:
    """Run all requests under every load, and those without a grammar alone in an engine that knows none."""
    values: Values = {}
    for load, options in LOADS.items():
        longest = max(len(prompts(seed)[guest.prompt]) for guest in PLANS) + MOST
        engine = engine_of(**{**options, "num_pages": options["num_pages"] or longest}, max_running_requests=8)
        values[load] = drive(engine, PLANS, seed, squeeze=engine.scheduler.limits.preemption)
    for index, guest in enumerate(PLANS):
        if not guest.sentences and guest.aborted is None:
            engine = engine_of(grammar_backend="none")
            values[f"alone {index}"] = drive(engine, [Guest(guest.prompt, guest.params)], seed)["answers"][0]
    return values


def together_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask the constrained for their sentences, the free ones for the bits of their runs alone."""
    failures = []
    for load, options in LOADS.items():
        run = got[load]
        for index, guest in enumerate(PLANS):
            case = f"{load}, request {index} {guest.params}"
            one = run["answers"][index]
            if guest.aborted is not None:
                failures += differences(["abort"], one["finish_reason"], None, case)
                failures += judge_choices(guest, one, seed, case, guest.sentences) if guest.sentences else []
            elif guest.sentences:
                failures += judge_whole(guest, one, seed, case)
            else:
                failures += differences(got[f"alone {index}"], one, None, f"{case}, without a grammar")
        if not run["all pages free"] or ("preemption" in options and run["preempted"] < 2):
            failures.append(Failure(load, "pages", "they run out, and are free at the end", str(run["preempted"])))
    return failures


REGISTRY.add(
    "L7.H.together",
    "Whatever shares the step, preempted or not, a constrained request gives a sentence of its own language, each "
    "token the choice of the specs among the allowed ones, and a free one the bits that it has without grammars.",
    together_probe,
    together_verdict,
    needs=("L7.J",),
    seconds=40.0,
)

# Ends ---------------------------------------------------------------------------------------------------------------

QUOTE = specs.token_bytes().index(b'"')
SOME = {"max_new_tokens": 60}
FOR_EVER = {**SOME, "ignore_eos": True}
# The guest, its last words: the finish reason, whether the text is complete, and a text or ids that are known.
ENDS: dict[str, tuple[Guest, str, bool, list[str] | None]] = {
    "as it comes": (Guest(3, SOME, FRUIT), "stop", True, list(FRUIT)),
    "ignore_eos: no free token comes after the end": (Guest(3, FOR_EVER, FRUIT), "stop", True, list(FRUIT)),
    "ignore_eos, and one may go on where another ends": (Guest(0, FOR_EVER, OWLS), "stop", True, list(OWLS)),
    "a least length beyond the only end": (Guest(3, {**SOME, "min_new_tokens": 25}, FRUIT), "stop", True, list(FRUIT)),
    "a least length that leaves the longer": (Guest(0, {**SOME, "min_new_tokens": 12}, OWLS), "stop", True, [OWLS[1]]),
    "too few tokens": (Guest(3, {"max_new_tokens": 4}, PEOPLE), "length", False, None),
    "a stop string in the middle": (Guest(3, {**SOME, "stop": ["name"]}, PEOPLE), "stop", False, ['{"']),
    "bans that leave nothing, in the middle": (
        Guest(3, {**SOME, "allowed_token_ids": [QUOTE, 50]}, PEOPLE),
        "error",
        False,
        [""],
    ),
}


def ends_probe(seed: int) -> Values:
    """Run all guests together, with one that is free."""
    guests = [guest for guest, *_ in ENDS.values()]
    run = drive(engine_of(num_pages=90, max_running_requests=16), [*guests, Guest(0, {"max_new_tokens": 16})], seed)
    alone = drive(engine_of(grammar_backend="none"), [Guest(0, {"max_new_tokens": 16})], seed)
    return {"run": run["answers"], "alone": alone["answers"][0]}


def ends_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare the ends; what is complete is one of the texts, and nothing comes after the stop token."""
    failures = []
    for (name, (guest, reason, complete, texts)), one in zip(ENDS.items(), got["run"], strict=False):
        found = {"finish_reason": one["finish_reason"], "complete": one["complete"]}
        failures += differences({"finish_reason": [reason], "complete": complete}, found, None, name)
        stops = [place for place, token in enumerate(one["ids"]) if token in STOPS]
        last = [len(one["ids"]) - 1] if complete else []
        failures += differences(last, stops, None, f"{name}: places of stop tokens")
        if texts is not None and one["text"] not in texts:
            failures.append(Failure(name, "text", f"one of {texts}", repr(one["text"])))
        allowed = [
            token in specs.allowed(guest.sentences, specs.spelled(one["ids"][:place]), STOPS)
            for place, token in enumerate(one["ids"])
        ]
        failures += differences([True] * len(allowed), allowed, None, f"{name}: tokens that the grammar allows")
    return failures + differences(got["alone"], got["run"][-1], None, "the free request among them")


REGISTRY.add(
    "L7.H.ends",
    "An answer ends with the stop token that ends its grammar and nothing after it, also with ignore_eos; a least "
    "length cannot keep it from ending where nothing else is allowed; bans that leave nothing end that request alone.",
    ends_probe,
    ends_verdict,
    needs=("L7.J",),
    seconds=40.0,
)

# Compiles that go wrong ---------------------------------------------------------------------------------------------

SLOW = ("The owl said slow.",)
GONE = ("The owl said gone.",)
LATE = ("The owl said late.",)
WAITERS: tuple[Guest, ...] = (
    Guest(3, SOME, SLOW),
    Guest(1, SOME, FRUIT),
    Guest(0, {"max_new_tokens": 12}),
    Guest(4, {**SOME, "regex": "these"}),
    Guest(5, SOME, GONE, 0, 2),
    Guest(6, SOME, FRUIT, 1),
)


def waiting_probe(seed: int) -> Values:
    """Let one compile come late, one never, one be wrong, and one request go while it waits."""
    gates = {json.dumps(sentences): threading.Event() for sentences in (SLOW, GONE, LATE)}
    engine = engine_of(gates, num_pages=60, max_running_requests=4, grammar_timeout_s=10.0)
    plain = engine.step
    num_steps = 0
    ends = list[list[Any]]()

    def step() -> Any:
        """Open the slow gate when nothing is left but the one who waits for it."""
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3 and not engine.scheduler.has_work:
            gates[json.dumps(SLOW)].set()
        output = plain()
        ends.extend([delta.request_id, delta.finish_reason] for delta in output.deltas if delta.finish_reason)
        return output

    engine.step = step
    try:
        run = drive(engine, WAITERS, seed)
        late = engine_of(gates, num_pages=60, grammar_timeout_s=0.5)
        began = time.monotonic()
        overdue = drive(late, [Guest(3, SOME, LATE), Guest(1, SOME, FRUIT)], seed)
        seconds = time.monotonic() - began
    finally:
        for gate in gates.values():
            gate.set()
    values = {"run": run["answers"], "ends": ends, "waiting": run["waiting"], "late": overdue["answers"]}
    return {**values, "seconds": seconds}


def waiting_verdict(seed: int, got: Values) -> list[Failure]:
    """End those alone whose grammars never come; the others do not wait for them."""
    failures = []
    run = got["run"]
    for index in (0, 1, 5):
        failures += judge_whole(WAITERS[index], run[index], seed, f"request {index}")
    failures += differences("0", got["ends"][-1][0], None, "the request that ends last, whose grammar came last")
    failures += differences(["length"], run[2]["finish_reason"], None, "the free request")
    for name, one, reason, words in (
        ("wrong sentences", run[3], "error", "these are no sentences"),
        ("gone while it waits", run[4], "abort", ""),
        ("late", got["late"][0], "error", "grammar_timeout_s"),
    ):
        failures += differences([[reason], []], [one["finish_reason"], one["ids"]], None, name)
        if words not in (one["output"]["error"] or ""):
            failures.append(Failure(name, "the reason", f"words with {words!r}", str(one["output"]["error"])))
    failures += judge_whole(Guest(1, SOME, FRUIT), got["late"][1], seed, "with the late one")
    failures += differences(0, got["waiting"][-1], None, "requests that wait at the end")
    if got["seconds"] > 8.0:
        failures.append(Failure("late", "seconds", "about 0.5", f"{got['seconds']:.1f}"))
    return failures


REGISTRY.add(
    "L7.J.engine",
    "In the engine a grammar that is slow, wrong or given up concerns its own request alone, which ends with a reason.",
    waiting_probe,
    waiting_verdict,
    needs=("L7.H",),
    seconds=40.0,
)

# Thoughts -----------------------------------------------------------------------------------------------------------

FEW = {"max_new_tokens": MOST}
SHORT = {**FEW, "reasoning": True, "logit_bias": {THINK_END: 100.0}}
THINKERS: dict[str, Guest] = {
    "the thought ends at once": Guest(3, SHORT, FRUIT, opened=True),
    "drawn": Guest(
        1,
        {**FEW, "reasoning": True, "logit_bias": {THINK_END: 60.0}, "temperature": 2.0, "seed": 3},
        FRUIT,
        1,
        opened=True,
    ),
    "the thought does not end": Guest(0, {**BREVITY, "reasoning": True}, FRUIT, opened=True),
    "the end of the text has a bias within the thought": Guest(
        0, {"max_new_tokens": 9, "reasoning": True, "logit_bias": dict.fromkeys(STOPS, 100.0)}, FRUIT, opened=True
    ),
    "a thought may come and does not": Guest(3, {**SHORT, "logit_bias": {THINK: -100.0}}, FRUIT),
    "a thought may come and comes": Guest(3, {**SHORT, "logit_bias": {THINK: 50.0, THINK_END: 100.0}}, FRUIT),
    "a thought may not come, and its marks have a bias": Guest(
        3, {**FEW, "logit_bias": {THINK: 100.0, THINK_END: 100.0}}, FRUIT, 2
    ),
}


def thoughts_probe(seed: int) -> Values:
    """Run the thinkers together, plenty of pages and few."""
    values: Values = {}
    longest = max(len(guest.prompt_ids(seed)) for guest in THINKERS.values()) + MOST
    plenty = engine_of(num_pages=60, max_running_requests=4)
    few = engine_of(num_pages=longest, page_size=1, preemption=True, max_running_requests=4)
    for load, engine in (("plenty", plenty), ("few", few)):
        values[load] = drive(engine, list(THINKERS.values()), seed, squeeze=load == "few")["answers"]
    free = Guest(0, BREVITY, opened=True)
    values["alone"] = drive(engine_of(grammar_backend="none"), [free], seed)
    return values


def thoughts_verdict(seed: int, got: Values) -> list[Failure]:
    """Cut the thought off: what follows is a sentence; a thought without an end has the free request's bits."""
    failures = []
    for load in ("plenty", "few"):
        for (name, guest), one in zip(THINKERS.items(), got[load], strict=True):
            case = f"{name}, {load} of pages"
            ids = one["ids"]
            if "within the thought" in name:
                thinks = not set(ids) & {*STOPS, THINK_END}
                failures += differences(
                    [True, 9, ["length"], False],
                    [thinks, len(ids), one["finish_reason"], one["complete"]],
                    None,
                    f"{case}: without an end, tokens, reason, complete",
                )
                continue
            if "not end" in name:
                free = got["alone"]["answers"][0]
                want = [free["ids"], free["logits"], free["finish_reason"], False]
                found = [ids, one["logits"], one["finish_reason"], one["complete"]]
                failures += differences(want, found, None, f"{case}: ids, logits, reason, complete")
                continue
            marks = [THINK, THINK_END] if "and comes" in name else [THINK_END] * guest.opened
            start = len(marks)
            failures += differences(marks, ids[:start], None, f"{case}: the thought")
            failures += differences([["stop"], True], [one["finish_reason"], one["complete"]], None, case)
            text = specs.spelled(ids[start:-1]).decode(errors="replace")
            if text not in guest.sentences or ids[-1] not in STOPS:
                failures.append(Failure(case, "the answer", f"one of {list(guest.sentences)}", repr(text)))
    return failures


REGISTRY.add(
    "L7.I.engine",
    "With reasoning a thought may come and is free but for the end of the text, and the answer is not: it begins after "
    "the thought or at once, also after a preemption.",
    thoughts_probe,
    thoughts_verdict,
    needs=("L7.H", "L7.J"),
    seconds=40.0,
)
