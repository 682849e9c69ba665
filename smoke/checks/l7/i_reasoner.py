"""The checks of L7.I: a thought that may come, and a grammar that never saw it.

Owns: a toy grammar that writes down its calls, histories of tokens with and without markers, and what a wrapper must be
after each: what it is when the same tokens are counted from the beginning.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
STOP, BEGIN, MARK, V = 0, 33, 7, 40
TEXTS = (
    (1, 2, 3),
    (1, 2, 4, 4),
    (2, 7, 1),
    (),
)  # what the toy grammar lets be said; one holds the end marker, one is empty


def may_follow(said: list[int]) -> set[int]:
    """Return the ids that may come after ``said``."""
    count = len(said)
    longer = {text[count] for text in TEXTS if len(text) > count and list(text[:count]) == said}
    return longer | ({STOP} if tuple(said) in TEXTS else set())


def row_of(allowed: set[int], with_booleans: bool = False) -> Tensor:
    """Return a row of a mask: a bitmask, or booleans that are True where a token is banned."""
    if with_booleans:
        return torch.tensor([token not in allowed for token in range(V)])
    words = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in (0, 1)]
    return torch.tensor([word - (1 << 32 if word >> 31 else 0) for word in words], dtype=torch.int32)


def build_inner(calls: list[str], with_booleans: bool) -> Any:
    """Build a grammar of a few sequences of ids; ``calls`` notes which calls change it."""
    from mini_engine.grammar.base import GrammarObject, TokenRefusedError

    class Sequences(GrammarObject):
        """What was said so far, and what may follow."""

        def __init__(self, said: Sequence[int] = ()) -> None:
            super().__init__()
            self.said = list(said)

        def accept_token(self, token_id: int) -> None:
            calls.append(f"accept {token_id}")
            if token_id not in may_follow(self.said):
                raise TokenRefusedError(f"{token_id} after {self.said}")
            self.said.append(token_id)

        def rollback(self, count: int) -> None:
            if not 0 <= count <= len(self.said):
                raise ValueError(f"rollback of {count} tokens, {len(self.said)} were accepted")
            self.said = self.said[: len(self.said) - count]

        def is_terminated(self) -> bool:
            return self.said[-1:] == [STOP]

        def is_complete(self) -> bool:
            return self.is_terminated() or tuple(self.said) in TEXTS

        def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
            mask[row] = row_of(may_follow(self.said), with_booleans)

        def copy(self) -> Any:
            return type(self)(self.said)

        def try_jump_forward(self) -> bytes:
            return bytes(self.said)

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str = "cpu") -> Tensor:
            banned = torch.zeros(batch_size, vocab_size, dtype=torch.bool)
            return banned if with_booleans else super().allocate_vocab_mask(vocab_size, batch_size, device)

    return Sequences()


def build(opened: bool, calls: list[str] | None = None, *, with_booleans: bool = False) -> Any:
    """Build the candidate's wrapper around the toy grammar."""
    from mini_engine.grammar.reasoner import ReasonerGrammar, ThoughtIds

    inner = build_inner([] if calls is None else calls, with_booleans)
    return ReasonerGrammar(inner, ThoughtIds(BEGIN, MARK, frozenset([STOP])), opened)


def state(grammar: Any) -> Values:
    """Return everything that can be seen of a wrapper: its mask, whether it is over, what the grammar inside has."""
    mask = grammar.allocate_vocab_mask(V, 3)
    grammar.fill_vocab_mask(mask, 1)
    return {
        "mask": mask,
        "terminated": bool(grammar.is_terminated()),
        "complete": bool(grammar.is_complete()),
        "inside": list(grammar.inner.said),
        "forced": len(grammar.try_jump_forward()),
    }


@dataclass
class Story:
    """The spec: all tokens that were accepted. Everything is read off them anew."""

    opened: bool
    tokens: list[int] = field(default_factory=list)

    @property
    def thinks(self) -> bool:
        """Whether there is a thought: in the prompt, or the first token begins it."""
        return self.opened or self.tokens[:1] == [BEGIN]

    @property
    def inside(self) -> list[int] | None:
        """The tokens that are not part of a thought, ``None`` within it."""
        if not self.thinks:
            return list(self.tokens)
        return self.tokens[self.tokens.index(MARK) + 1 :] if MARK in self.tokens else None

    def allowed(self) -> set[int]:
        """Return what may come next."""
        said = self.inside
        if said is None:
            return set(range(V)) - {STOP}
        return may_follow(said) | ({BEGIN} if not self.tokens and not self.opened else set())

    def state(self, *, with_booleans: bool = False) -> Values:
        """Return what is to be seen."""
        said = self.inside
        mask = torch.zeros(3, V, dtype=torch.bool) if with_booleans else torch.full((3, 2), -1, dtype=torch.int32)
        beyond = set() if with_booleans or said is not None else set(range(V, 64))  # a row that allows all has all bits
        mask[1] = row_of(self.allowed() | beyond, with_booleans)
        over = said is not None and said[-1:] == [STOP]
        return {
            "mask": mask,
            "terminated": over,
            "complete": over or (said is not None and tuple(said) in TEXTS),
            "inside": said or [],
            "forced": len(said or []),
        }


# A way through ------------------------------------------------------------------------------------------------------

# Whether the prompt has opened the thought, and the tokens in their order; refused ones among them.
WAYS: dict[str, tuple[bool, list[int]]] = {
    "a thought, then an answer": (False, [BEGIN, 5, 9, 5, MARK, 1, 2, 3, STOP]),
    "a thought that the prompt has opened": (True, [5, 9, 5, MARK, 1, 2, 3, STOP]),
    "no thought": (False, [1, 2, 4, 4, STOP]),
    "no thought and an empty answer": (False, [STOP]),
    "an empty thought": (False, [BEGIN, MARK, 1, 2, 3, STOP]),
    "an empty thought in an opened one": (True, [MARK, 1, 2, 3, STOP]),
    "a thought that says what the answer may say": (False, [BEGIN, 1, 2, 3, MARK, 1, 2, 3]),
    "an empty answer": (True, [5, MARK, STOP]),
    "a stop token inside the thought, which is refused": (True, [5, STOP, 5, MARK, 1]),
    "a thought that begins twice": (False, [BEGIN, BEGIN, 5, MARK, 1]),
    "a thought that begins again after its end": (False, [BEGIN, MARK, BEGIN, 1]),
    "a thought that begins within the answer": (False, [1, BEGIN, 2, 3]),
    "an opened thought that begins": (True, [BEGIN, 5, MARK, 1]),
    "a second end, which the grammar refuses": (True, [5, MARK, MARK, 1, MARK, 2, 3]),
    "a second end, which the grammar allows": (True, [5, MARK, 2, MARK, 1, STOP]),
    "an end without a thought": (False, [MARK, 2, MARK, 1]),
    "refused tokens": (False, [8, BEGIN, 8, MARK, 9, 1, 1, 2, 9, 3, 1, STOP, 1]),
    "a thought that does not end": (False, [BEGIN, 5, 6, 8, 1, 2]),
}


def ways_probe(seed: int) -> Values:
    """Go every way and look after each token."""
    from mini_engine.grammar.base import TokenRefusedError

    values: Values = {}
    ways = [(name, opened, tokens, False) for name, (opened, tokens) in WAYS.items()]
    ways += [(f"{name}, booleans", opened, tokens, True) for name, opened, tokens, _ in ways]
    for name, opened, tokens, with_booleans in ways:
        calls: list[str] = []
        grammar = build(opened, calls, with_booleans=with_booleans)
        states = []
        refused = []
        states.append(state(grammar))
        for place, token in enumerate(tokens):
            try:
                grammar.accept_token(token)
            except TokenRefusedError:
                refused.append(place)
            states.append(state(grammar))
        values[name] = {"states": states, "refused": refused, "calls": calls}
    thinking = build(True)
    thinking.inner.said = [STOP]
    values["a thought before an answer that is over"] = [thinking.is_terminated(), thinking.is_complete()]
    return values


def ways_spec(seed: int) -> Values:
    """Count from the beginning after each token."""
    values: Values = {}
    for (name, (opened, tokens)), with_booleans in product(WAYS.items(), (False, True)):
        story = Story(opened)
        refused = []
        calls = []
        states = [story.state(with_booleans=with_booleans)]
        for place, token in enumerate(tokens):
            is_of_thought = story.inside is None or (not story.tokens and not opened and token == BEGIN)
            calls += [] if is_of_thought else [f"accept {token}"]
            if token in story.allowed():
                story.tokens.append(token)
            else:
                refused.append(place)
            states.append(story.state(with_booleans=with_booleans))
        values[f"{name}, booleans" if with_booleans else name] = {"states": states, "refused": refused, "calls": calls}
    values["a thought before an answer that is over"] = [False, False]
    return values


def ways_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare way by way."""
    return differences(ways_spec(seed), got, None)


REGISTRY.add(
    "L7.I.ways",
    "A thought comes first or not; within it only the ends of a text are banned and the grammar hears nothing; its "
    "marks belong to it, and everything else, other marks too, to the grammar; with both forms of a mask.",
    ways_probe,
    ways_verdict,
)

# Back again ---------------------------------------------------------------------------------------------------------


def journeys(seed: int) -> dict[str, tuple[bool, list[list[Any]]]]:
    """Return orders to accept tokens and to roll back: inside the answer, across the marker, in the thought."""
    found = {}
    for number in range(60):
        rng = random.Random(f"journey {seed} {number}")
        story = Story(rng.random() < 0.4)
        orders = []
        for _ in range(rng.randint(4, 18)):
            if rng.random() < 0.3:
                count = rng.choice([0, 1, 1, 2, 3, len(story.tokens), len(story.tokens) + 1, -1])
                orders.append(["rollback", count])
                if 0 <= count <= len(story.tokens):
                    story.tokens = story.tokens[: len(story.tokens) - count]
                continue
            thinking = story.inside is None
            first = [BEGIN] * 3 if not story.tokens else []
            choices = [MARK, MARK, 5, 1, STOP] if thinking else [*first, *sorted(story.allowed())] or [3]
            token = rng.choice(choices)
            orders.append(["accept", token])
            story.tokens += [token] if token in story.allowed() else []
        found[f"journey {number}"] = (story.opened, orders)
    return found


def follow(grammar: Any, order: list[Any]) -> str:
    """Carry out an order and return how it went."""
    from mini_engine.grammar.base import TokenRefusedError

    try:
        {"accept": grammar.accept_token, "rollback": grammar.rollback}[order[0]](order[1])
    except TokenRefusedError:
        return "refused"
    except ValueError:
        return "impossible"
    return "done"


def rollback_probe(seed: int) -> Values:
    """Travel, and look after each order."""
    values: Values = {}
    for name, (opened, orders) in journeys(seed).items():
        grammar = build(opened)
        seen = []
        for order in orders:
            seen.append([follow(grammar, order), state(grammar)])
        values[name] = seen
    return values


def rollback_verdict(seed: int, got: Values) -> list[Failure]:
    """Take tokens off the list."""
    failures = []
    for name, (opened, orders) in journeys(seed).items():
        story = Story(opened)
        said = []
        for (what, number), (went, seen) in zip(orders, got[name], strict=True):
            said.append(f"{what} {number}")
            if what == "rollback":
                possible = 0 <= number <= len(story.tokens)
                want = "done" if possible else "impossible"
                story.tokens = story.tokens[: len(story.tokens) - number] if possible else story.tokens
            else:
                want = "done" if number in story.allowed() else "refused"
                story.tokens += [number] if want == "done" else []
            case = f"{name}{', with a thought opened' if opened else ''}: {', '.join(said)}"
            found = differences([want, story.state()], [went, seen], None, case)
            if found:
                failures += found[:1]
                break
    return failures


REGISTRY.add(
    "L7.I.rollback",
    "Undoing tokens leads back to what was there before them: inside the answer, across the marks, in the thought, "
    "none at all; more than there are is refused and changes nothing.",
    rollback_probe,
    rollback_verdict,
)


def copies_probe(seed: int) -> Values:
    """Copy at every place of every way, and send original and copy different ways."""
    values: Values = {}
    for name in (
        "a thought, then an answer",
        "a thought that the prompt has opened",
        "no thought",
        "a second end, which the grammar allows",
    ):
        opened, tokens = WAYS[name]
        rows = []
        for place in range(len(tokens) + 1):
            grammar = build(opened)
            for token in tokens[:place]:
                grammar.accept_token(token)
            twin = grammar.copy()
            both = [state(grammar), state(twin)]
            went = follow(twin, ["accept", tokens[place]]) if place < len(tokens) else "done"
            apart = [state(grammar), state(twin)]
            back = [follow(twin, ["rollback", place + (place < len(tokens))]), state(twin), state(grammar)]
            stats = [twin.stats is grammar.stats, twin.stats is twin.inner.stats]
            rows.append([both, went, apart, back, stats])
        values[name] = rows
    return values


def copies_verdict(seed: int, got: Values) -> list[Failure]:
    """Keep two stories."""
    failures = []
    for name, rows in got.items():
        opened, tokens = WAYS[name]
        for place, row in enumerate(rows):
            here = Story(opened, tokens[:place]).state()
            after = Story(opened, tokens[: place + 1]).state()
            want = [[here, here], "done", [here, after], ["done", Story(opened).state(), here], [False, True]]
            case = f"{name}, copied after {place} tokens: both, the copy goes on, goes back, its stats"
            failures += differences(want, row, None, case)
    return failures


REGISTRY.add(
    "L7.I.copies",
    "A copy is in the same phase, can go back as far, and goes its own way.",
    copies_probe,
    copies_verdict,
)
