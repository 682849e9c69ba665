"""L7: ranges of characters as sequences of byte ranges.

An automaton over tokens reads bytes, and a character beyond ASCII has two to four of them. "é" to "ÿ" is the byte C3
and then A9 to BF. A range whose bytes do not line up is cut into pieces that do:

    U+07FE … U+0801   ->   DF BE…BF  |  E0 A0 80…81
"""

from collections.abc import Iterator

from mini_engine.grammar.automata.syntax import Ranges

ByteRange = tuple[int, int]
LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # the last code point that 1, 2, 3, 4 bytes can spell
CONTINUATION = (0x80, 0xBF)


def byte_sequences(ranges: Ranges) -> Iterator[tuple[ByteRange, ...]]:
    """Yield byte-range sequences that together match exactly the UTF-8 of ``ranges``, which hold no surrogates.

    Method: Russ Cox, "Regular Expression Matching in the Wild" (2010), as in RE2 and Rust's ``utf8-ranges``.
    """
    for first, last in ranges:
        start = 0
        for end in LAST_OF_LENGTH:
            low, high = max(first, start), min(last, end)
            if low <= high:
                yield from split_range(chr(low).encode(), chr(high).encode())
            start = end + 1


def split_range(low: bytes, high: bytes) -> Iterator[tuple[ByteRange, ...]]:
    """Cut ``low`` … ``high``, of equal length, into pieces in which every byte ranges on its own."""
    rest = len(low) - 1
    least, most = bytes([CONTINUATION[0]]) * rest, bytes([CONTINUATION[1]]) * rest
    if low[1:] == least and high[1:] == most:
        yield ((low[0], high[0]), *[CONTINUATION] * rest)
    elif low[0] == high[0]:
        for tail in split_range(low[1:], high[1:]):
            yield ((low[0], low[0]), *tail)
    elif low[1:] != least:  # the ragged start on its own, the rest from the next leading byte on
        yield from split_range(low, low[:1] + most)
        yield from split_range(bytes([low[0] + 1]) + least, high)
    else:  # the ragged end on its own
        yield from split_range(low, bytes([high[0] - 1]) + most)
        yield from split_range(high[:1] + least, high)
