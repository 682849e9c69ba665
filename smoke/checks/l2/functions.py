"""The checks of L2: allocator, pool, packing and paged attention.

Owns: probes that call ``mini_engine.attention`` and what they must give. Needs L1 and no later lesson. Page numbers in
these checks come from the inputs, not from the candidate's allocator, so one task's fault does not show in another's.
"""

import operator
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l2 import spec_paging as paging
from smoke.checks.l2.spec_paging import Chunk
from smoke.framework.cases import DTYPES, random_case, random_tensor
from smoke.framework.check import Failure, Registry, Values, noting
from smoke.framework.compare import bitwise, differences
from smoke.framework.prepared import prepared
from smoke.framework.pretend_gpu import PretendGpu, device_of

REGISTRY = Registry()
PAGE_SIZES = (1, 4, 16, 64)
ODD_SIZES = (*PAGE_SIZES, 12, 100, 1000)  # for what is quick to compute
FAR_PAGES = [5, 2**26]  # the second page's slots begin at 2**32

# L2.A ---------------------------------------------------------------------------------------------------------------

POOLS = (1, 7, 40)  # pages
SCRIPT_LENGTH = 120


def allocator_probe(seed: int) -> Values:
    """Play a script of operations and log every answer with ``num_free`` after it."""
    from mini_engine.attention.allocator import PageAllocator

    return {
        f"{pages} pages": play(PageAllocator(pages), paging.allocator_script(pages, SCRIPT_LENGTH, seed + pages))
        for pages in POOLS
    }


def play(allocator: Any, script: list[paging.Operation]) -> list[Any]:
    """Run a script; a grant that failed is skipped when it would be freed."""
    grants: list[list[int] | None] = []
    log: list[Any] = []
    answer: Any
    with noting() as done:
        for kind, argument in script:
            pages = None if kind == "allocate" or argument >= len(grants) else grants[argument]
            done.append(f"{kind} {argument if kind == 'allocate' else pages}")
            try:
                if kind == "allocate":
                    grants.append(None)
                    grants[-1] = answer = [int(page) for page in allocator.allocate(argument)]
                elif pages is None:
                    answer = "skipped"
                else:
                    allocator.free([*pages, pages[0]] if kind == "free twice at once" and pages else list(pages))
                    answer = "None"
            except ValueError:
                answer = "ValueError"
            log.append([answer, allocator.num_free])
    return log


def allocator_verdict(seed: int, got: Values) -> list[Failure]:
    """Follow each log with a model of ownership."""
    failures = []
    for pages in POOLS:
        script = paging.allocator_script(pages, SCRIPT_LENGTH, seed + pages)
        failures += paging.allocator_failures(pages, script, got[f"{pages} pages"])
    return failures


def refusal_probe(seed: int) -> Values:
    """Ask for what cannot be given, and report the words."""
    from mini_engine.attention.allocator import PageAllocator

    def words(call: Any, *arguments: Any) -> str:
        try:
            call(*arguments)
        except ValueError as error:
            return f"ValueError: {error}"
        return "no error"

    allocator = PageAllocator(9)
    pages = allocator.allocate(4)
    values: Values = {
        "allocate 6 of 5 free pages": words(allocator.allocate, 6),
        "allocate -1 pages": words(allocator.allocate, -1),
        **{name: words(allocator.free, [pages[0], *more]) for name, more in wrong_pages(pages).items()},
    }
    values["pages free afterwards"] = allocator.num_free
    values["the owned pages can be freed"] = words(allocator.free, pages)
    return values


def wrong_pages(granted: list[int]) -> dict[str, list[int]]:
    """Return pages of a pool of nine that cannot be freed, by what is wrong with them."""
    return {
        "free an owned page and a free one": [page for page in range(9) if page not in granted][:1],
        "free an owned page and page 9 of 9": [9],
        "free an owned page and page -1": [-1],
    }


def refusal_verdict(seed: int, got: Values) -> list[Failure]:
    """Every refusal is a ``ValueError``; the first names both numbers; nothing changed."""
    failures = []
    for case in ("allocate 6 of 5 free pages", "allocate -1 pages", *wrong_pages([])):
        if not str(got[case]).startswith("ValueError"):
            failures.append(Failure(case, "", "ValueError", str(got[case])))
    words = str(got["allocate 6 of 5 free pages"])
    if not ("6" in words and "5" in words):
        failures.append(Failure("allocate 6 of 5 free pages", "", "a message that names 6 and 5", words))
    if got["pages free afterwards"] != 5:
        failures.append(Failure("pages free afterwards", "", "5", str(got["pages free afterwards"])))
    if got["the owned pages can be freed"] != "no error":
        failures.append(
            Failure("the owned pages can be freed", "", "no error", str(got["the owned pages can be freed"]))
        )
    return failures


KEPT = ("the pages of a grant, after the next grant", "the list that was freed, afterwards")
LEFT = "free pages after a tuple of pages was freed"


def lists_probe(seed: int) -> Values:
    """Keep the lists that are given and taken, and look at them after the next calls."""
    from mini_engine.attention.allocator import PageAllocator

    allocator = PageAllocator(9)
    first = allocator.allocate(3)
    granted = list(first)
    allocator.allocate(2)
    values: Values = {KEPT[0]: {"before": granted, "after": list(first)}}
    allocator.free(first)
    values[KEPT[1]] = {"before": granted, "after": list(first)}
    allocator.free(tuple(allocator.allocate(2)))
    return values | {LEFT: allocator.num_free}


def lists_verdict(seed: int, got: Values) -> list[Failure]:
    """Every list is as it was, and 7 pages are free."""
    failures = differences(7, got[LEFT], None, LEFT)
    for name in KEPT:
        failures += differences(got[name]["before"], got[name]["after"], None, name)
    return failures


def pages_needed_probe(seed: int) -> Values:
    """Ask for 0 to 130 tokens."""
    from mini_engine.attention.allocator import pages_needed

    return {
        f"page size {size}, pages for 0, 1, 2, … tokens": [pages_needed(tokens, size) for tokens in range(131)]
        for size in ODD_SIZES
    }


def pages_needed_spec(seed: int) -> Values:
    """Count the pages that the tokens 0 … n - 1 fall into."""
    return {
        f"page size {size}, pages for 0, 1, 2, … tokens": [
            len({token // size for token in range(tokens)}) for tokens in range(131)
        ]
        for size in ODD_SIZES
    }


REGISTRY.add(
    "L2.A.ownership",
    "Over random allocations and releases no page has two owners, none is lost, and a wrong call changes nothing.",
    allocator_probe,
    allocator_verdict,
)
REGISTRY.add(
    "L2.A.refusals",
    "Too many pages, a negative count and a page that is not owned are ValueErrors that take and free nothing.",
    refusal_probe,
    refusal_verdict,
)
REGISTRY.add(
    "L2.A.lists",
    "allocate gives a new list each time, and free leaves the list that it gets as it is.",
    lists_probe,
    lists_verdict,
)
REGISTRY.add(
    "L2.A.pages_needed",
    "n tokens need n / page_size pages, rounded up.",
    pages_needed_probe,
    bitwise(pages_needed_spec),
)


# L2.B ---------------------------------------------------------------------------------------------------------------

POOL_CASE = "GQA 9:3, wide heads"  # 2 layers, 3 key-value heads of 64


def pool_script(seed: int, page_size: int) -> Iterator[tuple[int, list[int], int]]:
    """Yield (layer, distinct slots, seed of the values) of a few writes over 5 pages."""
    rng = random.Random(f"pool {seed} {page_size}")
    for index in range(6):
        count = rng.randint(1, min(9, 5 * page_size))
        yield index % 2, rng.sample(range(5 * page_size), count), seed + 10 * index


def pool_reads(seed: int, page_size: int) -> dict[str, list[int]]:
    """Draw slots to read, in any order, one of them twice, and name a few that lie side by side, in two orders."""
    rng = random.Random(f"read {seed} {page_size}")
    slots = [rng.randrange(5 * page_size) for _ in range(12)]
    side_by_side = {"slots 1 to 4": [1, 2, 3, 4], "slots 1 3 2 4": [1, 3, 2, 4]}
    return {f"slots {slots} and the first again": [*slots, slots[0]], **side_by_side}


def pool_probe(seed: int) -> Values:
    """Write to both layers and read after each write."""
    from mini_engine.attention.pool import KVPool
    from mini_engine.config import ModelConfig

    values: Values = {}
    config = ModelConfig.from_hf(random_case(POOL_CASE, seed).hf_config)
    for page_size in PAGE_SIZES:
        for dtype in DTYPES:
            pool = KVPool(config, 5, page_size, DTYPES[dtype])
            tensors = [*pool.keys, *pool.values]
            case = f"page size {page_size}, {dtype}"
            for write, (layer, slots, value_seed) in enumerate(pool_script(seed, page_size)):
                k = random_tensor(len(slots), 3, 64, seed=value_seed, dtype=dtype)
                v = random_tensor(len(slots), 3, 64, seed=value_seed + 1, dtype=dtype)
                pool.write(layer, k, v, torch.tensor(slots))
                values[f"{case}, write {write}, to layer {layer}"] = {
                    f"{what} of layer {side}, {name}": part
                    for side in (0, 1)
                    for name, asked in pool_reads(seed, page_size).items()
                    for what, part in zip(("keys", "values"), pool.gather(side, torch.tensor(asked)), strict=False)
                }
                values[f"{case}, write {write}, afterwards"] = {"k": k, "v": v}
            same = all(map(operator.is_, tensors, [*pool.keys, *pool.values]))
            values[f"{case}, keys and values are the pool's first tensors"] = same
    return values


def pool_spec(seed: int) -> Values:
    """Keep every token's key and value in a dictionary by layer and slot."""
    values: Values = {}
    for page_size in PAGE_SIZES:
        for dtype in DTYPES:
            nothing = torch.zeros(3, 64, dtype=DTYPES[dtype])
            memory: dict[tuple[str, int, int], Tensor] = {}
            case = f"page size {page_size}, {dtype}"
            for write, (layer, slots, value_seed) in enumerate(pool_script(seed, page_size)):
                k = random_tensor(len(slots), 3, 64, seed=value_seed, dtype=dtype)
                v = random_tensor(len(slots), 3, 64, seed=value_seed + 1, dtype=dtype)
                for row, slot in enumerate(slots):
                    memory["k", layer, slot] = k[row]
                    memory["v", layer, slot] = v[row]
                values[f"{case}, write {write}, to layer {layer}"] = {
                    f"{what} of layer {side}, {name}": torch.stack(
                        [memory.get((what[0], side, slot), nothing) for slot in asked], dim=1
                    )
                    for side in (0, 1)
                    for name, asked in pool_reads(seed, page_size).items()
                    for what in ("keys", "values")
                }
                values[f"{case}, write {write}, afterwards"] = {"k": k, "v": v}
            values[f"{case}, keys and values are the pool's first tensors"] = True
    return values


REGISTRY.add(
    "L2.B.memory",
    "A pool remembers the key and the value last written to every slot of every layer, and reads them in any order.",
    pool_probe,
    bitwise(pool_spec),
)


# L2.C ---------------------------------------------------------------------------------------------------------------


def batches(seed: int) -> Iterator[tuple[str, list[Chunk], int]]:
    """Yield name, chunks and page size: whole prompts, decodes and chunks, alone and mixed."""
    rng = random.Random(f"batches {seed}")
    for page_size in (*PAGE_SIZES, 12):
        lengths = [[(5, 0)], [(4, 3)], [(page_size * 2, 0), (1, 0), (9, 4), (page_size + 1, page_size), (30, 29)]]
        lengths.append([(total := rng.randint(1, 40), rng.randrange(total)) for _ in range(6)])
        for index, batch in enumerate(lengths):
            spare = list(range(200))
            rng.shuffle(spare)
            chunks = []
            for total, computed in batch:
                pages = [
                    spare.pop() for _ in range(-(-total // page_size) + rng.randrange(2))
                ]  # some have one to spare
                chunks.append(Chunk([rng.randrange(1000) for _ in range(total)], computed, pages))
            yield f"page size {page_size}, batch {index}", chunks, page_size
    shared = [Chunk([1, 2, 3, 4, 0], 4, [7, 0]), Chunk([1, 2, 3, 4, 6, 7], 4, [7, 5])]
    yield "page size 4, page 7 is shared, token 0 on page 0", shared, 4


def pack_probe(seed: int) -> Values:
    """Pack batches and return every field."""
    from mini_engine.attention.metadata import SequenceChunk, pack_batch

    values: Values = {}
    for name, chunks, page_size in batches(seed):
        batch = pack_batch([SequenceChunk(c.new_ids, c.computed, c.pages) for c in chunks], page_size)
        meta = batch.metadata
        values[name] = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "logit_rows": batch.logit_rows,
            "cu_seqlens_q": meta.cu_seqlens_q,
            "seq_lens_kv": meta.seq_lens_kv,
            "block_table": meta.block_table,
            "slot_mapping": meta.slot_mapping,
            "page_size": meta.page_size,
        }
    lists = [[2, 0], [3]]
    pack_batch([SequenceChunk([5, 6], 3, lists[0]), SequenceChunk([7], 2, lists[1])], 4)
    values["lists of pages, afterwards"] = lists
    batch = pack_batch([SequenceChunk((5, 6), 3, (2, 0)), SequenceChunk((7,), 2, (3,))], 4)
    values["block_table of tuples of pages"] = batch.metadata.block_table
    batch = pack_batch([SequenceChunk([5, 6], 0, [3])], 4, "meta")  # a device that holds no numbers
    tensors = [batch.input_ids, batch.positions, batch.logit_rows, *tensors_of(batch.metadata)]
    return values | {"devices": [str(tensor.device) for tensor in tensors]}


def tensors_of(meta: Any) -> list[Tensor]:
    """Return the four tensors of an ``AttentionMetadata``."""
    return [meta.cu_seqlens_q, meta.seq_lens_kv, meta.block_table, meta.slot_mapping]


def pack_spec(seed: int) -> Values:
    """Pack token by token."""
    narrow = ("cu_seqlens_q", "seq_lens_kv", "block_table")
    values: Values = {}
    for name, chunks, page_size in batches(seed):
        fields = paging.packed(chunks, page_size)
        del fields["kv_slots"]
        tensors = {
            key: torch.tensor(field, dtype=torch.int32 if key in narrow else torch.int64)
            for key, field in fields.items()
        }
        values[name] = {**tensors, "page_size": page_size}
    values["lists of pages, afterwards"] = [[2, 0], [3]]
    values["block_table of tuples of pages"] = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
    return values | {"devices": ["meta"] * 7}


def view_batches(seed: int) -> Iterator[tuple[str, list[Chunk], int]]:
    """Yield other batches than those that are to be packed, whose fields would answer that."""
    return batches(~seed)


@prepared
def packed_batches(seed: int) -> dict[str, dict[str, Any]]:
    """Return the fields of packed batches by name."""
    found = {}
    for name, chunks, page_size in view_batches(seed):
        fields = paging.packed(chunks, page_size)
        found[name] = {
            "cu_seqlens_q": torch.tensor(fields["cu_seqlens_q"], dtype=torch.int32),
            "seq_lens_kv": torch.tensor(fields["seq_lens_kv"], dtype=torch.int32),
            "block_table": torch.tensor(fields["block_table"], dtype=torch.int32),
            "slot_mapping": torch.tensor(fields["slot_mapping"]),
            "page_size": page_size,
        }
    return found


def views_probe(seed: int) -> Values:
    """Build metadata by hand and read the two derived views."""
    from mini_engine.attention.metadata import AttentionMetadata

    values: Values = {}
    for name, fields in packed_batches(seed).items():
        meta = AttentionMetadata(**fields)
        ranges = [[int(start), int(end)] for start, end in meta.query_ranges]
        values[name] = {"query_ranges": ranges, "kv_slots": [slots.long() for slots in meta.kv_slots]}
        values[f"{name}: types"] = sorted({type(bound).__name__ for pair in meta.query_ranges for bound in pair})
    far = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens_kv=torch.tensor([66], dtype=torch.int32),
        block_table=torch.tensor([FAR_PAGES], dtype=torch.int32),
        slot_mapping=torch.tensor([64 * FAR_PAGES[1] + 1]),
        page_size=64,
    )
    values["slots beyond int32"] = list(far.kv_slots)
    with PretendGpu():
        there = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, 1, 3], dtype=torch.int32, device="cuda"),
            seq_lens_kv=torch.tensor([5, 2], dtype=torch.int32, device="cuda"),
            block_table=torch.tensor([[2, 0], [3, -1]], dtype=torch.int32, device="cuda"),
            slot_mapping=torch.tensor([0, 12, 13], device="cuda"),
            page_size=4,
        )
        values["devices of kv_slots on a GPU"] = [device_of(slots).type for slots in there.kv_slots]
    return values


def views_spec(seed: int) -> Values:
    """Derive them from the chunks."""
    values: Values = {}
    for name, chunks, page_size in view_batches(seed):
        fields = paging.packed(chunks, page_size)
        bounds = fields["cu_seqlens_q"]
        values[name] = {
            "query_ranges": [[bounds[i], bounds[i + 1]] for i in range(len(chunks))],
            "kv_slots": [torch.tensor(slots) for slots in fields["kv_slots"]],
        }
        values[f"{name}: types"] = ["int"]
    values["slots beyond int32"] = [torch.tensor([paging.slot(FAR_PAGES, p, 64) for p in range(66)])]
    return values | {"devices of kv_slots on a GPU": ["cuda", "cuda"]}


def slots_probe(seed: int) -> Values:
    """Ask for the slots of ranges of positions."""
    from mini_engine.attention.metadata import slots_of

    return {f"page size {size}": [int(s) for s in slots_of([7, 2, 9], 1, 3 * size, size)] for size in ODD_SIZES}


def slots_spec(seed: int) -> Values:
    """Compute slot by slot."""
    return {
        f"page size {size}": [paging.slot([7, 2, 9], position, size) for position in range(1, 3 * size)]
        for size in ODD_SIZES
    }


REFUSED: dict[str, list[Any]] = {
    "an empty batch": [],
    "a sequence without new tokens": [([1, 2], 0, [0]), ([], 2, [1])],
    "5 tokens on one page of 4": [([1, 2, 3, 4, 5], 0, [0])],
    "1 new token after 8 cached on two pages of 4": [([1], 0, [3]), ([1], 8, [0, 1])],
    "a first sequence without new tokens, a tuple": [((), 2, [1]), ([1, 2], 0, [0])],
    "a first sequence of 9 tokens on two pages of 4": [([1], 8, [0, 1]), ([1], 0, [3])],
}


# The same sequence is wrong, once as the second and once as the first: the messages give different numbers.
MOVED = {
    "the messages about too few pages": (
        "1 new token after 8 cached on two pages of 4",
        "a first sequence of 9 tokens on two pages of 4",
    ),
    "the messages about a sequence without new tokens": (
        "a sequence without new tokens",
        "a first sequence without new tokens, a tuple",
    ),
}
NUMBERED = "give the number of the sequence"


def refused_probe(seed: int) -> Values:
    """Pack what cannot be packed, and compare messages."""
    from mini_engine.attention.metadata import SequenceChunk, pack_batch

    values: Values = {}
    words = {}
    for name, chunks in REFUSED.items():
        try:
            pack_batch([SequenceChunk(*chunk) for chunk in chunks], 4)
            values[name] = "no error"
        except ValueError as error:
            values[name] = "ValueError"
            words[name] = str(error)
    for name, (second, first) in MOVED.items():
        message = words.get(second, "")
        is_numbered = message != words.get(first)
        values[name] = NUMBERED if is_numbered else f"say for sequence 0 and for sequence 1: {message}"
    return values


def refused_spec(seed: int) -> Values:
    """Refuse them all, and number the sequence that is wrong."""
    return dict.fromkeys(REFUSED, "ValueError") | dict.fromkeys(MOVED, NUMBERED)


REGISTRY.add(
    "L2.C.slots",
    "Position p of a sequence lives in slot pages[p // page_size] * page_size + p % page_size.",
    slots_probe,
    bitwise(slots_spec),
)
REGISTRY.add(
    "L2.C.pack",
    "Packing lays ragged sequences side by side: every id, position, slot, bound and page, in the documented dtypes.",
    pack_probe,
    bitwise(pack_spec),
)
REGISTRY.add(
    "L2.C.views",
    "query_ranges and kv_slots say which packed rows and which slots belong to each sequence, padding left out, on the "
    "device of the metadata.",
    views_probe,
    bitwise(views_spec),
)
REGISTRY.add(
    "L2.C.refusals",
    "An empty batch, a sequence without new tokens and one whose pages are too few are ValueErrors. The message gives "
    "the number of the sequence.",
    refused_probe,
    bitwise(refused_spec),
)
