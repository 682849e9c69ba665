"""Regular languages without automata: a matcher that takes trees apart, and masks token by token.

Owns: trees as tuples, the matcher, what an answer may go on with. Must not know: ``mini_engine``, tries, bit tricks.

A tree says what is left to be read. Reading a character gives every tree that may be left then (Antimirov, 1996), so
there is nothing to build, to determinise or to merge: slow, and unlike the solution.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Ranges = tuple[tuple[int, int], ...]
Tree = tuple[Any, ...]  # ("chars", ranges) | ("concat", *parts) | ("choice", *options) | ("repeat", tree, least, most)
Rest = tuple[Tree, ...]  # trees that are still to be read, the next one first
SURROGATES = range(0xD800, 0xE000)
DEAD = -1


# Trees --------------------------------------------------------------------------------------------------------------


def chars(members: str) -> Tree:
    """Return one character out of several; a hyphen between two of them is a range, first or last it is itself."""
    ranges = []
    rest = members
    while rest:
        if len(rest) > 2 and rest[1] == "-":
            ranges.append((ord(rest[0]), ord(rest[2])))
            rest = rest[3:]
        else:
            ranges.append((ord(rest[0]), ord(rest[0])))
            rest = rest[1:]
    return ("chars", tuple(sorted(ranges)))


def text(spelling: str) -> Tree:
    """Return exactly this text."""
    return ("concat", *[("chars", ((ord(character), ord(character)),)) for character in spelling])


def seq(*parts: Tree) -> Tree:
    """Return one after the other."""
    return ("concat", *parts)


def either(*options: Tree) -> Tree:
    """Return any one of them; of none, nothing matches."""
    return ("choice", *options)


def times(tree: Tree, least: int, most: int | None = None) -> Tree:
    """Return ``least`` to ``most`` of it, without end for ``None``."""
    return ("repeat", tree, least, most)


NEVER: Tree = either()


def write(tree: Tree) -> str:
    """Write a tree as a regular expression, for messages."""
    kind, *rest = tree
    if kind == "chars":
        codes = [[chr(a) if chr(a).isprintable() else f"\\u{a:04x}" for a in pair] for pair in rest[0]]
        return (
            "[" + "".join(a if a == b else f"{a}-{b}" for a, b in codes) + "]"
            if len(codes) != 1
            else (codes[0][0] if codes[0][0] == codes[0][1] else f"[{codes[0][0]}-{codes[0][1]}]")
        )
    if kind == "concat":
        return "".join(map(write, rest)) or "()"
    if kind == "choice":
        return "(" + "|".join(map(write, rest)) + ")" if rest else "[]"
    inner, least, most = rest
    return f"({write(inner)}){{{least},{'' if most is None else most}}}"


# Matching -----------------------------------------------------------------------------------------------------------


@cache
def may_be_empty(tree: Tree) -> bool:
    """Whether the tree matches the empty text."""
    kind, *rest = tree
    if kind == "chars":
        return False
    if kind == "concat":
        return all(map(may_be_empty, rest))
    return any(map(may_be_empty, rest)) if kind == "choice" else rest[1] == 0 or may_be_empty(rest[0])


@cache
def has_text(tree: Tree) -> bool:
    """Whether the tree matches any text at all."""
    kind, *rest = tree
    if kind == "chars":
        return bool(rest[0])
    if kind == "concat":
        return all(map(has_text, rest))
    return any(map(has_text, rest)) if kind == "choice" else rest[1] == 0 or has_text(rest[0])


@cache
def left_after(rest: Rest, code: int) -> frozenset[Rest]:
    """Return what may be left to read after one character."""
    if not rest:
        return frozenset()
    (kind, *parts), behind = rest[0], rest[1:]
    if kind == "chars":
        return frozenset([behind]) if any(first <= code <= last for first, last in parts[0]) else frozenset()
    if kind == "concat":
        return left_after((*parts, *behind), code)
    if kind == "choice":
        return frozenset(left for option in parts for left in left_after((option, *behind), code))
    inner, least, most = parts
    found: set[Rest] = set()
    if most != 0:
        again = ("repeat", inner, max(least - 1, 0), None if most is None else most - 1)
        found = {(*left, again, *behind) for left in left_after((inner,), code)}
    if may_be_empty(rest[0]):
        found |= left_after(behind, code)
    return frozenset(found)


def matches(tree: Tree, string: str) -> bool:
    """Whether the whole text matches."""
    lefts: frozenset[Rest] = frozenset([(tree,)])
    for character in string:
        lefts = frozenset(left for rest in lefts for left in left_after(rest, ord(character)))
    return any(all(map(may_be_empty, left)) for left in lefts)


def texts(tree: Tree, alphabet: str, longest: int) -> Iterator[tuple[str, bool]]:
    """Yield every text of up to ``longest`` characters, the short ones first, and whether it matches.

    What goes on from a text that no match begins with is left out, but for one character more.
    """
    waiting: deque[tuple[str, frozenset[Rest]]] = deque([("", frozenset([(tree,)]))])
    while waiting:
        string, lefts = waiting.popleft()
        yield string, any(all(map(may_be_empty, left)) for left in lefts)
        for character in alphabet if lefts and len(string) < longest else "":
            after = frozenset(left for rest in lefts for left in left_after(rest, ord(character)))
            waiting.append((string + character, after))


def draw_tree(rng: random.Random, depth: int, alphabet: str) -> Tree:
    """Draw a tree. Some parts match nothing, some only the empty text."""
    if depth == 0 or rng.random() < 0.15:
        few = rng.sample(alphabet, rng.choice([1, 1, 1, 2, 2, 3]))
        return ("chars", tuple((code, code) for code in sorted(map(ord, few))))
    kind = rng.choice(["concat", "concat", "choice", "choice", "repeat", "repeat"])
    if kind == "repeat":
        least = rng.choice([0, 0, 0, 1, 1, 2])
        most = rng.choice([None, None, least, least + 1, least + 2])
        return times(draw_tree(rng, depth - 1, alphabet), least, most)
    parts = [draw_tree(rng, depth - 1, alphabet) for _ in range(rng.choice([0, 1, 2, 2, 2, 3]))]
    return (kind, *parts)


# Automata that are given ----------------------------------------------------------------------------------------------


Rows = list[list[int]]  # the state after each byte, DEAD for none


def table_of(edges: Sequence[dict[str | int | tuple[int, int], int]]) -> Rows:
    """Return a table of 256 columns. A key is the characters that lead on, a byte, or the first and last of several."""
    rows: Rows = []
    for leads in edges:
        row = [DEAD] * 256
        for key, after in leads.items():
            if isinstance(key, tuple):
                codes: Sequence[int] = range(key[0], key[1] + 1)
            else:
                codes = [key] if isinstance(key, int) else key.encode()
            for byte in codes:
                row[byte] = after
        rows.append(row)
    return rows


def table_of_words(words: Sequence[str]) -> tuple[Rows, list[bool]]:
    """Return the table of a list of words, and which states end one: a state for every beginning of a word."""
    spelled = [word.encode() for word in words]
    beginnings = sorted({word[:end] for word in spelled for end in range(len(word) + 1)})
    number = {beginning: index for index, beginning in enumerate(beginnings)}
    rows = [[number.get(beginning + bytes([byte]), DEAD) for byte in range(256)] for beginning in beginnings]
    return rows, [beginning in spelled for beginning in beginnings]


def run(rows: Rows, data: bytes, state: int = 0) -> int:
    """Walk byte by byte."""
    for byte in data:
        if state == DEAD:
            return DEAD
        state = rows[state][byte]
    return state


def leads_to_end(rows: Rows, accepting: Sequence[bool]) -> list[bool]:
    """Return from which states some text leads to an accepting one: each state looks around on its own."""
    found = []
    for state in range(len(rows)):
        seen = {state}
        waiting = [state]
        while waiting:
            new = {after for after in rows[waiting.pop()] if after != DEAD} - seen
            seen |= new
            waiting += new
        found.append(any(accepting[other] for other in seen))
    return found


def reachable(rows: Rows) -> set[int]:
    """Return the states that some text leads to."""
    seen = {0}
    waiting = [0]
    while waiting:
        new = {after for after in rows[waiting.pop()] if after != DEAD} - seen
        seen |= new
        waiting += new
    return seen


def told_apart(rows: Rows, accepting: Sequence[bool]) -> list[list[bool]]:
    """Return which pairs of states some text tells apart, by filling in pairs until none is added; the last is dead."""
    ends = [*accepting, False]
    size = len(rows) + 1
    full = [*rows, [DEAD] * len(rows[0])]
    apart = [[ends[left] != ends[right] for right in range(size)] for left in range(size)]
    changed = True
    while changed:
        changed = False
        for left in range(size):
            for right in range(left):
                pairs = zip(full[left], full[right], strict=True)
                if not apart[left][right] and any(apart[a][b] for a, b in pairs):
                    apart[left][right] = apart[right][left] = changed = True
    return apart


def num_classes(rows: Rows, accepting: Sequence[bool]) -> int:
    """Return how many states there must be at least: a state counts if all those before it are told apart from it."""
    apart = told_apart(rows, accepting)
    return sum(all(apart[state][before] for before in range(state)) for state in range(len(rows)))


# Masks and grammar objects --------------------------------------------------------------------------------------------


def words_of(allowed: Sequence[bool]) -> list[int]:
    """Return a bitmask's words, by Python's integers: the number whose bit t is token t, cut at every 32nd bit."""
    number = sum(1 << token for token, is_allowed in enumerate(allowed) if is_allowed)
    words = []
    for _ in range(-(-len(allowed) // 32)):
        number, word = divmod(number, 1 << 32)
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def bits_of(words: Sequence[int], vocab_size: int) -> list[bool]:
    """Return the booleans of a bitmask, by Python's integers."""
    number = sum((word % (1 << 32)) << (32 * index) for index, word in enumerate(words))
    return [bool(number >> token & 1) for token in range(vocab_size)]


@dataclass(frozen=True)
class Language:
    """An automaton that is given, with a vocabulary."""

    rows: Rows
    accepting: Sequence[bool]
    token_bytes: Sequence[bytes]
    stop_ids: frozenset[int]

    def may_follow(self, state: int, token: int) -> bool:
        """Whether a token may come in a state."""
        if token in self.stop_ids:
            return self.accepting[state]
        return bool(self.token_bytes[token]) and run(self.rows, self.token_bytes[token], state) != DEAD

    def words_after(self, state: int) -> list[int]:
        """Return the words of a state's mask, asking token by token."""
        return words_of([self.may_follow(state, token) for token in range(len(self.token_bytes))])


@dataclass
class Answer:
    """The tokens of one answer. Whatever is asked is found by reading all of them again, from the first byte on."""

    language: Language
    tokens: list[int] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether the last token was a stop token."""
        return bool(self.tokens) and self.tokens[-1] in self.language.stop_ids

    @property
    def state(self) -> int:
        """Where its bytes lead to; a stop token has none."""
        return run(self.language.rows, b"".join(self.language.token_bytes[token] for token in self.tokens))

    def may_follow(self, token: int) -> bool:
        """Whether a token may come next."""
        inside = 0 <= token < len(self.language.token_bytes)
        return inside and not self.has_ended and self.language.may_follow(self.state, token)

    def observed(self) -> list[Any]:
        """Return whether it has ended, whether it is whole as it stands, and its mask."""
        size = len(self.language.token_bytes)
        mask = words_of([False] * size) if self.has_ended else self.language.words_after(self.state)
        return [self.has_ended, bool(self.language.accepting[self.state]), mask]


Operation = tuple[str, int, int]  # "accept", "rollback" or "copy"; whose; the token, or how many


def happen(answers: list[Answer], operation: Operation) -> str:
    """Do one operation, and return the name of the error that it must raise; empty if it must not."""
    kind, who, what = operation
    answer = answers[who]
    if kind == "copy":
        answers.append(Answer(answer.language, list(answer.tokens)))
        return ""
    if kind == "rollback":
        if not 0 <= what <= len(answer.tokens):
            return "ValueError"
        answer.tokens = answer.tokens[: len(answer.tokens) - what]
        return ""
    if not answer.may_follow(what):
        return "TokenRefusedError"
    answer.tokens.append(what)
    return ""


def draw_operations(rng: random.Random, language: Language, count: int) -> list[Operation]:
    """Draw a history of several answers: tokens that may come, tokens that may not, ways back, copies."""
    answers = [Answer(language)]
    history = list[Operation]()
    size = len(language.token_bytes)
    for _ in range(count):
        who = rng.randrange(len(answers))
        allowed = [token for token in range(size) if answers[who].may_follow(token)]
        most = len(answers[who].tokens)
        operation = rng.choices(
            [
                ("accept", who, rng.choice(allowed or [0])),
                ("accept", who, rng.randrange(size)),
                ("accept", who, rng.choice([-1, -size, size, size + 40])),
                ("rollback", who, rng.randint(0, most)),
                ("rollback", who, rng.choice([-1, most + 1])),
                ("copy", who if len(answers) < 5 else 0, 0),
            ],
            [12, 2, 1, 2, 1, 1],
        )[0]
        if operation[0] != "copy" or len(answers) < 5:
            history.append(operation)
            happen(answers, operation)
    return history
