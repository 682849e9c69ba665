"""The checks of L3.A and L3.B: one step, and the loop of the greedy driver.

Owns: probes that call ``mini_engine.driver`` and what they must give: the ids, logits and ends of transformers' own
``generate(do_sample=False)``. Needs L1 and L2 and no later lesson.
"""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from smoke.checks.l2.functions import PAGE_SIZES
from smoke.framework import peer
from smoke.framework.cases import DTYPES, ModelCase, embedded_case, embedded_eos_ids, prompts, random_case, random_ids
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences, remember

REGISTRY = Registry()
NEW_TOKENS = 64
SMALL = "GQA 4:2, untied, odd sizes"


def build_driver(
    case: ModelCase, *, dtype: str = "float32", eos: Any = (), kernel: str = "sdpa", **options: Any
) -> Any:
    """Build the candidate's driver. ``options`` go to ``EngineConfig``, except ``use_kv_cache`` and ``weights``."""
    from mini_engine.attention import dense
    from mini_engine.attention.paged import PagedAttention
    from mini_engine.config import EngineConfig, ModelConfig
    from mini_engine.driver import GreedyDriver
    from mini_engine.fast.products import make_projections
    from mini_engine.model import Qwen3
    from mini_engine.ways import way_of

    cache = options.pop("use_kv_cache", True)
    weights = options.pop("weights", None) or case.weights(dtype)
    engine = EngineConfig(dtype=dtype, **options)  # type: ignore[arg-type]
    model = Qwen3(ModelConfig.from_hf(case.hf_config), weights, make_projections(engine))
    plain = partial(PagedAttention, kernel=getattr(dense, f"{kernel}_attention"))
    attention = way_of(engine).attention(engine, model) if engine.batch_invariant else plain
    return GreedyDriver(model, engine, frozenset(eos), use_kv_cache=cache, attention=attention)


def run(driver: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Drain the loop -> ids and logits [steps, V]. The loop itself is called, not the validation in front of it."""
    steps = list(driver._steps(list(prompt), count))
    return [int(step.token_id) for step in steps], torch.stack([step.logits for step in steps])


def count_calls(driver: Any, name: str) -> list[int]:
    """Count the calls of one of the driver's attributes, in a list of one number."""
    call = getattr(driver, name)
    count = [0]

    def counted(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        return call(*arguments, **named)

    setattr(driver, name, counted)
    return count


# L3.A ---------------------------------------------------------------------------------------------------------------

FORWARD_LENGTHS = (9, 1, 20)


def forward_probe(seed: int) -> Values:
    """Run one step of one sequence, and one of three, and the decode step after it."""
    from mini_engine.attention.metadata import SequenceChunk, pack_batch
    from mini_engine.attention.pool import KVPool

    case = random_case(SMALL, seed)
    values: Values = {}
    for dtype in DTYPES:
        driver = build_driver(case, dtype=dtype)
        made = count_calls(driver, "make_attention")
        prompts_ = [random_ids(case.vocab_size, length, seed) for length in FORWARD_LENGTHS]
        pages = [[4, 1], [0], [6, 2, 5]]
        pool = KVPool(driver.model.config, 8, 8, DTYPES[dtype])
        first = driver.forward(pack_batch([SequenceChunk(prompts_[0], 0, pages[0])], 8), pool)
        together = [SequenceChunk(ids, 0, own) for ids, own in zip(prompts_, pages, strict=True)]
        values[f"{dtype}, alone"] = first
        values[f"{dtype}, calls of make_attention in a step"] = made[0]
        if dtype == "float32":
            values["float32, three together"] = driver.forward(pack_batch(together, 8), pool)
            values["float32, decode after it"] = driver.forward(pack_batch([SequenceChunk([3], 20, pages[2])], 8), pool)
    return values


def forward_exact(seed: int) -> Values:
    """Return transformers' last row of the lone prompt."""
    case = random_case(SMALL, seed)
    ids = random_ids(case.vocab_size, FORWARD_LENGTHS[0], seed)
    return {f"{dtype}, alone": peer.logits(case, dtype, "sdpa", ids, rows=[len(ids) - 1]) for dtype in DTYPES}


def forward_close(seed: int) -> Values:
    """Return transformers' last rows of every prompt alone, and after one more token."""
    case = random_case(SMALL, seed)
    prompts_ = [random_ids(case.vocab_size, length, seed) for length in FORWARD_LENGTHS]
    last = [peer.logits(case, "float32", "sdpa", ids)[-1] for ids in prompts_]
    after = peer.logits(case, "float32", "sdpa", [*prompts_[2], 3])[-1:]
    return {"float32, three together": torch.stack(last), "float32, decode after it": after}


FORWARD_EXACT, FORWARD_CLOSE = remember(forward_exact), remember(forward_close)


def forward_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask a lone sequence for transformers' bits, a batch for its values."""
    exact = FORWARD_EXACT(seed)
    near = FORWARD_CLOSE(seed)
    once = {f"{dtype}, calls of make_attention in a step": 1 for dtype in DTYPES}
    failures = differences(exact | once, {name: got[name] for name in exact | once}, None)
    return failures + differences(near, {name: got[name] for name in near}, 1e-5)


REGISTRY.add(
    "L3.A.last_rows",
    "One packed step gives the logits of every sequence's last token, and writes the pool for the next step.",
    forward_probe,
    forward_verdict,
)


# L3.B ---------------------------------------------------------------------------------------------------------------


def ids_probe(seed: int) -> Values:
    """Generate from two prompts of the embedded model for each way to begin one."""
    driver = build_driver(embedded_case(), eos=embedded_eos_ids())
    return {f"prompt {i}": run(driver, prompt, NEW_TOKENS)[0] for i, prompt in enumerate(prompts(seed, 10))}


def ids_peer(seed: int) -> Values:
    """Return what transformers generates."""
    eos = tuple(sorted(embedded_eos_ids()))
    return {
        f"prompt {i}": peer.generate(embedded_case(), "float32", tuple(prompt), NEW_TOKENS, eos)[0]
        for i, prompt in enumerate(prompts(seed, 10))
    }


REGISTRY.add(
    "L3.B.ids",
    "Ten prompts of the embedded model, 64 tokens each: the ids of transformers' generate(do_sample=False), end of "
    "sequence included.",
    ids_probe,
    bitwise(ids_peer),
    seconds=60.0,
)

# Which prompt, dtype, kernel and page size, with cache or without, how many tokens.
BITS_RUNS = (
    (0, "float32", "sdpa", 16, True, 40),
    (3, "float32", "eager", 4, True, 24),
    (4, "bfloat16", "sdpa", 64, True, 40),
    (1, "bfloat16", "eager", 1, True, 24),
)
RECOMPUTE_RUNS = ((0, "float32", "sdpa", 16, False, 24), (4, "bfloat16", "sdpa", 4, False, 16))


def bits_probe(runs: Any) -> Any:
    """Return a probe that keeps the logits of every step of some runs."""

    def probe(seed: int) -> Values:
        values: Values = {}
        for index, dtype, kernel, page_size, cache, count in runs:
            driver = build_driver(embedded_case(), dtype=dtype, kernel=kernel, page_size=page_size, use_kv_cache=cache)
            ids, logits = run(driver, prompts(seed)[index], count)
            values[f"prompt {index}, {dtype}, {kernel}, page size {page_size}"] = {"ids": ids, "logits": logits}
        return values

    return probe


def bits_peer(runs: Any) -> Any:
    """Return transformers' ids and logits of the same runs."""

    def spec(seed: int) -> Values:
        values: Values = {}
        for index, dtype, kernel, page_size, cache, count in runs:
            ids, logits = peer.generate(
                embedded_case(), dtype, tuple(prompts(seed)[index]), count, (), cache=cache, implementation=kernel
            )
            values[f"prompt {index}, {dtype}, {kernel}, page size {page_size}"] = {"ids": ids, "logits": logits}
        return values

    return spec


REGISTRY.add(
    "L3.B.bits",
    "Every step's logits have the bits of transformers' cached decode, in float32 and bfloat16.",
    bits_probe(BITS_RUNS),
    bitwise(bits_peer(BITS_RUNS)),
)
REGISTRY.add(
    "L3.B.recompute",
    "use_kv_cache=False computes everything anew: the bits of transformers without a cache.",
    bits_probe(RECOMPUTE_RUNS),
    bitwise(bits_peer(RECOMPUTE_RUNS)),
)


def invariant_probe(seed: int) -> Values:
    """Generate with and without cache under batch_invariant."""
    values: Values = {}
    for dtype in DTYPES:
        for cache in (True, False):
            driver = build_driver(embedded_case(), dtype=dtype, use_kv_cache=cache, batch_invariant=True)
            ids, logits = run(driver, prompts(seed)[2], 20)
            values[f"{dtype}, {'cached' if cache else 'recomputed'}"] = {"ids": ids, "logits": logits}
    return values


def invariant_peer(seed: int) -> Values:
    """Return transformers' float32 ids and logits."""
    ids, logits = peer.generate(embedded_case(), "float32", tuple(prompts(seed)[2]), 20, ())
    return {"float32, cached": {"ids": ids, "logits": logits}}


INVARIANT_PEER = remember(invariant_peer)


def invariant_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask cached and recomputed runs for the same bits, and for transformers' values."""
    failures = differences(INVARIANT_PEER(seed), {"float32, cached": got["float32, cached"]}, 1e-4)
    for dtype in DTYPES:
        name = f"{dtype}, recomputed"
        failures += differences(got[f"{dtype}, cached"], got[name], None, name)
    return failures


REGISTRY.add(
    "L3.B.invariant",
    "With batch_invariant the cached and the recomputed decode have the same bits.",
    invariant_probe,
    invariant_verdict,
)


def page_probe(seed: int) -> Values:
    """Generate so that the last computed token just fills a page, or just opens one, for every page size."""
    case = random_case(SMALL, seed)
    values: Values = {}
    for page_size in PAGE_SIZES:
        for extra in (0, 1, 2):
            prompt = random_ids(case.vocab_size, 2 * page_size + extra, seed)
            for count in (1, page_size + 1):
                name = f"page size {page_size}, {len(prompt)} + {count} tokens"
                driver = build_driver(case, page_size=page_size)
                pools, held = watch_pools(driver)
                values[name], taken = run_counting(driver, prompt, count)
                values |= {f"{name}: pools that are made": pools, f"{name}: pages held in each step": held}
                values[f"{name}: pages taken when each token comes"] = taken
    return values


def run_counting(driver: Any, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """Drain the loop -> ids, and how many pages were allocated until each of them came."""
    from mini_engine.attention.allocator import PageAllocator

    allocated = [0]
    allocate = PageAllocator.allocate

    def counted(allocator: Any, number: int, *after: Any, **named: Any) -> list[int]:
        allocated[0] += number
        return allocate(allocator, number, *after, **named)

    with patch.object(PageAllocator, "allocate", counted):
        steps = [(int(step.token_id), allocated[0]) for step in driver._steps(list(prompt), count)]
    return [token for token, _ in steps], [pages for _, pages in steps]


def watch_pools(driver: Any) -> tuple[list[str], list[int]]:
    """Return lists that will describe each pool that the driver makes and count the pages of each step's sequence."""
    make = driver.make_attention
    seen = list[Any]()
    pools: list[str] = []
    held: list[int] = []

    def make_attention(pool: Any, metadata: Any) -> Any:
        if not any(pool is other for other in seen):
            seen.append(pool)
            pools.append(f"{pool.num_pages} pages of {pool.page_size} slots")
        held.append(metadata.block_table.shape[1])
        return make(pool, metadata)

    driver.make_attention = make_attention
    return pools, held


def page_peer(seed: int) -> Values:
    """Return transformers' ids, one pool for all tokens but the last, which is never fed back, and no page early."""
    case = random_case(SMALL, seed)
    values: Values = {}
    for size in PAGE_SIZES:
        for extra in (0, 1, 2):
            prompt = tuple(random_ids(case.vocab_size, 2 * size + extra, seed))
            for count in (1, size + 1):
                name = f"page size {size}, {len(prompt)} + {count} tokens"
                values[name] = peer.generate(case, "float32", prompt, count, ())[0]
                held = [len({at // size for at in range(len(prompt) + step)}) for step in range(count)]
                values[f"{name}: pools that are made"] = [f"{held[-1]} pages of {size} slots"]
                values[f"{name}: pages held in each step"] = held
                values[f"{name}: pages taken when each token comes"] = held
    return values


REGISTRY.add(
    "L3.B.pages",
    "Generation has room for exactly the tokens it computes, at every page size and around every page boundary, and "
    "takes a page in the step that needs it.",
    page_probe,
    bitwise(page_peer),
)


def end_requests(seed: int) -> dict[str, tuple[list[int], int, tuple[int, ...]]]:
    """Return prompt, limit and end ids of requests that stop early, at once, on the last token, and never.

    The end ids are tokens that the model is known to generate: transformers says which.
    """
    case = random_case(SMALL, seed)
    for length in range(11, 60):  # until one generates a new token late enough
        prompt = random_ids(case.vocab_size, length, seed)
        ids, _ = peer.generate(case, "float32", tuple(prompt), 12, ())
        first = {token: ids.index(token) for token in ids}  # where each generated id occurs first
        token, place = max(first.items(), key=lambda item: item[1])
        if place >= 3:
            break
    others = tuple(t for t in range(case.vocab_size) if t not in first)
    unused = others[:1]
    return {
        "an end id in the middle": (prompt, place + 5, (token, *others)),
        "an end id as the first token": (prompt, 12, (ids[0],)),
        "an end id as the last allowed token": (prompt, place + 1, (token,)),
        "an end id one after the limit": (prompt, place, (token,)),
        "an end id in the prompt": ([*prompt[:-1], *unused, prompt[-1]], 6, unused),
        "an end id as the last of the prompt": ([*prompt, *unused], 6, unused),
        "one token": (prompt, 1, ()),
    }


def ends_probe(seed: int) -> Values:
    """Run the loop of every request."""
    case = random_case(SMALL, seed)
    return {
        name: run(build_driver(case, eos=eos), prompt, count)[0]
        for name, (prompt, count, eos) in end_requests(seed).items()
    }


def ends_peer(seed: int) -> Values:
    """Return transformers' ids."""
    case = random_case(SMALL, seed)
    return {
        name: peer.generate(case, "float32", tuple(prompt), count, eos)[0]
        for name, (prompt, count, eos) in end_requests(seed).items()
    }


REGISTRY.add(
    "L3.B.ends",
    "The loop ends with the end-of-sequence id it generated, or at the limit, and never because of the prompt.",
    ends_probe,
    bitwise(ends_peer),
    asks_peer=True,
)


TURN_LENGTHS, TURNS = (9, 10), 6  # pools of one size, steps of different positions


def turns_probe(seed: int) -> Values:
    """Ask two generations of one driver in turn, and count the steps that they compute."""
    case = random_case(SMALL, seed)
    driver = build_driver(case)
    passes = count_calls(driver, "forward")
    runs = [driver._steps(random_ids(case.vocab_size, n, seed + i), TURNS + 1) for i, n in enumerate(TURN_LENGTHS)]
    values: Values = {f"generation {i}": [] for i in range(len(runs))}
    for _ in range(TURNS):
        for i, steps in enumerate(runs):
            values[f"generation {i}"].append(int(next(steps).token_id))
    return values | {"calls of forward": passes[0]}


def turns_peer(seed: int) -> Values:
    """Return transformers' ids of each prompt alone, and a step for each token that was asked for."""
    case = random_case(SMALL, seed)
    values: Values = {
        f"generation {i}": peer.generate(
            case, "float32", tuple(random_ids(case.vocab_size, n, seed + i)), TURNS + 1, ()
        )[0][:TURNS]
        for i, n in enumerate(TURN_LENGTHS)
    }
    return values | {"calls of forward": TURNS * len(TURN_LENGTHS)}


REGISTRY.add(
    "L3.B.turns",
    "Two generations of one driver, asked in turn, are each as if alone, and a step is computed when it is asked for.",
    turns_probe,
    bitwise(turns_peer),
)


def device_probe(seed: int) -> Values:
    """Take one step on a device that holds no numbers, with logits that do not come from a model.

    The weights are of another dtype than the configuration says, as where a caller has loaded them.
    """
    case = random_case(SMALL, seed)
    driver = build_driver(case, device="meta", weights=case.weights("bfloat16"))
    values: Values = {}

    def forward(batch: Any, pool: Any) -> torch.Tensor:
        tensors = {"keys": pool.keys[0], "values": pool.values[0], "input_ids": batch.input_ids}
        values.update({name: str(tensor.device) for name, tensor in tensors.items()})
        values["dtype of the pool"] = str(pool.keys[0].dtype)
        return torch.zeros(1, 128)

    driver.forward = forward
    run(driver, [1, 2, 3], 1)
    return values


REGISTRY.add(
    "L3.B.device",
    "The pool and the packed batch lie on the device of the configuration, and the pool has the dtype of the weights.",
    device_probe,
    bitwise(
        lambda seed: dict.fromkeys(("keys", "values", "input_ids"), "meta") | {"dtype of the pool": "torch.bfloat16"}
    ),
)


TIES = ((0, 15), (5, 15), (9, 12))  # ids whose logits are the largest of 16: so few are sorted another way than many
TIES_SAY = "ids of rows of 16 logits with two equal ones"


def ties_probe(seed: int) -> Values:
    """Choose where a head's second half repeats the first, so that every choice is a tie, and from few logits."""
    case = random_case(SMALL, seed)
    weights = case.weights("float32")
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = torch.cat((head[:64], head[:64]))
    ids, logits = run(build_driver(case, weights=weights), random_ids(case.vocab_size, 5, seed), 10)
    few = torch.zeros(len(TIES), 16).scatter(1, torch.tensor(TIES), 5.0)
    return {"ids": ids, "logits": logits, TIES_SAY: ids_of_rows(list(few), seed)}


def ties_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the lowest of the two likeliest ids at every step."""
    case = "the likeliest id is t and t + 64"
    lowest = got["logits"][:, :64].argmax(-1).tolist()
    if not torch.equal(got["logits"][:, :64], got["logits"][:, 64:]):
        return [Failure("logits of ids t and t + 64, whose head rows are equal", "", "the same bits", "others")]
    few = differences([min(pair) for pair in TIES], got[TIES_SAY], None, TIES_SAY)
    return differences(lowest, got["ids"], None, case) + few


REGISTRY.add(
    "L3.B.ties",
    "Greedy takes the lowest id among equally likely ones.",
    ties_probe,
    ties_verdict,
)


ROWS = {  # the changed logits of a row of 128 that is 0 elsewhere, and whether a token can be chosen from it
    "a NaN next to larger numbers": ({7: float("nan"), 9: 5.0}, False),
    "plus infinity": ({7: float("inf")}, False),
    "minus infinity everywhere": (dict.fromkeys(range(128), float("-inf")), False),
    "minus infinity somewhere": ({7: float("-inf"), 9: 5.0}, True),
    "two logits that differ in the last bit": ({7: 5.0, 9: 5.0 + 2**-21}, True),
}


def finite_probe(seed: int) -> Values:
    """Generate one token with a head that gives the same row of logits whatever its input."""
    values: Values = {}
    for name, (changed, _) in ROWS.items():
        row = torch.zeros(128)
        row[list(changed)] = torch.tensor(list(changed.values()))
        values[name] = ids_of_rows([row], seed)
    nine = torch.zeros(128)
    unknown = torch.full((128,), float("nan"))
    nine[9] = 5.0
    values["NaN in the second row"] = ids_of_rows([nine, unknown], seed)
    return values


def ids_of_rows(rows: list[torch.Tensor], seed: int) -> list[int | str]:
    """Return the ids that are chosen from these rows of logits, as they are, and how a step without one ends."""
    driver = build_driver(random_case(SMALL, seed))
    left = iter(rows)
    driver.model.lm_head = lambda x: next(left).repeat(len(x), 1)
    ids: list[int | str] = []
    try:
        for step in driver._steps([1, 2, 3], len(rows)):
            ids.append(step.token_id)
    except ValueError:
        ids.append("ValueError")
    return ids


def finite_spec(seed: int) -> Values:
    """Choose a token only where the largest logit is a number."""
    values: Values = {name: [9 if chosen else "ValueError"] for name, (_, chosen) in ROWS.items()}
    return values | {"NaN in the second row": [9, "ValueError"]}


REGISTRY.add(
    "L3.B.finite",
    "A row of logits whose largest is NaN or infinite is a ValueError: nothing can be chosen from it.",
    finite_probe,
    bitwise(finite_spec),
)
