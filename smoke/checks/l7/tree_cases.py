"""Trees whose automata L7.C and L7.D check: every kind of node, loops in loops, wide characters, dead ends.

No engine, no automaton.
"""

import random

from smoke.checks.l7.spec_regular import NEVER, Tree, chars, draw_tree, either, seq, text, times, write

A, B, C = map(text, "abc")
HARD = "aé\u07fe\u07ff\u0800\u0801€\ud7ff\ue000\uffff\U00010000😀\U0010ffff"
ANY: Tree = ("chars", ((0, 0xD7FF), (0xE000, 0x10FFFF)))


def pieces(seed: int) -> list[Tree]:
    """Return characters, sequences and choices, without any repeat."""
    return [
        A,
        text(""),
        text("abc"),
        text("aa"),
        chars("abc"),
        chars("a-c"),
        chars("ac"),
        seq(chars("ab"), chars("bc")),
        either(A, B),
        either(text("ab"), text("ac")),
        either(text("ab"), text("cb")),
        either(text(""), A),
        either(A, text("")),
        either(A, A),
        either(text("a"), text("ab"), text("abc")),
        seq(either(A, text("")), B),
        seq(either(A, B), either(B, C), A),
        either(seq(A, either(B, C)), seq(B, either(A, C))),
        seq(A, either(text(""), B), C),
        seq(seq(seq(), A), seq()),
        either(either(either(A), B), C),
        seq(either(text(""), A), either(text(""), A), either(text(""), B)),
    ]


def repeats(seed: int) -> list[Tree]:
    """Return every small pair of bounds around several trees, alone and between other characters."""
    closed = [(0, 0), (1, 1), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 4), (3, 3)]
    bounds = [*closed, (0, None), (1, None), (2, None)]
    inner = [A, text("ab"), either(A, text("bc")), either(A, text("")), text("")]
    alone = [times(tree, *pair) for tree in inner for pair in bounds]
    return alone + [seq(A, times(tree, *pair), B) for tree in (A, B, either(A, B)) for pair in bounds]


def star(tree: Tree) -> Tree:
    """Return any number of ``tree``."""
    return times(tree, 0)


def plus(tree: Tree) -> Tree:
    """Return one or more of ``tree``."""
    return times(tree, 1)


def maybe(tree: Tree) -> Tree:
    """Return one ``tree`` or none."""
    return times(tree, 0, 1)


def loops(seed: int) -> list[Tree]:
    """Return loops next to, before, after and inside of each other."""
    some = either(A, B)
    return [
        seq(star(A), star(B)),
        seq(star(A), star(B), star(C)),
        seq(star(A), A),
        seq(star(A), star(A)),
        star(seq(star(A), B)),
        star(seq(A, star(B))),
        star(star(A)),
        star(seq(star(A), star(B))),
        plus(plus(A)),
        seq(either(star(A), star(B)), C),
        either(star(A), star(B)),
        either(star(A), B),
        seq(either(A, star(B)), star(C)),
        either(seq(star(A), B), seq(star(B), C)),
        seq(maybe(star(A)), star(B)),
        maybe(plus(A)),
        plus(maybe(A)),
        seq(star(some), text("abb")),
        seq(star(some), A, some),
        star(either(text("ab"), star(C))),
        plus(seq(plus(A), maybe(B))),
        star(either(seq(A, star(B)), C)),
        times(star(A), 2, 2),
        times(maybe(A), 3, 3),
        times(seq(times(text("ab"), 0, 2), C), 1, 2),
        times(seq(star(A), B), 1, 2),
        seq(A, star(B), A, star(B)),
        seq(star(seq(A, B)), star(seq(A, C))),
        star(text("")),
        star(star(text(""))),
        seq(star(either(A, text(""))), B),
        star(times(A, 2, 3)),
        star(times(some, 2, 2)),
        seq(maybe(A), maybe(B), maybe(C)),
        star(seq(maybe(A), B)),
    ]


def drawn(seed: int) -> list[Tree]:
    """Draw trees, some of them without any text."""
    rng = random.Random(f"trees {seed}")
    return list({write(tree): tree for tree in (draw_tree(rng, 4, "abc") for _ in range(60))}.values())


def wide(seed: int) -> list[Tree]:
    """Return characters of more than one byte, and sets of them whose spellings overlap in part."""
    others: Tree = ("chars", ((0, 0x60), (0x62, 0x7FE), (0x801, 0xD7FF), (0xE000, 0xFFFF), (0x10001, 0x10FFFF)))
    return [
        text("é"),
        text("€"),
        text("😀"),
        text("aé€"),
        chars("é€😀"),
        chars("\u07fe-\u0801"),
        chars("a\u0800-\u0801"),
        chars("\u0801-\u0fff\u1840-\u1fff"),
        ANY,
        others,
        times(ANY, 0),
        times(ANY, 2, 2),
        seq(times(ANY, 0), text("é")),
        either(text("é"), times(A, 1)),
        either(text("\u07fe"), text("\u07ff")),
        either(seq(chars("\u07fe-\u07ff"), A), seq(text("\u07ff"), text("é"))),
        seq(others, text("a")),
        times(either(text("€"), text("\U0010ffff")), 0),
        either(ANY, text("aa")),
        seq(chars("\uffff-\U00010000"), chars("a-é")),
    ]


def dead_ends(seed: int) -> list[Tree]:
    """Return trees of which parts, or everything, match nothing."""
    none: Tree = ("chars", ())
    return [
        either(A, seq(B, NEVER)),
        either(seq(text("ab"), none), text("ac")),
        seq(times(seq(A, NEVER), 0), B),
        times(NEVER, 0),
        times(none, 0, 3),
        either(seq(A, times(B, 0), none), text("ab")),
        either(seq(times(A, 0), none), text("b")),
        seq(either(none, A), either(B, NEVER)),
        NEVER,
        none,
        seq(A, NEVER),
        seq(none, A),
        times(NEVER, 1),
        times(none, 2, 4),
        either(NEVER, none),
        seq(times(A, 0), NEVER),
        either(seq(A, none), seq(NEVER, B)),
    ]
