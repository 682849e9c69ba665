"""The checks of masks (L7.A) and of characters as bytes (L7.B).

Owns: numbers of tokens around a word's end, logits whose bits can be compared, ranges of characters around the lengths
of UTF-8. Automata are in ``c_automaton.py``, tokens and grammar objects in ``e_tokens.py``. No model.
"""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l7.spec_regular import Ranges, bits_of, words_of
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences
from smoke.framework.prepared import prepared
from smoke.framework.pretend_gpu import PretendGpu, device_of

REGISTRY = Registry()
SIZES = (1, 5, 31, 32, 33, 63, 64, 65, 96, 100, 151)  # of vocabularies: around one, two and three words

# L7.A ---------------------------------------------------------------------------------------------------------------


def draw_allowed(seed: int, *shape: int) -> Tensor:
    """Draw which tokens are allowed, about as many as not."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator) < 0.5


@prepared
def words(allowed: Tensor) -> Tensor:
    """Return the spec's bitmask [..., W]."""
    rows = allowed.reshape(-1, allowed.shape[-1]).tolist()
    packed = torch.tensor([words_of(row) for row in rows], dtype=torch.int32)
    return packed.reshape(*allowed.shape[:-1], -(-allowed.shape[-1] // 32))


def several(seed: int) -> dict[str, Tensor]:
    """Return masks of every size: all, none, drawn, the last token alone; in one, two and three dimensions."""
    cases: dict[str, Tensor] = {}
    for size in SIZES:
        last = torch.zeros(3, size, dtype=torch.bool)
        last[1, size - 1] = True
        cases[f"{size} tokens, all or none"] = torch.stack([torch.ones(size), torch.zeros(size)]).bool()
        cases[f"{size} tokens, the last one in the second row"] = last
        cases[f"{size} tokens, drawn"] = draw_allowed(seed + size, 4, size)
        cases[f"{size} tokens, one row"] = draw_allowed(seed + size + 1, size)
        cases[f"{size} tokens, two by three rows"] = draw_allowed(seed + size + 2, 2, 3, size)
        cases[f"{size} tokens, no rows"] = draw_allowed(seed, 0, size)
    return cases


def single_tokens(seed: int) -> dict[str, Tensor]:
    """Return one allowed token at every place of 70, a mask each: wherever a bit is, it is told from all others."""
    return {f"token {token} of 70 alone": torch.arange(70) == token for token in range(70)}


Cases = Callable[[int], dict[str, Tensor]]


def device_by(make: Callable[[], Tensor]) -> str:
    """Return the device of what is made on a GPU, or the error: values come first, and must not be lost by it."""
    with PretendGpu():
        try:
            return device_of(make()).type
        except RuntimeError as error:
            return str(error)


def pack_probe(cases: Cases) -> Callable[[int], Values]:
    """Return a probe that packs, the banned form as well; what it is given must stay."""

    def probe(seed: int) -> Values:
        from mini_engine.grammar.masks import bitmask_of, pack_allowed

        values: Values = {}
        for name, allowed in cases(seed).items():
            given = allowed.clone()
            banned = ~allowed
            values[name] = {"allowed": pack_allowed(given), "of banned": bitmask_of(banned)}
            values[f"{name}, given"] = [torch.equal(given, allowed), torch.equal(banned, ~allowed)]
        values["device of a mask packed on a GPU"] = device_by(lambda: pack_allowed(torch.ones(2, 70).bool().cuda()))
        return values

    return probe


def pack_spec(cases: Cases) -> Callable[[int], Values]:
    """Return a spec that writes the number whose bits are the tokens."""

    def spec(seed: int) -> Values:
        values: Values = {}
        for name, allowed in cases(seed).items():
            values[name] = {"allowed": words(allowed), "of banned": words(allowed)}
            values[f"{name}, given"] = [True, True]
        return values | {"device of a mask packed on a GPU": "cuda"}

    return spec


def unpack_cases(seed: int) -> dict[str, tuple[Tensor, int]]:
    """Return words with their number of tokens, the bits after the last token all 0, all 1 or drawn."""
    cases: dict[str, tuple[Tensor, int]] = {}
    for size in SIZES:
        whole = -(-size // 32) * 32
        full = draw_allowed(seed + size, 4, whole)
        for name, padding in {"0": torch.zeros_like(full), "1": torch.ones_like(full), "drawn": full}.items():
            cases[f"{size} tokens, bits after the last are {name}"] = (
                words(torch.cat([full[:, :size], padding[:, size:]], -1)),
                size,
            )
        cases[f"{size} tokens, minus one and the sign bit"] = (
            torch.tensor([[-1] * (whole // 32), [-(2**31)] * (whole // 32)], dtype=torch.int32),
            size,
        )
        cases[f"{size} tokens, one row"] = (words(full[0]), size)
        cases[f"{size} tokens, no rows"] = (words(full[:0]), size)
        cases[f"{size} tokens, two by two rows"] = (words(full).reshape(2, 2, -1), size)
    return cases


def unpack_probe(seed: int) -> Values:
    """Unpack, in both polarities."""
    from mini_engine.grammar.masks import banned_of, unpack_allowed

    values: Values = {}
    for name, (mask, size) in unpack_cases(seed).items():
        given = mask.clone()
        values[name] = {"allowed": unpack_allowed(given, size), "banned": banned_of(given, size)}
        values[f"{name}, given"] = torch.equal(given, mask)
    values["device of what is unpacked on a GPU"] = device_by(
        lambda: unpack_allowed(torch.zeros(2, 3).int().cuda(), 70)
    )
    return values


def unpack_spec(seed: int) -> Values:
    """Read bit after bit."""
    values: Values = {}
    for name, (mask, size) in unpack_cases(seed).items():
        rows = [bits_of(row, size) for row in mask.reshape(-1, mask.shape[-1]).tolist()]
        allowed = torch.tensor(rows, dtype=torch.bool).reshape(*mask.shape[:-1], size)
        values[name] = {"allowed": allowed, "banned": torch.where(allowed, False, True)}
        values[f"{name}, given"] = True
    return values | {"device of what is unpacked on a GPU": "cuda"}


SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3.0e38, -7.5)
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits(logits: Tensor) -> Tensor:
    """Return the logits' bits: NaN is itself then, and -0.0 is not 0.0."""
    return logits.contiguous().view(INTEGERS[logits.dtype]).clone()


def logits_cases(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return logits with what is allowed, special numbers among both."""
    cases: dict[str, tuple[Tensor, Tensor]] = {}
    for dtype in INTEGERS:
        for rows, size in ((1, 1), (1, 33), (3, 40), (4, 64), (2, 151), (0, 40)):
            generator = torch.Generator().manual_seed(seed + size)
            logits = torch.randn(rows, size, generator=generator) * 8
            for place in range(0, rows * size, 3):
                logits.view(-1)[place] = SPECIAL[place // 3 % len(SPECIAL)]
            name = f"{str(dtype).removeprefix('torch.')} [{rows}, {size}]"
            cases[name] = (logits.to(dtype), draw_allowed(seed + rows, rows, size))
    return cases


def apply_probe(form: str) -> Callable[[int], Values]:
    """Return a probe that masks logits in place, and the first columns of wider ones."""

    def probe(seed: int) -> Values:
        from mini_engine.grammar.masks import apply_banned, apply_bitmask

        apply: Any = apply_bitmask if form == "bitmask" else apply_banned
        values: Values = {}
        for name, (logits, allowed) in logits_cases(seed).items():
            padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32), value=True)  # belongs to no token
            mask = words(padded) if form == "bitmask" else ~allowed
            wide = torch.nn.functional.pad(logits, (2, 3), value=1.5)
            mine, given = logits.clone(), mask.clone()
            returned = [apply(target, mask) for target in (mine, wide[:, 2:-3])]
            values[name] = {"bits": bits(mine), "bits of wider ones": bits(wide)}
            values[f"{name}, returned, mask unchanged"] = [returned == [None, None], torch.equal(mask, given)]
        return values

    return probe


def apply_spec(seed: int) -> Values:
    """Write minus infinity one by one."""
    values: Values = {}
    for name, (logits, allowed) in logits_cases(seed).items():
        out = logits.clone()
        lowest = torch.tensor(-torch.inf, dtype=logits.dtype)
        for row, column in (~allowed).nonzero().tolist():
            out[row, column] = lowest
        wide = torch.nn.functional.pad(out, (2, 3), value=1.5)
        values[name] = {"bits": bits(out), "bits of wider ones": bits(wide)}
        values[f"{name}, returned, mask unchanged"] = [True, True]
    return values


def misfits() -> dict[str, Tensor]:
    """Return tensors that are not a bitmask for logits [3, 40]."""
    fit = torch.zeros(3, 2, dtype=torch.int32)
    return {
        "one word too few": fit[:, :1],
        "one word too many": torch.zeros(3, 3, dtype=torch.int32),
        "one row for all": fit[:1],
        "one row too many": torch.zeros(4, 2, dtype=torch.int32),
        "without rows": fit[0],
        "int64": fit.long(),
        "uint8": fit.to(torch.uint8),
        "float": fit.float(),
        "a word per token": torch.zeros(3, 40, dtype=torch.int32),
    }


def misfits_banned() -> dict[str, Tensor]:
    """Return tensors that are not a boolean mask for logits [3, 40]."""
    fit = torch.ones(3, 40, dtype=torch.bool)
    return {
        "one column too few": fit[:, :-1],
        "one column for all": fit[:, :1],
        "one row for all": fit[:1],
        "one row too many": torch.ones(4, 40, dtype=torch.bool),
        "without rows": fit[0],
        "int32": fit.int(),
        "uint8": fit.to(torch.uint8),
        "float": fit.float(),
        "a bitmask": torch.zeros(3, 2, dtype=torch.int32),
    }


def misfit_probe(seed: int) -> Values:
    """Try masks that do not fit, and look whether the logits are as they were."""
    from mini_engine.grammar.masks import apply_banned, apply_bitmask

    values: Values = {}
    groups: list[tuple[str, Any, dict[str, Tensor]]] = [
        ("bitmask", apply_bitmask, misfits()),
        ("boolean mask", apply_banned, misfits_banned()),
    ]
    for form, apply, masks in groups:
        for name, mask in masks.items():
            logits = torch.ones(3, 40)
            try:
                apply(logits, mask)
                answer = "taken"
            except NotImplementedError:
                raise
            except (AssertionError, ValueError, TypeError, IndexError, RuntimeError):
                answer = "refused"
            values[f"{form}, {name}"] = [answer, bool((logits == 1).all())]
    return values


def misfit_spec(seed: int) -> Values:
    """Every one is refused, before anything is written."""
    names = [f"bitmask, {name}" for name in misfits()] + [f"boolean mask, {name}" for name in misfits_banned()]
    return {name: ["refused", True] for name in names}


REGISTRY.add(
    "L7.A.bits",
    "Each token has a bit of its own: token t is bit t % 32 of word t // 32, and tokens 31 and 63 make words negative.",
    pack_probe(single_tokens),
    bitwise(pack_spec(single_tokens)),
)
REGISTRY.add(
    "L7.A.pack",
    "Masks of every size pack to int32 [..., ceil(V / 32)], 0 after the last token; banned ones are packed negated.",
    pack_probe(several),
    bitwise(pack_spec(several)),
)
REGISTRY.add(
    "L7.A.unpack",
    "Words give back exactly their bits, in both polarities, whatever stands after the last token.",
    unpack_probe,
    bitwise(unpack_spec),
)
REGISTRY.add(
    "L7.A.apply_bitmask",
    "A bitmask writes minus infinity over what it bans, in place; what it allows keeps its bits, in every dtype.",
    apply_probe("bitmask"),
    bitwise(apply_spec),
)
REGISTRY.add(
    "L7.A.apply_banned",
    "A boolean mask writes minus infinity where it is True, in place; everything else keeps its bits, in every dtype.",
    apply_probe("boolean mask"),
    bitwise(apply_spec),
)
REGISTRY.add(
    "L7.A.misfit",
    "A mask of another shape or dtype is refused before anything is written, also where it could be broadcast.",
    misfit_probe,
    bitwise(misfit_spec),
)

# L7.B ---------------------------------------------------------------------------------------------------------------

EDGES = (0x0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF)  # where lengths and leads change
MOST_PIECES = 16  # of one range: a ragged start, a middle and a ragged end for each byte of each length
Sequences = list[list[list[int]]]


def without_surrogates(first: int, last: int) -> Ranges:
    """Return a range as the engine's trees hold it."""
    parts = ((first, min(last, 0xD7FF)), (max(first, 0xE000), last))
    return tuple((low, high) for low, high in parts if low <= high)


def small_ranges(seed: int) -> dict[str, Ranges]:
    """Return ranges that every character of can be looked at: single ones, and windows around every edge."""
    rng = random.Random(f"ranges {seed}")
    cases: dict[str, Ranges] = {"nothing": ()}
    for edge in EDGES:
        cases[name_of(((edge, edge),))] = ((edge, edge),)
        for _ in range(6):
            first = max(0, edge - rng.choice([0, 1, 2, 63, 64, 65, 300, 5000]))
            last = min(0x10FFFF, edge + rng.choice([0, 1, 2, 63, 64, 65, 300, 5000]))
            ranges = without_surrogates(first, last)
            cases[name_of(ranges)] = ranges
    for _ in range(60):
        first = rng.choice([rng.randrange(0x900), rng.randrange(0x20000), rng.randrange(0x10FFFF)])
        ranges = without_surrogates(first, min(0x10FFFF, first + rng.choice([1, 3, 64, 100, 4096, 9000])))
        cases[name_of(ranges)] = ranges
    for _ in range(10):
        ends = sorted(rng.sample(range(0x1000), 8))
        ranges = tuple(pair for pair in zip(ends[::2], ends[1::2], strict=True))
        cases[name_of(ranges)] = ranges
    return cases


def name_of(ranges: Ranges) -> str:
    """Name ranges by their code points."""
    return ", ".join(f"U+{first:04X}…U+{last:04X}" for first, last in ranges) or "nothing"


def large_ranges(seed: int) -> dict[str, Ranges]:
    """Return ranges whose characters are only counted."""
    rng = random.Random(f"large {seed}")
    cases = [without_surrogates(0, 0x10FFFF), ((0x80, 0xD7FF),), ((0xE000, 0x10FFFF),), ((0x10000, 0x10FFFF),)]
    cases += [without_surrogates(*sorted(rng.sample(range(0x110000), 2))) for _ in range(30)]
    return {name_of(ranges): ranges for ranges in cases}


def sequences_probe(cases: Callable[[int], dict[str, Ranges]]) -> Callable[[int], Values]:
    """Return a probe that spells ranges."""

    def probe(seed: int) -> Values:
        from mini_engine.grammar.automata.utf8 import byte_sequences

        return {
            name: [[[int(low), int(high)] for low, high in sequence] for sequence in byte_sequences(ranges)]
            for name, ranges in cases(seed).items()
        }

    return probe


def expand(sequence: Sequence[Sequence[int]]) -> list[bytes]:
    """Return every byte string of a sequence."""
    found = [b""]
    for low, high in sequence:
        found = [before + bytes([byte]) for before in found for byte in range(low, high + 1)]
    return found


def num_spelled(sequence: Sequence[Sequence[int]]) -> int:
    """Return how many byte strings a sequence has."""
    count = 1
    for low, high in sequence:
        count *= max(high - low + 1, 0)
    return count


def exact_verdict(seed: int, got: Values) -> list[Failure]:
    """Spell every character on its own."""
    failures: list[Failure] = []
    for name, ranges in small_ranges(seed).items():
        expected = sorted(chr(code).encode() for first, last in ranges for code in range(first, last + 1))
        if sum(map(num_spelled, got[name])) > len(expected) + 70_000:
            failures.append(Failure(name, "", f"{len(expected)} characters", f"sequences {got[name]}"))
            continue
        spelled = sorted(data for sequence in got[name] for data in expand(sequence))
        for want, have in pairwise_of(expected, spelled):
            if want != have:
                failures.append(Failure(name, "the first byte string that differs", str(want), str(have)))
                break
    return failures[:6]


def pairwise_of(expected: list[bytes], spelled: list[bytes]) -> list[tuple[bytes | None, bytes | None]]:
    """Return items of the same place; None where one list has ended."""
    size = max(len(expected), len(spelled))
    padded = [[*items, *[None] * (size - len(items))] for items in (expected, spelled)]
    return list(zip(*padded, strict=True))


def matches_one(sequence: Sequence[Sequence[int]], data: bytes) -> bool:
    """Whether a byte string is of a sequence."""
    return len(sequence) == len(data) and all(a <= byte <= b for (a, b), byte in zip(sequence, data, strict=True))


def large_verdict(seed: int, got: Values) -> list[Failure]:
    """Count what is spelled, look for characters near every edge and for drawn ones, and count the sequences."""
    failures: list[Failure] = []
    rng = random.Random(f"characters {seed}")
    near = {
        edge + step for edge in (*EDGES, 0x1000, 0xCFFF, 0x3FFFF, 0x40000, 0xFFFFF, 0x100000) for step in (-1, 0, 1)
    }
    asked = sorted({*near, *(rng.randrange(0x110000) for _ in range(150))})
    codes = [code for code in asked if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF]
    for name, ranges in large_ranges(seed).items():
        sequences: Sequences = got[name]
        expected = sum(last - first + 1 for first, last in ranges)
        failures += differences(expected, sum(map(num_spelled, sequences)), None, f"{name}, byte strings in all")
        ends = {end for pair in ranges for end in pair}
        for code in [*codes, *ends]:
            inside = any(first <= code <= last for first, last in ranges)
            count = sum(matches_one(sequence, chr(code).encode()) for sequence in sequences)
            failures += differences(int(inside), count, None, f"{name}, sequences that match U+{code:04X}")
        for sequence in sequences:
            if not 1 <= len(sequence) <= 4 or any(not 0 <= low <= high <= 255 for low, high in sequence):
                failures.append(Failure(name, "", "one to four ranges of bytes", str(sequence)))
        if len(sequences) > MOST_PIECES * len(ranges):
            failures.append(Failure(name, "sequences", f"at most {MOST_PIECES * len(ranges)}", str(len(sequences))))
    return failures[:6]


def split_cases(seed: int) -> dict[str, tuple[int, int]]:
    """Return the first and last character of ranges whose characters all have the same length."""
    rng = random.Random(f"split {seed}")
    cases: dict[str, tuple[int, int]] = {}
    spans = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    for low, high in spans:
        picked = [(low, high), (low, low), (high, high), (low, low + 1), (high - 1, high), (low + 1, high - 1)]
        starts = [rng.randrange(low, high - 64) for _ in range(10)]
        picked += [(first, min(high, first + rng.choice([1, 60, 64, 130, 5000]))) for first in starts]
        cases |= {f"U+{first:04X}…U+{last:04X}": (first, last) for first, last in picked}
    return {name: pair for name, pair in cases.items() if pair[1] - pair[0] < 70_000}


def split_probe(seed: int) -> Values:
    """Cut ranges of one length."""
    from mini_engine.grammar.automata.utf8 import split_range

    return {
        name: [[[int(low), int(high)] for low, high in sequence] for sequence in split_range(*encoded(pair))]
        for name, pair in split_cases(seed).items()
    }


def encoded(pair: tuple[int, int]) -> tuple[bytes, bytes]:
    """Return the bytes of both ends."""
    return chr(pair[0]).encode(), chr(pair[1]).encode()


def split_verdict(seed: int, got: Values) -> list[Failure]:
    """Each piece has the length of the ends; together they are every byte string between them that is a character."""
    failures: list[Failure] = []
    for name, (first, last) in split_cases(seed).items():
        lengths = {len(sequence) for sequence in got[name]}
        failures += differences([len(chr(first).encode())], sorted(lengths), None, f"{name}, lengths of the pieces")
        if sum(map(num_spelled, got[name])) != last - first + 1:
            count = sum(map(num_spelled, got[name]))
            failures += differences(last - first + 1, count, None, f"{name}, byte strings in all")
            continue
        spelled = sorted(data for sequence in got[name] for data in expand(sequence))
        expected = [chr(code).encode() for code in range(first, last + 1)]
        wrong = [pair for pair in pairwise_of(expected, spelled) if pair[0] != pair[1]]
        if wrong:
            failures.append(Failure(name, "the first byte string that differs", str(wrong[0][0]), str(wrong[0][1])))
        if any(one == other for one, other in pairwise(spelled)):
            failures.append(Failure(name, "", "each byte string once", "one of them twice"))
    return failures[:6]


REGISTRY.add(
    "L7.B.split",
    "A range of characters of one length is cut into pieces that together spell each of them once and nothing else.",
    split_probe,
    split_verdict,
)
REGISTRY.add(
    "L7.B.exact",
    "Around every change of length, ranges are spelled exactly: each character once, and no other byte string.",
    sequences_probe(small_ranges),
    exact_verdict,
)
REGISTRY.add(
    "L7.B.large",
    "Large ranges, all of Unicode too, spell as many byte strings as they have characters, in a handful of sequences.",
    sequences_probe(large_ranges),
    large_verdict,
)
