"""The checks of requests that are refused (L3.C) and of whole generations (L3.D)."""

import random
from typing import Any

import numpy as np

from smoke.checks.l3.driver import SMALL, build_driver, count_calls, end_requests
from smoke.framework import peer
from smoke.framework.cases import random_case, random_ids
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()

# L3.C ---------------------------------------------------------------------------------------------------------------

# prompt, max_new_tokens, numbers that the message must name. The model has 128 ids and 512 positions.
REFUSED: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "an empty prompt": ([], 4, ("0", "1")),
    "an empty prompt, a tuple": ((), 4, ("0", "1")),
    "token id 128 of 128": ([5, 128], 4, ("128", "127")),
    "token id -1": ([-1], 4, ("-1", "127")),
    "token id 200 between others": ([5, 200, 5], 4, ("200", "127")),
    "token id 1.5": ([5, 1.5], 4, ("1.5",)),
    "token id 5.0": ([5, 5.0], 4, ("5.0",)),
    "token id None": ([5, None], 4, ("None",)),
    "max_new_tokens 0": ([5], 0, ("0", "1")),
    "max_new_tokens -3": ([5], -3, ("-3", "1")),
    "500 tokens and 13 more in 512 positions": ([5] * 500, 13, ("513", "512")),
    "513 tokens in 512 positions": ([5] * 513, 1, ("514", "512")),
}
ACCEPTED: dict[str, tuple[Any, int]] = {
    "one token, one more": ([0], 1),
    "a tuple": ((5, 3), 1),
    "numpy integers": ([np.int64(5), np.int32(3)], 1),
    "the last id of the vocabulary": ([127], 3),
    "500 tokens and 12 more in 512 positions": ([5] * 500, 12),
}


def drawn_requests(seed: int) -> dict[str, tuple[list[int], int, tuple[str, ...]]]:
    """Draw requests with one fault or none, and the numbers that a refusal must name."""
    rng = random.Random(f"requests {seed}")
    found = {}
    for index in range(24):
        length, count = rng.randint(1, 60), rng.randint(1, 40)
        prompt = [rng.randrange(128) for _ in range(length)]
        numbers: tuple[str, ...] = ()
        kind = rng.choice(("none", "just fits", "token id", "count", "length"))
        if kind == "token id":
            prompt[rng.randrange(length)] = wrong = rng.choice((-1, 1)) * rng.randint(128, 999)
            numbers = (str(wrong), "127")
        elif kind == "count":
            count = -rng.randrange(9)
            numbers = (str(count), "1")
        elif kind in ("just fits", "length"):
            prompt = [*prompt, *[5] * (512 - count - length)]
            count += rng.randint(1, 9) if kind == "length" else 0
            numbers = (str(len(prompt) + count), "512") if kind == "length" else ()
        found[f"drawn request {index}, {len(prompt)} tokens and {count} more"] = (prompt, count, numbers)
    return found


def request_probe(seed: int) -> Values:
    """Check every request and keep the type and the words of what is raised."""
    driver = build_driver(random_case(SMALL, seed))
    values: Values = {}
    for name, (prompt, count, *_) in {**REFUSED, **ACCEPTED, **drawn_requests(seed)}.items():
        try:
            driver.check_request(prompt, count)
            values[name] = "accepted"
        except ValueError as error:
            values[name] = f"ValueError: {error}"
    prompt = [9, 3, 5]
    driver.check_request(prompt, 1)
    return values | {"the prompt [9, 3, 5] afterwards": prompt}


def request_verdict(seed: int, got: Values) -> list[Failure]:
    """Refusals are ``ValueError`` naming value and limit."""
    failures = []
    drawn = drawn_requests(seed)
    accepted = [*ACCEPTED, *(name for name, (_, _, numbers) in drawn.items() if not numbers)]
    for name, (_, _, numbers) in {**REFUSED, **drawn}.items():
        words = str(got[name])
        if name in accepted:
            continue
        if not words.startswith("ValueError") or not all(number in words for number in numbers):
            failures.append(Failure(name, "", f"a ValueError that names {' and '.join(numbers)}", words))
    failures += [Failure(name, "", "accepted", str(got[name])) for name in accepted if got[name] != "accepted"]
    name = "the prompt [9, 3, 5] afterwards"
    return failures + differences([9, 3, 5], got[name], None, name)


REGISTRY.add(
    "L3.C.refusals",
    "A request that cannot be run is a ValueError that names the value and the limit; one that just fits is accepted.",
    request_probe,
    request_verdict,
)


# L3.D ---------------------------------------------------------------------------------------------------------------


AGAIN = (4, 6)  # tokens
WRONG = {"an empty prompt": ([], 4), "token id 128 of 128": ([128], 4), "max_new_tokens 0": ([5], 0)}


def generate_probe(seed: int) -> Values:
    """Generate and keep the ids and the reason."""
    case = random_case(SMALL, seed)
    values: Values = {}
    for name, (prompt, count, eos) in end_requests(seed).items():
        done = build_driver(case, eos=eos).generate(prompt, count)
        values[name] = {"token_ids": [int(t) for t in done.token_ids], "finish_reason": str(done.finish_reason)}
    for name, (prompt, count) in WRONG.items():
        try:
            build_driver(case).generate(prompt, count)
            values[name] = "no error"
        except ValueError:
            values[name] = "ValueError"
    return values


def generate_peer(seed: int) -> Values:
    """Return transformers' ids; the reason is "stop" exactly if the last id is an end id."""
    case = random_case(SMALL, seed)
    values: Values = {}
    for name, (prompt, count, eos) in end_requests(seed).items():
        ids, _ = peer.generate(case, "float32", tuple(prompt), count, eos)
        values[name] = {"token_ids": ids, "finish_reason": "stop" if ids[-1] in eos else "length"}
    return values | dict.fromkeys(WRONG, "ValueError")


REGISTRY.add(
    "L3.D.reasons",
    'A generation holds every generated id and says "stop" if the last one ends a sequence, else "length".',
    generate_probe,
    bitwise(generate_peer),
    asks_peer=True,
)


def again_probe(seed: int) -> Values:
    """Generate twice from one prompt with one driver, and count the steps that it computes."""
    case = random_case(SMALL, seed)
    driver = build_driver(case)
    passes = count_calls(driver, "forward")
    prompt = random_ids(case.vocab_size, 9, seed)
    short, long = (driver.generate(prompt, count) for count in AGAIN)
    ids = {f"{count} tokens": done.token_ids for count, done in zip(AGAIN, (short, long), strict=True)}
    return {**ids, "token_ids is a": type(short.token_ids).__name__, "calls of forward": passes[0]}


def again_peer(seed: int) -> Values:
    """Return the first of transformers' ids, as many as were asked for, and one pass for each."""
    case = random_case(SMALL, seed)
    prompt = tuple(random_ids(case.vocab_size, 9, seed))
    ids = {f"{count} tokens": peer.generate(case, "float32", prompt, count, ())[0] for count in AGAIN}
    return {**ids, "token_ids is a": "list", "calls of forward": sum(AGAIN)}


REGISTRY.add(
    "L3.D.again",
    "A second generation does not change the first one's list, and every token is computed once.",
    again_probe,
    bitwise(again_peer),
)
