"""The checks of L7.I: a thought that nothing constrains, then a grammar that never saw it.

Owns: a toy grammar that writes down its calls, histories of tokens with and without end markers, and what a
wrapper must be after each: what it is when the same tokens are counted from the beginning.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
STOP, MARK, V = 0, 7, 40
TEXTS = (
    (1, 2, 3),
    (1, 2, 4, 4),
    (2, 7, 1),
    (),
)  # what the toy grammar lets be said; one holds the marker, one is empty


def may_follow(said: list[int]) -> set[int]:
    """Return the ids that may come after ``said``."""
    count = len(said)
    longer = {text[count] for text in TEXTS if len(text) > count and list(text[:count]) == said}
    return longer | ({STOP} if tuple(said) in TEXTS else set())


def build_inner(calls: list[str]) -> Any:
    """Build a grammar of a few sequences of ids; ``told`` notes which calls change it."""
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
            calls.append(f"rollback {count}")
            if not 0 <= count <= len(self.said):
                raise ValueError(f"rollback of {count} tokens, {len(self.said)} were accepted")
            self.said = self.said[: len(self.said) - count]

        def is_terminated(self) -> bool:
            return self.said[-1:] == [STOP]

        def is_complete(self) -> bool:
            return self.is_terminated() or tuple(self.said) in TEXTS

        def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
            mask[row] = 0
            for token in may_follow(self.said):
                mask[row, token // 32] |= 1 << token % 32

        def copy(self) -> Any:
            return type(self)(self.said)

        def try_jump_forward(self) -> bytes:
            return bytes(self.said)

    return Sequences()


def build(thinks: bool, calls: list[str] | None = None) -> Any:
    """Build the candidate's wrapper around the toy grammar."""
    from mini_engine.grammar.reasoner import ReasonerGrammar

    grammar = ReasonerGrammar(build_inner([] if calls is None else calls), MARK)
    grammar.maybe_init_reasoning(thinks)
    return grammar


def state(grammar: Any) -> Values:
    """Return everything that can be seen of a wrapper: its mask, whether it is over, what the grammar inside has."""
    mask = grammar.allocate_vocab_mask(V, 3)
    mask.fill_(12345)  # so that it shows what was written
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

    thinks: bool
    tokens: list[int] = field(default_factory=list)

    @property
    def inside(self) -> list[int] | None:
        """The tokens after the first marker, ``None`` during the thought."""
        if not self.thinks:
            return list(self.tokens)
        return self.tokens[self.tokens.index(MARK) + 1 :] if MARK in self.tokens else None

    def allowed(self) -> set[int]:
        """Return what may come next."""
        said = self.inside
        if said is None:
            return set(range(V))
        return may_follow(said)

    def state(self) -> Values:
        """Return what is to be seen."""
        said = self.inside
        mask = torch.full((3, 2), 12345, dtype=torch.int32)
        if said is not None:
            mask[1] = torch.tensor([sum(1 << t % 32 for t in self.allowed() if t // 32 == w) for w in (0, 1)])
        over = said is not None and said[-1:] == [STOP]
        return {
            "mask": mask,
            "terminated": over,
            "complete": over or (said is not None and tuple(said) in TEXTS),
            "inside": said or [],
            "forced": len(said or []),
        }


# A way through ------------------------------------------------------------------------------------------------------

# Whether it thinks, and the tokens in their order; refused ones among them.
WAYS: dict[str, tuple[bool, list[int]]] = {
    "a thought, then an answer": (True, [5, 9, 5, MARK, 1, 2, 3, STOP]),
    "no thought": (False, [1, 2, 4, 4, STOP]),
    "an empty thought": (True, [MARK, 1, 2, 3, STOP]),
    "a thought that says what the answer may say": (True, [1, 2, 3, STOP, MARK, 1, 2, 3]),
    "an empty answer": (True, [5, MARK, STOP]),
    "a stop token inside the thought": (True, [5, STOP, 5, MARK, 1]),
    "a second marker, which the grammar refuses": (True, [5, MARK, MARK, 1, MARK, 2, 3]),
    "a second marker, which the grammar allows": (True, [5, MARK, 2, MARK, 1, STOP]),
    "a marker without a thought": (False, [MARK, 2, MARK, 1]),
    "refused tokens": (True, [8, MARK, 9, 1, 1, 2, 9, 3, 1, STOP, 1]),
    "a thought that does not end": (True, [5, 6, 8, 1, 2]),
}


def ways_probe(seed: int) -> Values:
    """Go every way and look after each token."""
    from mini_engine.grammar.base import TokenRefusedError

    values: Values = {}
    for name, (thinks, tokens) in WAYS.items():
        calls: list[str] = []
        grammar = build(thinks, calls)
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
    for name, (thinks, tokens) in WAYS.items():
        story = Story(thinks)
        refused = []
        calls = []
        states = [story.state()]
        for place, token in enumerate(tokens):
            calls += [] if story.inside is None else [f"accept {token}"]
            if token in story.allowed():
                story.tokens.append(token)
            else:
                refused.append(place)
            states.append(story.state())
        values[name] = {"states": states, "refused": refused, "calls": calls}
    values["a thought before an answer that is over"] = [False, False]
    return values


def ways_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare way by way."""
    return differences(ways_spec(seed), got, None)


REGISTRY.add(
    "L7.I.ways",
    "Until the marker nothing is constrained and the grammar hears nothing; the marker belongs to the thought, and "
    "everything after it, other markers too, to the grammar.",
    ways_probe,
    ways_verdict,
)

# Back again ---------------------------------------------------------------------------------------------------------


def journeys(seed: int) -> dict[str, tuple[bool, list[list[Any]]]]:
    """Return orders to accept tokens and to roll back: inside the answer, across the marker, in the thought."""
    found = {}
    for number in range(60):
        rng = random.Random(f"journey {seed} {number}")
        story = Story(rng.random() < 0.8)
        orders = []
        for _ in range(rng.randint(4, 18)):
            if rng.random() < 0.3:
                count = rng.choice([0, 1, 1, 2, 3, len(story.tokens), len(story.tokens) + 1, -1])
                orders.append(["rollback", count])
                if 0 <= count <= len(story.tokens):
                    story.tokens = story.tokens[: len(story.tokens) - count]
                continue
            thinking = story.inside is None
            choices = [MARK, MARK, 5, 1, STOP] if thinking else sorted(story.allowed()) or [3]
            token = rng.choice(choices)
            orders.append(["accept", token])
            story.tokens += [token] if token in story.allowed() else []
        found[f"journey {number}"] = (story.thinks, orders)
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
    for name, (thinks, orders) in journeys(seed).items():
        grammar = build(thinks)
        seen = []
        for order in orders:
            seen.append([follow(grammar, order), state(grammar)])
        values[name] = seen
    return values


def rollback_verdict(seed: int, got: Values) -> list[Failure]:
    """Take tokens off the list."""
    failures = []
    for name, (thinks, orders) in journeys(seed).items():
        story = Story(thinks)
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
            case = f"{name}{', with a thought' if thinks else ''}: {', '.join(said)}"
            found = differences([want, story.state()], [went, seen], None, case)
            if found:
                failures += found[:1]
                break
    return failures


REGISTRY.add(
    "L7.I.rollback",
    "Undoing tokens leads back to what was there before them: inside the answer, across the marker, in the thought, "
    "none at all; more than there are is refused and changes nothing.",
    rollback_probe,
    rollback_verdict,
)


def copies_probe(seed: int) -> Values:
    """Copy at every place of every way, and send original and copy different ways."""
    values: Values = {}
    for name in ("a thought, then an answer", "no thought", "a second marker, which the grammar allows"):
        thinks, tokens = WAYS[name]
        rows = []
        for place in range(len(tokens) + 1):
            grammar = build(thinks)
            for token in tokens[:place]:
                grammar.accept_token(token)
            twin = grammar.copy()
            both = [state(grammar), state(twin)]
            went = follow(twin, ["accept", tokens[place]]) if place < len(tokens) else "done"
            apart = [state(grammar), state(twin)]
            back = [follow(twin, ["rollback", place + (place < len(tokens))]), state(twin), state(grammar)]
            rows.append([both, went, apart, back, twin.stats is grammar.stats])
        values[name] = rows
    return values


def copies_verdict(seed: int, got: Values) -> list[Failure]:
    """Keep two stories."""
    failures = []
    for name, rows in got.items():
        thinks, tokens = WAYS[name]
        for place, row in enumerate(rows):
            here = Story(thinks, tokens[:place]).state()
            after = Story(thinks, tokens[: place + 1]).state()
            want = [[here, here], "done", [here, after], ["done", Story(thinks).state(), here], False]
            case = f"{name}, copied after {place} tokens: both, the copy goes on, goes back, shares its stats"
            failures += differences(want, row, None, case)
    return failures


REGISTRY.add(
    "L7.I.copies",
    "A copy is in the same phase, can go back as far, and goes its own way.",
    copies_probe,
    copies_verdict,
)
