"""The checks of forced text in the engine (L7.K): a jump saves passes and changes nothing else.

Owns: guests whose sentences leave hardly any choice, and what their answers must be: sentences, within their limits,
each sampled token the specs' choice after everything that was appended, each report from the whole text's own logits.
"""

from typing import Any

from smoke.checks.l7 import spec_sentences as specs
from smoke.checks.l7.h_engine import STOPS, THINK_END, Guest, drive, engine_of, judge_choices, judge_whole
from smoke.checks.l7.k_jump import FRUIT, LANGUAGES, PEOPLE
from smoke.framework import peer
from smoke.framework.cases import embedded_case, prompts
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
ONE = LANGUAGES["one sentence"]
LETTERS = LANGUAGES["letters beyond ASCII"]
# Five foxes in a row, then a choice that the penalty decides: it must know of forced tokens.
FOXES = tuple(f"The fox, the fox, the fox, the fox, the fox and the {last}." for last in ("fox", "owl"))
MOST = 26  # tokens, and so as few pages as make the requests wait for each other

PLANS: dict[str, Guest] = {
    "one sentence": Guest(0, {"max_new_tokens": MOST}, ONE),
    "people, reported": Guest(3, {"max_new_tokens": MOST, "logprobs": 1}, PEOPLE),
    "foxes, penalised": Guest(1, {"max_new_tokens": MOST, "frequency_penalty": 2.0, "logprobs": 0}, FOXES, 1),
    "drawn": Guest(4, {"max_new_tokens": MOST, "temperature": 1.5, "seed": 11}, LETTERS, 2),
    "gone in the middle": Guest(5, {"max_new_tokens": MOST}, PEOPLE, 0, 5),
    "free": Guest(2, {"max_new_tokens": 10, "logprobs": 1}),
}
LOADS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "pages run out": {"page_size": 1, "preemption": True, "policy": "shortest"},
}


def together_probe(seed: int) -> Values:
    """Run all guests with jumps, and the free one alone without; pages as many as the longest guest may need."""
    values: Values = {}
    longest = max(len(prompts(seed)[guest.prompt]) for guest in PLANS.values()) + MOST
    for load, options in LOADS.items():
        engine = engine_of(jump_forward=True, num_pages=longest, max_running_requests=6, **options)
        values[load] = drive(engine, list(PLANS.values()), seed, squeeze=engine.scheduler.limits.preemption)
    free = PLANS["free"]
    values["alone"] = drive(engine_of(grammar_backend="none"), [Guest(free.prompt, free.params)], seed)["answers"][0]
    values["without"] = drive(engine_of(), [PLANS["one sentence"]], seed)
    return values


def together_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for sentences, for fewer passes, and for reports that are the peer's."""
    failures = []
    for load, options in LOADS.items():
        run = got[load]
        for (name, guest), one in zip(PLANS.items(), run["answers"], strict=True):
            case = f"{name}, {load}"
            if name == "free":
                failures += differences(got["alone"], one, None, case)
                continue
            if guest.aborted is not None:
                failures += judge_choices(guest, one, seed, case, guest.sentences)
                continue
            failures += judge_whole(guest, one, seed, case)
            appended = one["sampled"].count(False)
            failures += differences([appended, appended], one["forced"], None, f"{case}: appended tokens, as counted")
            if not appended:
                failures.append(Failure(case, "appended tokens", "some", "none"))
            if "logprobs" in guest.params:
                failures += judge_reports(guest, one, seed, case)
        if not run["all pages free"] or ("preemption" in options and not run["preempted"]):
            failures.append(Failure(load, "pages", "they run out, and are free at the end", str(run["preempted"])))
    without = got["without"]["answers"][0]
    failures += judge_whole(PLANS["one sentence"], without, seed, "one sentence, jump_forward off")
    return failures + differences([True] * len(without["ids"]), without["sampled"], None, "sampled, jump_forward off")


def judge_reports(guest: Guest, got: dict[str, Any], seed: int, case: str) -> list[Failure]:
    """Ask the peer for the log-probability of every token, sampled or appended, after all that stand before it."""
    prompt = prompts(seed)[guest.prompt]
    ids = got["ids"]
    table = peer.logits(embedded_case(), "float32", "sdpa", [*prompt, *ids])[len(prompt) - 1 : -1].log_softmax(-1)
    want = [[token, float(table[place, token])] for place, token in enumerate(ids)]
    found = [[entries[0][0], entries[0][1]] for entries in got["logprobs"]]
    return differences(want, found, 1e-3, f"{case}: token and its log-probability")


REGISTRY.add(
    "L7.K.engine",
    "With jump-forward an answer is a sentence still: penalties and later tokens know what was appended, its "
    "log-probabilities are reported in their places, a preemption loses nothing, and others notice nothing.",
    together_probe,
    together_verdict,
    needs=("L7.H", "L7.J"),
    seconds=60.0,
)

# Limits ---------------------------------------------------------------------------------------------------------------

FOX = specs.token_bytes().index(b" fox")
LIMITS: dict[str, tuple[Guest, str, str | None]] = {
    **{f"at most {most} tokens": (Guest(0, {"max_new_tokens": most}, ONE), "length", None) for most in (1, 2, 3, 5, 9)},
    "a stop string in forced text": (Guest(0, {"max_new_tokens": 48, "stop": ["time"]}, ONE), "stop", "Once upon a "),
    "a stop string across tokens": (Guest(3, {"max_new_tokens": 48, "stop": ['e":']}, PEOPLE), "stop", '{"nam'),
    "a stop token in forced text": (
        Guest(0, {"max_new_tokens": 48, "stop_token_ids": [FOX]}, ONE),
        "stop",
        ONE[0].partition(" fox")[0],
    ),
    "a least length": (Guest(0, {"max_new_tokens": 48, "min_new_tokens": 30}, ONE), "stop", ONE[0]),
    "ignore_eos": (Guest(0, {"max_new_tokens": 48, "ignore_eos": True}, ONE), "stop", ONE[0]),
    "after a thought": (
        Guest(0, {"max_new_tokens": 48, "reasoning": True, "logit_bias": {THINK_END: 100.0}}, ONE, opened=True),
        "stop",
        f"</think>{ONE[0]}",
    ),
    "a banned word inside": (Guest(0, {"max_new_tokens": 48, "bad_words": [[FOX]]}, ONE), "any", None),
    "a report of processed numbers": (
        Guest(3, {"max_new_tokens": 48, "logprobs": 0, "logprobs_mode": "processed"}, FRUIT),
        "stop",
        None,
    ),
}


def limits_probe(seed: int) -> Values:
    """Run all guests together."""
    engine = engine_of(jump_forward=True, num_pages=120, max_running_requests=16)
    return {"answers": drive(engine, [guest for guest, *_ in LIMITS.values()], seed)["answers"]}


def limits_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare ends and texts; nothing comes after the end, and nothing is in it that is banned."""
    failures = []
    for (name, (guest, reason, text)), one in zip(LIMITS.items(), got["answers"], strict=True):
        found = differences([reason], one["finish_reason"], None, name) if reason != "any" else []
        found += differences(text, one["text"], None, name) if text is not None else []
        ids = one["ids"][1:] if guest.params.get("reasoning") else one["ids"]
        allowed = [
            token in specs.allowed(guest.sentences, specs.spelled(ids[:place]), STOPS) or token == THINK_END
            for place, token in enumerate(ids)
        ]
        found += differences([True] * len(allowed), allowed, None, f"{name}: tokens that the grammar allows")
        if reason == "length":
            found += differences(guest.params["max_new_tokens"], len(ids), None, f"{name}: tokens")
        if "bad_words" in guest.params:
            found += differences(0, ids.count(FOX), None, f"{name}: banned words")
        if "logprobs_mode" in guest.params:
            found += differences(len(ids), len(one["logprobs"]), None, f"{name}: reports")
        failures += found
    return failures


REGISTRY.add(
    "L7.K.limits",
    "Appended tokens count: none beyond the most, a stop string among them ends the answer there, and who asks for "
    "what only the model can tell gets it.",
    limits_probe,
    limits_verdict,
    needs=("L7.H", "L7.I", "L7.J"),
    seconds=40.0,
)
