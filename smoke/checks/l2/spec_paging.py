"""Specs of L2: pages, slots and packing, one token at a time, in dictionaries and lists.

Owns: what an allocator may answer, what a pool remembers, where a token of a packed batch stands. Must not know: the
engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoke.framework.check import Failure

Operation = list[Any]  # ["allocate", count], ["free", indices of earlier grants], ["free pages", pages], …


@dataclass(frozen=True)
class Chunk:
    """A sequence's part of a step: all its ids so far, how many are in the cache, its pages."""

    ids: list[int]
    computed: int
    pages: list[int]

    @property
    def new_ids(self) -> list[int]:
        """The tokens of this step."""
        return self.ids[self.computed :]


def allocator_script(num_pages: int, length: int, seed: int) -> list[Operation]:
    """Write a random list of operations, legal and not, that needs no answer of the allocator to be written.

    ``["allocate", n]`` asks for n pages; ``["free", grant]`` gives back what the ``grant``-th allocation got;
    ``["free again", grant]`` does it a second time; ``["free twice at once", grant]`` names a page twice in one call.
    """
    rng = random.Random(seed)
    script: list[Operation] = []
    held: dict[int, int] = {}
    released: list[int] = []
    free = num_pages
    grants = 0
    for _ in range(length):
        choice = rng.random()
        if choice < 0.5:
            count = rng.randint(0, max(1, num_pages // 3))
            script.append(["allocate", count])
            if count <= free:
                free -= count
                held[grants] = count
            grants += 1
        elif choice < 0.8 and held:
            grant = rng.choice(sorted(held))
            script.append(["free", grant])
            free += held.pop(grant)
            released.append(grant)
        elif choice < 0.87:
            script.append(["allocate", free + rng.randint(1, 3)])
            grants += 1
        elif choice < 0.93 and any(held.values()):
            script.append(["free twice at once", rng.choice([g for g in sorted(held) if held[g]])])
        elif released:
            script.append(["free again", rng.choice(released)])
    return script


class AllocatorModel:
    """Follows a script with the answers that were given, and says what is wrong with one."""

    def __init__(self, num_pages: int) -> None:
        """Start with every page free."""
        self.num_pages = num_pages
        self.owner: dict[int, int] = {}
        self.grants: list[list[int] | None] = []

    def check(self, operation: Operation, answer: Any, num_free: Any) -> str:
        """Apply one operation; return what is wrong with the answer, or nothing. Mutates."""
        kind, argument = operation
        fault = self.allocated(argument, answer) if kind == "allocate" else self.freed(kind, argument, answer)
        left = self.num_pages - len(self.owner)
        if not fault and num_free != left:
            return f"{left} pages are free, num_free says {num_free}"
        return fault

    def allocated(self, count: int, answer: Any) -> str:
        """Check the answer to an allocation."""
        if count > self.num_pages - len(self.owner):
            self.grants.append(None)
            free = self.num_pages - len(self.owner)
            return "" if answer == "ValueError" else f"{free} pages are free: ValueError expected, got {answer}"
        grant = len(self.grants)
        self.grants.append(answer if isinstance(answer, list) else None)
        if not isinstance(answer, list) or len(answer) != count:
            return f"{count} pages expected, got {answer}"
        for page in answer:
            if type(page) is not int or not 0 <= page < self.num_pages:
                return f"page {page!r} is none of 0 … {self.num_pages - 1}"
            if page in self.owner:
                return f"page {page} already belongs to grant {self.owner[page]}"
            self.owner[page] = grant
        return ""

    def freed(self, kind: str, grant: int, answer: Any) -> str:
        """Check the answer to a release. Pages of an old grant may be owned anew; then freeing them is not an error."""
        pages = self.grants[grant] if grant < len(self.grants) else None
        if pages is None:
            return ""
        legal = kind != "free twice at once" and all(page in self.owner for page in pages)
        if not legal:
            return "" if answer == "ValueError" else f"freeing {pages} is an error, the answer was {answer}"
        for page in pages:
            del self.owner[page]
        return "" if answer == "None" else f"freeing {pages} is legal, the answer was {answer}"


def allocator_failures(num_pages: int, script: Sequence[Operation], log: Any) -> list[Failure]:
    """Follow a log of [answer, num_free] and return the first fault."""
    model = AllocatorModel(num_pages)
    if not isinstance(log, list) or len(log) != len(script):
        return [Failure(f"{num_pages} pages", "", f"{len(script)} answers", str(log)[:100])]
    for index, (operation, (answer, num_free)) in enumerate(zip(script, log, strict=True)):
        fault = model.check(operation, answer, num_free)
        if fault:
            return [Failure(f"a pool of {num_pages} pages", f"operation {index}, {operation}", note=fault)]
    return []


def packed(chunks: Sequence[Chunk], page_size: int) -> dict[str, list[Any]]:
    """Say for every token of the step where it stands, one token at a time."""
    out: dict[str, list[Any]] = {
        name: [] for name in ("input_ids", "positions", "slot_mapping", "logit_rows", "seq_lens_kv", "kv_slots")
    }
    out["cu_seqlens_q"] = [0]
    widest = max(len(chunk.pages) for chunk in chunks)
    out["block_table"] = [chunk.pages + [-1] * (widest - len(chunk.pages)) for chunk in chunks]
    row = 0
    for chunk in chunks:
        for position in range(chunk.computed, len(chunk.ids)):
            out["input_ids"].append(chunk.ids[position])
            out["positions"].append(position)
            out["slot_mapping"].append(slot(chunk.pages, position, page_size))
            row += 1
        out["logit_rows"].append(row - 1)
        out["cu_seqlens_q"].append(row)
        out["seq_lens_kv"].append(len(chunk.ids))
        out["kv_slots"].append([slot(chunk.pages, position, page_size) for position in range(len(chunk.ids))])
    return out


def slot(pages: list[int], position: int, page_size: int) -> int:
    """Return the slot of one position: its page's first slot and what is left over."""
    page_index, offset = divmod(position, page_size)
    return pages[page_index] * page_size + offset


@dataclass(frozen=True)
class Step:
    """One packed step of a schedule: (sequence, tokens computed before, tokens computed after) in packing order.

    ``retired`` pages are given up after it: nothing may read them any more.
    """

    parts: list[tuple[int, int, int]]
    retired: list[int]


@dataclass(frozen=True)
class Schedule:
    """How several sequences are computed over one pool: the pages of each, and the steps."""

    page_size: int
    num_pages: int
    sequences: list[list[int]]
    pages: list[list[int]]
    steps: list[Step]


def make_schedule(
    sequences: list[list[int]], page_size: int, seed: int, chunk_sizes: Sequence[int], join: float = 0.7
) -> Schedule:
    """Draw one: scattered pages, chunks of drawn sizes, a drawn part of the sequences in each step.

    A sequence that arrives late gets pages of one that is finished, so a read of a stale page shows.
    """
    rng = random.Random(f"schedule {seed} {page_size}")
    need = [-(-len(ids) // page_size) for ids in sequences]
    late = len(sequences) - 1 if len(sequences) > 2 else None  # the last one starts when the first is done
    fresh = list(range(sum(need) + 2))
    rng.shuffle(fresh)
    pages: list[list[int]] = []
    for index, count in enumerate(need):
        reused = pages[0][:count] if index == late else []
        pages.append(rng.sample(reused, len(reused)) + [fresh.pop() for _ in range(count - len(reused))])
    done = [0] * len(sequences)
    steps: list[Step] = []
    retired_first = False
    while any(done[i] < len(ids) for i, ids in enumerate(sequences)):
        first_done = done[0] == len(sequences[0])
        live = [i for i, ids in enumerate(sequences) if done[i] < len(ids) and (i != late or first_done)]
        chosen = [i for i in live if rng.random() < join] or live[:1]
        rng.shuffle(chosen)
        parts = []
        for i in chosen:
            end = min(len(sequences[i]), done[i] + rng.choice(list(chunk_sizes)))
            parts.append((i, done[i], end))
            done[i] = end
        now_done = not retired_first and done[0] == len(sequences[0])
        retired_first = retired_first or now_done
        steps.append(Step(parts, pages[0] if now_done else []))
    return Schedule(page_size, sum(need) + 2, sequences, pages, steps)
