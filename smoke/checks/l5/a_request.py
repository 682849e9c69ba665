"""The checks of a request and its lengths (L5.A) and of the estimate of how long it becomes (L5.C).

Owns: the way from a request in plain numbers to the candidate's, and probes that ask single requests. Policies are in
``b_policy.py``, single decisions of the scheduler in ``d_share.py``, whole steps in ``g_step.py``. No model.
"""

import random
from fractions import Fraction
from typing import Any

from smoke.checks.l5 import spec_scheduling as scheduling
from smoke.checks.l5.spec_scheduling import Person
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise, close
from smoke.framework.reads import Counted

REGISTRY = Registry()
STATES = ("waiting", "running", "preempted", "finished")


def prompt_of(person: Person) -> list[int]:
    """Return a prompt; no two positions have the same token."""
    return [100 + position for position in range(person.prompt)]


def output_of(person: Person) -> list[int]:
    """Return an output; no token of it is in the prompt."""
    return [10_000 + position for position in range(person.outputs)]


def build_request(person: Person) -> Any:
    """Build the candidate's request. Its pages are numbers of their own; a scheduler gives it others."""
    from mini_engine.sampler.params import SamplingParams
    from mini_engine.scheduler.request import Request, RequestState

    return Request(
        person.name,
        prompt_of(person),
        SamplingParams(max_new_tokens=person.most),
        arrival=person.arrival,
        output_ids=output_of(person),
        state=RequestState(person.state),
        pages=list(range(person.pages)),
        num_computed_tokens=person.computed,
        num_preemptions=person.preemptions,
        steps_waited=person.waited,
    )


def draw_people(name: str, seed: int, count: int) -> list[Person]:
    """Draw requests that are anywhere between their beginning and their end."""
    rng = random.Random(f"{name} {seed}")
    people = []
    for index in range(count):
        person = Person(f"r{index}", rng.randint(1, 30), rng.randint(1, 20), index)
        person.outputs = rng.choice([0, 0, rng.randint(0, person.most - 1)])
        person.computed = rng.choice([0, person.known - 1, rng.randrange(person.known)])
        person.waited = rng.choice([0, 0, 1, 2, 5])
        person.state = rng.choice(STATES)
        people.append(person)
    return people


# L5.A ---------------------------------------------------------------------------------------------------------------

LENGTHS = (
    "num_prompt_tokens",
    "num_output_tokens",
    "num_tokens",
    "num_pending_tokens",
    "max_computed_tokens",
    "is_computing_prompt",
)


def length_people(seed: int) -> dict[str, Person]:
    """Return requests around the end of their prompt, in every state, and some drawn ones."""
    people = [
        Person("r0", 5, 4, outputs=2, computed=computed, state=state) for computed in (0, 4, 5, 6) for state in STATES
    ]
    people += [Person("r0", 5, 4, outputs=4, computed=8, state="finished"), Person("r0", 1, 1, state="running")]
    people += [Person("r0", 1, 3, outputs=2, computed=2, state="running")]
    people += draw_people("lengths", seed, 20)
    return {
        f"prompt of {p.prompt}, {p.outputs} of {p.most} new tokens, {p.computed} computed, {p.state}, case {index}": p
        for index, p in enumerate(people)
    }


def lengths_probe(seed: int) -> Values:
    """Read all lengths."""
    requests = {name: build_request(person) for name, person in length_people(seed).items()}
    return {name: {length: getattr(request, length) for length in LENGTHS} for name, request in requests.items()}


def lengths_spec(seed: int) -> Values:
    """Count token by token."""
    values: Values = {}
    for name, p in length_people(seed).items():
        tokens = ["prompt"] * p.prompt + ["output"] * p.outputs
        values[name] = {
            "num_prompt_tokens": tokens.count("prompt"),
            "num_output_tokens": tokens.count("output"),
            "num_tokens": len(tokens),
            "num_pending_tokens": len(tokens[p.computed :]),
            "max_computed_tokens": scheduling.most_computed(p),
            "is_computing_prompt": p.state == "running" and "prompt" in tokens[p.computed :],
        }
    return values


def stretches(person: Person) -> list[tuple[int, int]]:
    """Return all stretches of a request's tokens, empty ones included."""
    return [(start, stop) for start in range(person.known + 1) for stop in range(start, person.known + 1)]


LONG = 200  # tokens of a prompt and of an output
FEW = (3, LONG - 1)  # where two tokens are asked for
TOKEN_PEOPLE = (Person("r0", 4, outputs=3), Person("r1", 1, outputs=5), Person("r2", 6), Person("r3", 3, outputs=1))


def tokens_probe(seed: int) -> Values:
    """Ask for every stretch; the prompt is once a list and once a tuple."""
    values: Values = {}
    for person in TOKEN_PEOPLE:
        for kind in (list, tuple):
            request = build_request(person)
            request.prompt_ids = kind(request.prompt_ids)
            for start, stop in stretches(person):
                got = request.tokens(start, stop)
                name = f"{person.prompt} prompt tokens in a {kind.__name__} and {person.outputs} more"
                values[f"{name}, tokens({start}, {stop})"] = got if isinstance(got, list) else f"a {type(got).__name__}"
    return values | few_probe()


def few_probe() -> Values:
    """Ask for two tokens of a long prompt and a long output, and count what is read of both."""
    values: Values = {}
    for start in FEW:
        request = build_request(Person("r0", LONG, LONG, outputs=LONG))
        request.prompt_ids, request.output_ids = Counted(request.prompt_ids), Counted(request.output_ids)
        request.tokens(start, start + 2)
        values[f"tokens({start}, {start + 2}) of {LONG} and {LONG}"] = read_by_a_join(request)
    return values


def read_by_a_join(request: Any) -> str:
    """Say whether so much was read as a list of all tokens needs."""
    joined = request.prompt_ids.reads + request.output_ids.reads >= 2 * LONG
    return "prompt and output are joined" if joined else "only what is asked for is read"


def tokens_spec(seed: int) -> Values:
    """Give every token a number and look each one up."""
    values: Values = {
        f"tokens({start}, {start + 2}) of {LONG} and {LONG}": "only what is asked for is read" for start in FEW
    }
    for person in TOKEN_PEOPLE:
        numbered = dict(enumerate([*prompt_of(person), *output_of(person)]))
        for kind in (list, tuple):
            name = f"{person.prompt} prompt tokens in a {kind.__name__} and {person.outputs} more"
            for start, stop in stretches(person):
                values[f"{name}, tokens({start}, {stop})"] = [numbered[place] for place in range(start, stop)]
    return values


INVARIANT_CASES = {
    f"prompt of {prompt}, {outputs} new tokens, {computed} computed": (prompt, outputs, computed)
    for prompt, outputs in ((5, 0), (5, 3), (1, 0), (1, 1))
    for computed in range(-1, prompt + outputs + 2)
}


def invariant_probe(seed: int) -> Values:
    """Check requests on both sides of both bounds."""
    values: Values = {}
    for name, (prompt, outputs, computed) in INVARIANT_CASES.items():
        request = build_request(Person("r7", prompt, outputs=outputs, computed=computed))
        try:
            request.check()
            values[name] = "holds"
        except AssertionError:
            values[name] = "AssertionError"
    return values


def invariant_spec(seed: int) -> Values:
    """Ask that some token is pending and that no number is negative."""
    return {
        name: "holds" if computed in range(prompt + outputs) else "AssertionError"
        for name, (prompt, outputs, computed) in INVARIANT_CASES.items()
    }


# added, started, times of tokens; queue_s, ttft_s, tpot_s
TIME_CASES: dict[str, tuple[float, float | None, list[float], list[float | None]]] = {
    "just added": (3.0, None, [], [None, None, None]),
    "started, no token": (3.0, 3.5, [], [0.5, None, None]),
    "one token": (3.0, 3.5, [5.25], [0.5, 2.25, None]),
    "two tokens": (3.0, 3.5, [5.25, 5.5], [0.5, 2.25, 0.25]),
    "five tokens, one of them late": (1.0, 1.0, [2.0, 2.5, 3.0, 7.5, 8.0], [0.0, 1.0, 1.5]),
    "a clock that starts at 0": (0.0, 0.0, [0.0, 4.0, 6.0], [0.0, 0.0, 3.0]),
    "a clock below 0": (-2.0, 0.0, [0.0, 0.5], [2.0, 2.0, 0.5]),
}


def times_probe(seed: int) -> Values:
    """Read the three times."""
    from mini_engine.scheduler.request import RequestTimes

    values: Values = {}
    for name, (added, started, tokens, _) in TIME_CASES.items():
        times = RequestTimes(added=added, started=started, tokens=list(tokens))
        values[name] = {"queue_s": times.queue_s, "ttft_s": times.ttft_s, "tpot_s": times.tpot_s}
    return values


def times_spec(seed: int) -> Values:
    """Worked out by hand; every number is exact in binary."""
    return {
        name: dict(zip(("queue_s", "ttft_s", "tpot_s"), expected, strict=True))
        for name, (*_, expected) in TIME_CASES.items()
    }


REGISTRY.add(
    "L5.A.lengths",
    "The four lengths, the most keys it can ever need and whether it computes its prompt, in every state.",
    lengths_probe,
    bitwise(lengths_spec),
)
REGISTRY.add(
    "L5.A.tokens",
    "Every stretch of tokens comes out once and in order, also where it begins, ends or lies after the prompt; "
    "prompt and output are not joined for it.",
    tokens_probe,
    bitwise(tokens_spec),
)
REGISTRY.add(
    "L5.A.invariant",
    "At least one token is pending and no number is negative, otherwise there is an AssertionError.",
    invariant_probe,
    bitwise(invariant_spec),
)
REGISTRY.add(
    "L5.A.times",
    "Times in the queue, to the first token and per later token; None before there is one, and 0.0 is a time.",
    times_probe,
    close(times_spec, 1e-9),
)

# L5.C ---------------------------------------------------------------------------------------------------------------

DECAYS = (0, 1, 2, 100, 599, 600, 601, 700)
RATIOS = (Fraction(1), Fraction(1, 2), Fraction(3, 8), Fraction(5, 32))  # exact in binary: no rounding decides
PAGE_SIZES = (1, 4, 16, 130)


def decay_probe(seed: int) -> Values:
    """Let quiet steps pass."""
    from mini_engine.scheduler.budget import GrowthEstimate

    values: Values = {}
    for preemption in (True, False):
        growth = GrowthEstimate(preemption)
        ratios = [float(growth.ratio)]
        for _ in range(max(DECAYS)):
            growth.decay()
            ratios.append(float(growth.ratio))
        values[f"preemption {preemption}"] = {f"after {steps} quiet steps": ratios[steps] for steps in DECAYS}
    return values


def decay_spec(seed: int) -> Values:
    """Draw a straight line from 0.7 to 14 % of it in 600 steps; 1 for good without preemption."""
    line = {steps: 0.7 - (0.7 - 0.7 * 0.14) * min(steps, 600) / 600 for steps in DECAYS}
    return {
        "preemption True": {f"after {steps} quiet steps": line[steps] for steps in DECAYS},
        "preemption False": {f"after {steps} quiet steps": 1.0 for steps in DECAYS},
    }


def left_behind(seed: int) -> dict[str, list[Person]]:
    """Return who may be left after a preemption."""
    rng = random.Random(f"left {seed}")
    drawn = [Person(f"r{i}", rng.randint(1, 9), rng.randint(200, 600), outputs=rng.randint(80, 150)) for i in range(6)]
    return {
        "two, at their beginning": [Person("r0", 3, 100), Person("r1", 9, 150, outputs=5)],
        "one, far on": [Person("r0", 3, 400, outputs=333)],
        "one, hardly begun: less than one quiet step above the least": [Person("r0", 3, 222, outputs=2)],
        "one, nearly done: not more than all of it": [Person("r0", 3, 50, outputs=49)],
        "six": drawn,
    }


def jump_probe(seed: int) -> Values:
    """Tell who is left, as something that can be read once."""
    from mini_engine.scheduler.budget import GrowthEstimate

    values: Values = {}
    for name, people in left_behind(seed).items():
        growth = GrowthEstimate(True)
        growth.decay()
        growth.raise_after_preemption(iter([build_request(person) for person in people]))
        values[name] = [float(growth.ratio)]
        growth.decay()
        values[name].append(float(growth.ratio))
    return values


def jump_spec(seed: int) -> Values:
    """Add up request by request; the next quiet step goes on from there."""
    values: Values = {}
    for name, people in left_behind(seed).items():
        used = allowed = 0
        for person in people:
            used = used + person.outputs + 20
            allowed += person.most
        ratio = min(used / (allowed + 1), 1.0)
        values[name] = [ratio, max(ratio - 0.602 / 600, 0.098)]
    return values


def growing(seed: int) -> dict[str, Person]:
    """Return requests that may become long, short, are done, or hold more than they need."""
    people = {
        "one token, one more": Person("r0", 1, 1),
        "8 tokens, 5 more": Person("r0", 8, 5),
        "8 tokens, 100,000 more": Person("r0", 8, 100_000),
        "8 tokens, 4097 more: as many as the clip and the last": Person("r0", 8, 4097),
        "8 tokens, 5000 more, 200 of them there": Person("r0", 8, 5000, outputs=200),
        "at the very end": Person("r0", 8, 5, outputs=5),
        "one before the end": Person("r0", 8, 5, outputs=4),
        "holds too much": Person("r0", 8, 5, outputs=1, pages=40),
        "131 tokens, one more than a page of 130": Person("r0", 131, 1),
    }
    for index, person in enumerate(draw_people("growing", seed, 15)):
        person.pages = index
        people[f"drawn, {person.known} tokens, {person.most - person.outputs} more, {index} pages"] = person
    return people


def estimate_of(ratio: Fraction, preemption: bool) -> Any:
    """Build the candidate's estimate with a ratio."""
    from mini_engine.scheduler.budget import GrowthEstimate

    growth = GrowthEstimate(preemption)
    if preemption:
        growth.ratio = float(ratio)
    return growth


def estimates() -> dict[str, tuple[Fraction, bool]]:
    """Return the ratios that are tried, and no preemption."""
    found = {f"ratio {float(ratio)}": (ratio, True) for ratio in RATIOS}
    return {**found, "without preemption": (Fraction(1), False)}


def pages_probe(seed: int) -> Values:
    """Ask what each request is expected to hold, and what all of them are promised."""
    values: Values = {}
    for name, (ratio, preemption) in estimates().items():
        growth = estimate_of(ratio, preemption)
        requests = {case: build_request(person) for case, person in growing(seed).items()}
        for size in PAGE_SIZES:
            values[f"{name}, page size {size}"] = {
                case: growth.expected_pages(request, size) for case, request in requests.items()
            }
    return values


def pages_spec(seed: int) -> Values:
    """Count the pages that the expected tokens fall into."""
    return {
        f"{name}, page size {size}": {
            case: scheduling.expected_pages(person, size, *estimate) for case, person in growing(seed).items()
        }
        for name, estimate in estimates().items()
        for size in PAGE_SIZES
    }


def promised_probe(seed: int) -> Values:
    """Ask what running requests take yet: all of them, single ones, none; as something that can be read once."""
    values: Values = {}
    for name, (ratio, preemption) in estimates().items():
        growth = estimate_of(ratio, preemption)
        requests = [build_request(person) for person in growing(seed).values()]
        for size in PAGE_SIZES:
            single = [growth.promised_pages(iter([request]), size) for request in requests]
            values[f"{name}, page size {size}"] = [growth.promised_pages(iter(requests), size), *single]
        values[f"{name}, no request"] = growth.promised_pages(iter([]), 4)
    return values


def promised_spec(seed: int) -> Values:
    """Count page by page; who holds too much gives nothing to others."""
    values: Values = {}
    for name, estimate in estimates().items():
        people = list(growing(seed).values())
        for size in PAGE_SIZES:
            single = [scheduling.promised_pages([person], size, *estimate) for person in people]
            values[f"{name}, page size {size}"] = [scheduling.promised_pages(people, size, *estimate), *single]
        values[f"{name}, no request"] = 0
    return values


REGISTRY.add(
    "L5.C.decay",
    "The ratio falls in a straight line from 0.7 to 0.098 in 600 quiet steps; without preemption it is and stays 1.",
    decay_probe,
    close(decay_spec, 1e-9),
)
REGISTRY.add(
    "L5.C.jump",
    "After a preemption it is what was used of what was allowed, 20 tokens more for each, at most 1, and falls again.",
    jump_probe,
    close(jump_spec, 1e-9),
)
REGISTRY.add(
    "L5.C.pages",
    "Expected pages: what is known and the clipped share of what may come, all of it without preemption, rounded up.",
    pages_probe,
    bitwise(pages_spec),
)
REGISTRY.add(
    "L5.C.promised",
    "Promised pages are those that each running request takes yet; one that holds too many does not pay for others.",
    promised_probe,
    bitwise(promised_spec),
)
