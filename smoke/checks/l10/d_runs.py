"""The checks of whole runs with drafts (L10.D): every answer is the one without drafts, to the bit.

Owns: runs in which a drafter knows what comes and is wrong now and then, under the loads of L5, with stop strings,
grammars, samples and a prefix cache. The oracle is L4's driver, which knows no drafts, or the engine with drafts off.
Slots behind what a request has computed, where refused tokens left keys and values, are NaN after every step.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from smoke.checks.l3 import driver as l3
from smoke.checks.l4 import k_driver as l4
from smoke.checks.l4.k_driver import make_params
from smoke.checks.l5 import j_engine as l5
from smoke.checks.l5 import spec_text as text
from smoke.checks.l5.j_engine import MODELS, PLANS, alone, drive, entries_of, like_alone, load_options, model_case
from smoke.checks.l6 import h_engine as l6
from smoke.checks.l7 import h_engine as l7
from smoke.checks.l7.k_jump import FRUIT, LANGUAGES, PEOPLE
from smoke.checks.l10.machine import Prophet, keen
from smoke.framework.cases import ModelCase, embedded_case, prompts, random_case, random_ids
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
SPOILT = (0.0, 0.4)  # how often a guess is spoilt
MOST_DRAFTED = 7  # tokens of a draft of one request, where the rows of a step leave so many


def build(
    case: ModelCase,
    drafter: Callable[[], Any] | None,
    *,
    eos: Sequence[int] = (),
    with_text: bool = False,
    rows: int = 32,
    **options: Any,
) -> Any:
    """Build the candidate's engine, which drafts with ``drafter`` up to ``rows`` rows a step; without one never."""
    from mini_engine.llm import make_engine

    drafting = {} if drafter is None else {"drafts": "own", "max_draft_rows": rows}
    driver = l4.build_driver(case, eos=eos, batch_invariant=True, **drafting, **options)
    return poisoned(make_engine(driver, text.tokenizer() if with_text else None, drafter=drafter))


def poisoned(engine: Any) -> Any:
    """Let every step end with NaN in the slots behind what its requests have computed. Mutates the engine."""
    from mini_engine.attention.metadata import slots_of

    step = engine.step

    def stepped() -> Any:
        output = step()
        size = engine.scheduler.page_size
        for request in engine.scheduler.running:
            slots = slots_of(request.pages, request.num_computed_tokens, len(request.pages) * size, size)
            for tensor in (*engine.worker.pool.keys, *engine.worker.pool.values):
                tensor[:, slots] = float("nan")
        return output

    engine.step = stepped
    return engine


def counts(engine: Any) -> list[int]:
    """Return how many tokens were drafted and how many of them came."""
    return [sum(sum(getattr(step, name).values()) for step in engine.log) for name in ("drafted", "accepted")]


# Whatever shares the steps ------------------------------------------------------------------------------------------

ROWS = {"four at a time": 20, "chunks of up to 5 tokens": 16, "pages run out": 9}


def bits_probe(seed: int) -> Values:
    """Run all plans of L5 under its loads, with a drafter that knows their answers, and each alone with L4's driver."""
    values: Values = {}
    for name, dtype in MODELS:
        case = model_case(name, seed)
        given = [plan.prompt(case, seed, index) for index, plan in enumerate(PLANS)]
        driver = l4.build_driver(case, dtype=dtype, batch_invariant=True)
        lonely = [alone(driver, p, plan.params) for p, plan in zip(given, PLANS, strict=True)]
        texts = [[*prompt, *own["ids"]] for prompt, own in zip(given, lonely, strict=True)]
        values[f"{name}, alone"] = lonely
        for load, rows in ROWS.items():
            dice = random.Random(f"{seed} {load}")
            options = load_options(load, PLANS)
            with keen():
                engine = build(case, partial(Prophet, texts, dice), dtype=dtype, rows=rows, **options)
                l5.poison_freed_pages(engine)
                run = drive(engine, PLANS, given, squeeze=engine.scheduler.limits.preemption, rng=random.Random(seed))
            values[f"{name}, {load}"] = {**run, "counts": counts(engine)}
    return values


def bits_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare every request under every load with its run alone; drafts must have come and been refused."""
    failures = []
    drafted, accepted = (sum(run["counts"][place] for run in got.values() if "counts" in run) for place in (0, 1))
    if drafted == accepted:
        failures.append(Failure("all runs", "drafts", "some do not come", f"all {drafted} do"))
    for name, _ in MODELS:
        for load in ROWS:
            run = got[f"{name}, {load}"]
            for index, plan in enumerate(PLANS):
                where = f"{name}, {load}, request {index} {plan.params}"
                failures += like_alone(run["requests"][index], got[f"{name}, alone"][index], plan, where)
            if run["counts"][1] <= 3:
                failures.append(Failure(f"{name}, {load}", "drafts", "more than 3 tokens come", str(run["counts"])))
            if not run["all pages free"] or ("run out" in load and run["preempted"] < 2):
                failures.append(Failure(f"{name}, {load}", "pages", "they run out, and are free at the end", str(run)))
    return failures


REGISTRY.add(
    "L10.D.bits",
    "With drafts, right and wrong ones, every request has the ids, logits and log-probabilities that it has alone, to "
    "the bit: penalties, seeds and limits know nothing of refused tokens.",
    bits_probe,
    bits_verdict,
    seconds=90.0,
)

# Ends ---------------------------------------------------------------------------------------------------------------

FREE = 36  # tokens of a story; drafts reach beyond every end that is set into it


def end_plans(ids: Sequence[int]) -> dict[str, tuple[dict[str, Any], tuple[int, ...]]]:
    """Return parameters and the model's end ids of requests that end somewhere in a text of these ids."""
    late = {token: place for place, token in reversed(list(enumerate(ids)))}  # the first place of each token
    ordered = sorted(late, key=late.__getitem__)
    middle, other = ordered[len(ordered) // 2], ordered[-1]
    most = {"max_new_tokens": FREE}
    words = [text.decoded(ids[place : place + 2]) for place in (5, 11, 18)]
    plans: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
        **{f"at most {count}": ({"max_new_tokens": count}, ()) for count in range(1, 12)},
        **{f"the stop string {word!r}": ({**most, "stop": [word]}, ()) for word in words},
        "a stop string inside a token": ({**most, "stop": [text.decoded([ids[9]])[1:2] or "e"]}, ()),
        "two stop strings, at least 12 tokens": ({**most, "stop": words[:2], "min_new_tokens": 12}, ()),
        "a stop id": ({**most, "stop_token_ids": [middle]}, ()),
        "a late stop id": ({**most, "stop_token_ids": [other]}, ()),
        "an end id": (most, (middle,)),
        "an end id that is ignored": ({**most, "ignore_eos": True}, (middle,)),
        "an end id that must not come yet": ({**most, "min_new_tokens": late[middle] + 3}, (middle,)),
    }
    more: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 1}
    plans["a stop string with reports"] = ({**most, "stop": words[1:], **more}, ())
    plans["processed reports"] = ({**most, "stop": words[2:], "logprobs": 0, "logprobs_mode": "processed"}, ())
    plans["drawn without a seed"] = ({"max_new_tokens": 20, "temperature": 1.0}, ())
    plans["drawn, penalised"] = (
        {"max_new_tokens": 24, "temperature": 1.1, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "top_p": 0.9},
        (),
    )
    plans["a processor that remembers"] = (
        {"max_new_tokens": 24, "logits_processors": {"no_repeat_ngram": {"ngram_size": 2, "window_size": None}}},
        (),
    )
    return plans


def ends_probe(seed: int) -> Values:
    """Let every request run with drafts off, then with a drafter that knows that answer and what would follow it."""
    values: Values = {}
    case = embedded_case()
    prompt = prompts(seed)[seed % 3]
    free = single(build(case, None, with_text=True), prompt, {"max_new_tokens": FREE, "ignore_eos": True})
    for name, (params, eos) in end_plans(free["ids"]).items():
        off = single(build(case, None, eos=eos, with_text=True), prompt, params)
        texts = [[*prompt, *free["ids"]], [*prompt, *off["ids"], *range(40, 52)]]
        values[name] = {"off": off}
        for spoilt in SPOILT:
            dice = random.Random(f"{seed} {name}")
            with keen():
                engine = build(case, partial(Prophet, texts, dice, spoilt), eos=eos, with_text=True)
                values[name][f"spoilt {spoilt}"] = single(engine, prompt, params)
                values[name][f"counts {spoilt}"] = [*counts(engine), len(engine.log)]
    return values


def single(engine: Any, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """Run one request and return its answer, and how many pages are not free at the end."""
    name = engine.add_request(prompt, make_params(params))
    l5.run_out(engine)
    output = engine.take_output(name)
    return {**told(output), "pages": engine.scheduler.allocator.num_pages - engine.scheduler.allocator.num_free}


def told(output: Any) -> dict[str, Any]:
    """Return an answer as plain values."""
    l7.raise_missing(output.error)
    return {
        "ids": [int(token) for token in output.token_ids],
        "text": output.text,
        "finish_reason": output.finish_reason,
        "matched": output.matched,
        "error": output.error,
        "logprobs": [entries_of(entries) for entries in output.logprobs],
        "prompt_logprobs": l5.table_of(output.prompt_logprobs),
        "complete": output.is_grammar_complete,
    }


def ends_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare with drafts off; each accepted token saves a step."""
    failures = []
    for name, runs in got.items():
        off = runs["off"]
        for spoilt in SPOILT:
            where = f"{name}, spoilt {spoilt}"
            failures += differences(off, runs[f"spoilt {spoilt}"], None, where)
            _, accepted, taken = runs[f"counts {spoilt}"]
            failures += differences(len(off["ids"]) - accepted, taken, None, f"{where}, steps")
            if not spoilt and taken > 2 + len(off["ids"]) // MOST_DRAFTED:
                failures.append(Failure(where, "steps", "few: every guess is right", str(taken)))
    return failures


REGISTRY.add(
    "L10.D.ends",
    "An answer ends where it ends without drafts: at a stop string, a stop id, the model's end or the most tokens, "
    "also inside of a draft that goes on; its text, its reports and what is drawn without a seed stay the same.",
    ends_probe,
    ends_verdict,
    seconds=90.0,
)

# Grammars -----------------------------------------------------------------------------------------------------------

LETTERS = LANGUAGES["letters beyond ASCII"]
GUESTS: dict[str, l7.Guest] = {
    "people": l7.Guest(3, {"max_new_tokens": 26, "logprobs": 1}, PEOPLE),
    "drawn": l7.Guest(4, {"max_new_tokens": 26, "temperature": 1.5, "seed": 11}, LETTERS, 1),
    "fruit, cut": l7.Guest(0, {"max_new_tokens": 9}, FRUIT),
    "fruit": l7.Guest(0, {"max_new_tokens": 26, "frequency_penalty": 1.0}, FRUIT, 2),
    "free": l7.Guest(2, {"max_new_tokens": 16}),
}


def grammars_probe(seed: int) -> Values:
    """Run guests with grammars, with and without text that is forced, drafts off and on."""
    values: Values = {}
    guests = list(GUESTS.values())
    for jump in (False, True):
        options: dict[str, Any] = {
            "jump_forward": jump,
            "num_pages": 200,
            "max_running_requests": 6,
            "grammar_backend": "sentences",
        }
        l7.register_backend({})
        off = l7.drive(build(embedded_case(), None, eos=l7.STOPS, with_text=True, **options), guests, seed)["answers"]
        texts = [[*guest.prompt_ids(seed), *own["ids"], *range(40, 52)] for guest, own in zip(guests, off, strict=True)]
        dice = random.Random(f"grammars {seed}")
        with keen():
            engine = build(
                embedded_case(),
                partial(Prophet, texts, dice, 0.2),
                eos=l7.STOPS,
                with_text=True,
                rows=48,
                **options,
            )
            on = l7.drive(engine, guests, seed)
        values[f"jump_forward={jump}"] = {
            "off": list(map(kept, off)),
            "on": list(map(kept, on["answers"])),
            "counts": counts(engine),
            "all pages free": on["all pages free"],
        }
    return values


def kept(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that drafts must keep."""
    return {part: answer[part] for part in ("ids", "text", "finish_reason", "matched", "complete", "logprobs")}


def grammars_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare every guest with drafts off."""
    failures = []
    for name, run in got.items():
        for guest, off, on in zip(GUESTS, run["off"], run["on"], strict=True):
            failures += differences(off, on, None, f"{guest}, {name}")
        if not run["counts"][1] or not run["all pages free"]:
            failures.append(Failure(name, "drafts", "some come, and all pages are free", str(run["counts"])))
    return failures


REGISTRY.add(
    "L10.D.grammars",
    "An answer with a grammar is the one without drafts: it ends inside a draft that goes on, and forced text comes "
    "where it came.",
    grammars_probe,
    grammars_verdict,
    seconds=60.0,
)

# The prefix cache and samples ---------------------------------------------------------------------------------------


def tree_visits(case: ModelCase, seed: int) -> list[l6.Visit]:
    """Return visits of one stem that come one after the other, so that later ones find what earlier ones left."""
    stem = random_ids(case.vocab_size, 17, seed)
    more = [random_ids(case.vocab_size, length, seed + 2) for length in (5, 3, 9)]
    sampled = {"temperature": 1.1, "seed": 4, "top_k": 40}
    return [
        l6.Visit([*stem, *more[0]], {"max_new_tokens": 14, "logprobs": 1}),
        l6.Visit([*stem, *more[1]], {"max_new_tokens": 11, **sampled}),
        l6.Visit([*stem[:10], *more[2]], {"max_new_tokens": 9, "repetition_penalty": 1.5}, 1),
        l6.Visit([*stem, *more[2]], {"max_new_tokens": 12, **sampled, "n": 3}, 2),
        l6.Visit([*stem, *more[0]], {"max_new_tokens": 16, "frequency_penalty": 1.2}, 6),
        l6.Visit([*stem, *more[1]], {"max_new_tokens": 12, "temperature": 0.7, "seed": 8}, 7, aborted=9),
        l6.Visit([*stem, *more[0]], {"max_new_tokens": 18, "logprobs": 1}, 14),
    ]


def tree_probe(seed: int) -> Values:
    """Run visits with a prefix cache that notes what it is told, and each sample alone and cold."""
    case = random_case(l3.SMALL, seed)
    visits = tree_visits(case, seed)
    cold = l6.reference_runs(case, "float32", visits)
    texts = [[*visits[int(name.partition(".")[0])].prompt, *own["ids"]] for name, own in cold.items()]
    values: Values = {"cold": cold}
    for size, pages in ((1, 150), (4, 60)):
        dice = random.Random(f"tree {seed} {size}")
        options: dict[str, Any] = {
            "prefix_cache": "radix",
            "page_size": size,
            "num_pages": pages,
            "max_running_requests": 4,
        }
        with keen():
            engine = build(case, partial(Prophet, texts, dice), rows=24, **options)
            heard = listening(engine.scheduler.cache)
            run = l6.drive(engine, visits)
        told_wrong = [tokens for tokens in heard if not any(own[: len(tokens)] == tokens for own in texts)]
        values[f"pages of {size}"] = {**run, "heard": len(heard), "wrong": told_wrong, "counts": counts(engine)}
    return values


def listening(cache: Any) -> list[list[int]]:
    """Return a list of all tokens that a prefix cache will be told of. Mutates the cache."""
    insert = cache.insert
    heard: list[list[int]] = []

    def inserted(token_ids: Any, pages: Any, *rest: Any, **more: Any) -> Any:
        heard.append([int(token) for token in token_ids])
        return insert(token_ids, pages, *rest, **more)

    cache.insert = inserted
    return heard


def tree_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare with the cold runs; the cache may hear of nothing but what came."""
    visits = tree_visits(random_case(l3.SMALL, seed), seed)
    failures = []
    for name in ("pages of 1", "pages of 4"):
        run = got[name]
        failures += l6.like_alone(run, got["cold"], visits, name)
        failures += differences([], run["wrong"], None, f"{name}, tokens that the cache is told of and that never came")
        drafted, accepted = run["counts"]
        if not drafted > accepted > 10 or not run["heard"]:
            failures.append(Failure(name, "drafts", "some come, some do not, the cache is told", str(run["counts"])))
    return failures


REGISTRY.add(
    "L10.D.tree",
    "The prefix cache hears of no token that did not come, and whoever starts from it, samples and aborted requests "
    "among them, gets the bits of a cold run.",
    tree_probe,
    tree_verdict,
    seconds=60.0,
)

# The whole ----------------------------------------------------------------------------------------------------------

COPIES = ("red ball, blue box, red ball, blue box, red ball,", "One two three. One two three. One two three.")


def whole_probe(seed: int) -> Values:
    """Run texts that repeat with the n-grams of the engine, alone and together, with drafts off and on."""
    values: Values = {}
    given = [text.tokenizer().encode(each).ids for each in COPIES] + prompts(seed)[:2]
    for count in (1, 4):
        answers = {}
        for drafts in ("off", "ngram"):
            driver = l4.build_driver(
                embedded_case(),
                batch_invariant=True,
                drafts=drafts,
                max_running_requests=count,
                num_pages=100,
            )
            from mini_engine.llm import make_engine

            engine = poisoned(make_engine(driver, text.tokenizer()))
            names = [engine.add_request(ids, make_params({"max_new_tokens": 60})) for ids in given]
            l5.run_out(engine)
            answers[drafts] = [told(engine.take_output(name)) for name in names]
            values[f"{count} at a time, {drafts}, steps"] = len(engine.log)
        values[f"{count} at a time"] = answers
    return values


def whole_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare with drafts off; there may be fewer steps and no more."""
    failures = []
    for count in (1, 4):
        name = f"{count} at a time"
        failures += differences(got[name]["off"], got[name]["ngram"], None, name)
        before, after = (got[f"{name}, {drafts}, steps"] for drafts in ("off", "ngram"))
        if after > before:
            failures.append(Failure(name, "steps", f"at most {before}", str(after)))
    return failures


REGISTRY.add(
    "L10.D.whole",
    'drafts="ngram" gives the answers of drafts="off", alone and together, in no more steps.',
    whole_probe,
    whole_verdict,
    needs=("L10.A", "L10.B"),
    seconds=60.0,
)
