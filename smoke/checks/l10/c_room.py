"""The checks of the room that drafts may take (L10.C): rows and pages that nobody needs in this step. No model.

Owns: states of a scheduler that are put together by hand, and a draft token by token. Whole runs are in
``c_worlds.py``. What decides how much a request guesses (L10.B) is not asked: all guess all they may.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from smoke.checks.l5.a_request import build_request
from smoke.checks.l5.d_share import build_scheduler, chunk_list
from smoke.checks.l5.spec_scheduling import Person, Rules, touched
from smoke.checks.l5.spec_shelf import build_shelf
from smoke.checks.l10.machine import keen
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
VOCABULARY = 1009  # ids of the made-up model
STATES = 60  # that are drawn


class Fixed:
    """Proposes the beginning of one list, and counts how often it is asked."""

    def __init__(self, ids: Sequence[int]) -> None:
        """Propose ``ids``."""
        self.ids = list(ids)
        self.asked: list[list[int]] = []

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` ids."""
        self.asked.append([len(tokens), most])
        return self.ids[:most]


def build_drafting(scheduler: Any, make: Any, rows: int = 100) -> Any:
    """Build what drafts for the candidate's scheduler."""
    from mini_engine.scheduler.drafts import Drafting

    return Drafting(scheduler, make, rows, VOCABULARY)


# extend -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A chunk of a step: tokens of the request, how many are computed by this step, and how many ids are proposed.

    ``scores``: scores alone are asked for.
    """

    prompt: int
    outputs: int
    count: int
    samples: bool = True
    scores: bool = False
    ids: int = 100


@dataclass(frozen=True)
class Step:
    """A step, and the limits of its rows."""

    pieces: tuple[Piece, ...]
    rows: int
    budget: int | None = None


class Several:
    """Proposes for several requests: so many ids as the piece says whose number is the first token."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Propose for the requests of ``pieces``."""
        self.pieces = pieces

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` ids."""
        return list(range(100, 100 + min(most, self.pieces[tokens[0]].ids)))


def decodes(count: int, ids: int = 100) -> tuple[Piece, ...]:
    """Return requests with one token to compute."""
    return tuple(Piece(3, 2 + index, 1, ids=ids) for index in range(count))


def draw_step(rng: random.Random) -> Step:
    """Draw a step of decodes, prompts and pieces of prompts, with more or less room."""
    pieces = []
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(["decode", "decode", "prompt", "piece"])
        prompt = rng.randint(3, 8)
        ids = rng.choice([0, 1, 3, 100, 100])
        pieces.append(
            Piece(prompt, rng.randint(1, 4), 1, ids=ids)
            if kind == "decode"
            else Piece(prompt, 0, prompt - (kind == "piece"), kind == "prompt", ids=ids)
        )
    own = sum(piece.count for piece in pieces)
    rows = max(own + rng.randint(-2, 30), 1)
    return Step(tuple(pieces), rows, rng.choice([None, own, own + rng.randint(0, 12), 40]))


def extended(seed: int) -> dict[str, Step]:
    """Return steps with and without room."""
    found = {
        "one request": Step(decodes(1), 9),
        "three requests share 8 rows": Step(decodes(3), 11),
        "three requests share 7 rows": Step(decodes(3), 10),
        "more requests than rows": Step(decodes(5), 7),
        "what one does not draft is left to the others": Step((*decodes(1, 1), *decodes(2)), 12),
        "no row is left": Step(decodes(4), 4),
        "more rows than drafts may have": Step(decodes(4), 3),
        "the budget of the step is less": Step(decodes(2), 30, 6),
        "the budget of the step is used up": Step(decodes(2), 30, 2),
        "a piece of a prompt": Step((Piece(7, 0, 5, False),), 20),
        "a piece of a prompt between two": Step((*decodes(1), Piece(7, 0, 5, False), *decodes(1)), 15),
        "a whole prompt": Step((Piece(7, 0, 7),), 20),
        "scores alone": Step((Piece(7, 0, 7, scores=True),), 20),
        "scores alone, behind another": Step((*decodes(1), Piece(7, 0, 7, scores=True)), 80),
        "scores alone, before two that draft": Step((Piece(7, 0, 7, scores=True), *decodes(2)), 20),
        "no chunk": Step((), 20),
    }
    drawn = {f"step {number}": draw_step(random.Random(f"extend {seed} {number}")) for number in range(STATES)}
    return {**found, **drawn}


def extend_probe(seed: int) -> Values:
    """Extend every step with drafters that have more ids than there is room for."""
    from mini_engine.scheduler.request import RequestOptions
    from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk

    values = Values()
    for name, step in extended(seed).items():
        scheduler = build_scheduler(Rules(900, 2, budget=step.budget, max_running=20))
        chunks = []
        for index, piece in enumerate(step.pieces):
            known = piece.prompt + piece.outputs
            start = known - piece.count - (not piece.samples)
            person = Person(f"r{index}", piece.prompt, 90, index, piece.outputs, start, state="running")
            request = build_request(person)
            request.pages = scheduler.allocator.allocate((known + 1) // 2)
            request.prompt_ids = [index, *request.prompt_ids[1:]]
            request.options = RequestOptions(score_only=piece.scores)
            scheduler.running.append(request)
            chunks.append(ScheduledChunk(request, start, piece.count, piece.samples))
        gone = build_request(Person("gone", 1))
        batch = ScheduledBatch(list(chunks), [gone])
        with keen():
            wide = build_drafting(scheduler, lambda s=step: Several(s.pieces), step.rows).extend(batch)
        values[name] = {
            "rows of each draft": [len(chunk.draft) for chunk in wide.chunks],
            "are they what was proposed": [is_beginning(chunk.draft) for chunk in wide.chunks],
            "chunks": chunk_list(wide.chunks),
            "preempted": [request is gone for request in wide.preempted],
            "the step before": [chunk_list(batch.chunks), [list(chunk.draft) for chunk in batch.chunks]],
        }
    return values


def is_beginning(draft: Sequence[int]) -> bool:
    """Whether a draft is the beginning of what ``Several`` proposes."""
    return [int(token) for token in draft] == list(range(100, 100 + len(draft)))


def extend_spec(seed: int) -> Values:
    """Share out what is left, row by row: who comes first gets the odd one."""
    values = Values()
    for name, step in extended(seed).items():
        left = min(step.rows, 10**9 if step.budget is None else step.budget) - sum(p.count for p in step.pieces)
        waiting = sum(piece.samples for piece in step.pieces)
        drafts = []
        for piece in step.pieces:
            share = 0
            if piece.samples:
                while left > 0 and share * waiting < left:
                    share += 1
                waiting -= 1
            share = 0 if piece.scores else min(share, piece.ids)
            left -= share
            drafts.append(share)
        chunks = [
            [f"r{i}", p.prompt + p.outputs - p.count - (not p.samples), p.count, p.samples]
            for i, p in enumerate(step.pieces)
        ]
        values[name] = {
            "rows of each draft": drafts,
            "are they what was proposed": [True] * len(drafts),
            "chunks": chunks,
            "preempted": [True],
            "the step before": [chunks, [[] for _ in chunks]],
        }
    return values


REGISTRY.add(
    "L10.C.share",
    "Drafts have what the step leaves of its rows, each request in turn its share; a piece of a prompt and a request "
    "for scores have none, and nothing else of the step changes.",
    extend_probe,
    bitwise(extend_spec),
)

# draft --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """A request that may draft: its tokens, what limits it, and what is proposed."""

    prompt: int
    outputs: int
    most_new: int
    most: int
    free: int
    page_size: int = 4
    ids: tuple[int, ...] = tuple(range(100, 140))
    cached: int = 0  # pages that could be evicted


ROOMS: dict[str, Room] = {
    "room for all": Room(5, 3, 90, 6, 9),
    "the last token comes anyway": Room(5, 3, 4, 6, 9),
    "two tokens to come: one is drafted": Room(5, 3, 5, 6, 9),
    "three tokens to come": Room(5, 3, 6, 6, 9),
    "the first token of an answer of 1": Room(5, 0, 1, 6, 9),
    "the first token of an answer of 3": Room(5, 0, 3, 6, 9),
    "most is 0": Room(5, 3, 90, 0, 9),
    "most is -2": Room(5, 3, 90, -2, 9),
    "no page is free, and 2 slots": Room(5, 1, 90, 6, 0),
    "no page is free, and no slot": Room(5, 3, 90, 6, 0),
    "no page is free, and 6 can be evicted": Room(5, 1, 90, 6, 0, cached=6),
    "one page is free": Room(5, 3, 90, 9, 1),
    "one page is free, and one slot more": Room(5, 2, 90, 9, 1),
    "pages of 1": Room(5, 3, 90, 6, 4, 1),
    "a draft to the end of a page": Room(5, 3, 90, 4, 9),
    "a draft one beyond the end of a page": Room(5, 3, 90, 5, 9),
    "nothing is proposed": Room(5, 3, 90, 6, 9, ids=()),
    "an id that no token has": Room(5, 3, 90, 6, 9, ids=(7, VOCABULARY, 8)),
    "the last id that a token has": Room(5, 3, 90, 6, 9, ids=(7, VOCABULARY - 1, 0, 8)),
    "an id below 0": Room(5, 3, 90, 6, 9, ids=(7, 8, -1, 9)),
    "the first id is none": Room(5, 3, 90, 6, 9, ids=(-1, 9)),
}


def rooms(seed: int) -> dict[str, Room]:
    """Return the cases above and drawn ones."""
    found = dict(ROOMS)
    for number in range(STATES):
        rng = random.Random(f"room {seed} {number}")
        outputs = rng.randint(0, 6)
        ids = tuple(rng.choice([rng.randrange(VOCABULARY)] * 9 + [VOCABULARY + 3]) for _ in range(rng.randint(0, 12)))
        most_new = outputs + rng.choice([1, 2, 5, 40])
        room = Room(rng.randint(1, 9), outputs, most_new, rng.randint(0, 9), rng.randint(0, 4), rng.choice([1, 2, 4]))
        found[f"case {number}"] = replace(room, ids=ids, cached=rng.choice([0, 3]))
    return found


def draft_probe(seed: int) -> Values:
    """Ask for one draft in every state, and look at all pages afterwards."""
    values = Values()
    for name, room in rooms(seed).items():
        held = -(-(room.prompt + room.outputs) // room.page_size)
        shelf = build_shelf(room.page_size)
        scheduler = build_scheduler(Rules(held + room.free + room.cached, room.page_size), cache=shelf)
        tokens = [*range(room.cached * room.page_size)]
        shelf.insert(tokens, scheduler.allocator.allocate(room.cached))
        known = room.prompt + room.outputs
        request = build_request(Person("r0", room.prompt, room.most_new, 0, room.outputs, known - 1, state="running"))
        request.pages = scheduler.allocator.allocate(held)
        before = list(request.pages)
        scheduler.running.append(request)
        fixed = Fixed(room.ids)
        with keen():
            draft = build_drafting(scheduler, lambda f=fixed: f).draft(request, room.most)
        scheduler.check_pages()
        values[name] = {
            "draft": list(map(int, draft)),
            "asked for": [most for _, most in fixed.asked],
            "a tuple": isinstance(draft, tuple),
            "pages": len(request.pages),
            "its pages first": request.pages[: len(before)] == before,
            "free pages": scheduler.allocator.num_free,
            "evicted": shelf.evicted,
            "output": list(map(int, request.output_ids)) == [10_000 + place for place in range(room.outputs)],
            "computed": int(request.num_computed_tokens),
        }
    return values


def draft_spec(seed: int) -> Values:
    """Take token after token while there is a slot for it; a page is taken when it is needed and free."""
    values = Values()
    for name, room in rooms(seed).items():
        known = room.prompt + room.outputs
        pages = held = touched(known, room.page_size)
        most = min(room.most, room.most_new - room.outputs - 1)
        draft: list[int] = []
        for token_id in room.ids:
            # The token that is sampled anyway comes after the draft.
            is_last = len(draft) >= room.most or room.outputs + len(draft) + 1 >= room.most_new
            if is_last or not 0 <= token_id < VOCABULARY:
                break
            if touched(known + len(draft) + 1, room.page_size) > pages:
                if pages == held + room.free:
                    break
                pages += 1
            draft.append(token_id)
        values[name] = {
            "draft": draft,
            "asked for": [most] if most > 0 else [],
            "a tuple": True,
            "pages": pages,
            "its pages first": True,
            "free pages": held + room.free - pages,
            "evicted": 0,
            "output": True,
            "computed": known - 1,
        }
    return values


REGISTRY.add(
    "L10.C.draft",
    "A draft ends before an id that no token has, before the last token that the request may have, and where no free "
    "page is left: nothing is evicted for it.",
    draft_probe,
    bitwise(draft_spec),
)


def drafters_probe(seed: int) -> Values:
    """Ask for drafts of three requests in turn as they grow; two have one name."""
    values = Values()
    scheduler = build_scheduler(Rules(200))
    made: list[Fixed] = []

    def make() -> Fixed:
        made.append(Fixed([100 * len(made) + place for place in range(9)]))
        return made[-1]

    requests = [build_request(Person(name, 4, 60, state="running")) for name in ("r0", "r1", "r0")]
    with keen():
        drafting = build_drafting(scheduler, make)
        for step in range(3):
            for index, request in enumerate(requests):
                request.pages = request.pages or scheduler.allocator.allocate(request.num_tokens)
                draft = drafting.draft(request, 3)
                values[f"step {step}, request {index}"] = list(map(int, draft))
                request.output_ids.append(7)
    values["drafters"] = len(made)
    values["asked"] = [drafter.asked for drafter in made]
    return values


def drafters_spec(seed: int) -> Values:
    """Each request has one drafter of its own, to its end."""
    values = Values()
    for step in range(3):
        for index in range(3):
            values[f"step {step}, request {index}"] = [100 * index + place for place in range(3)]
    values["drafters"] = 3
    values["asked"] = [[[4 + step, 3] for step in range(3)]] * 3
    return values


REGISTRY.add(
    "L10.C.drafters",
    "Every request has one drafter of its own from its first draft to its last; a new request of an old name has "
    "another.",
    drafters_probe,
    bitwise(drafters_spec),
)

# give_back ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class After:
    """A request after a step with drafts: tokens, what is computed, pages that it holds, its draft, how it is."""

    known: int
    computed: int
    pages: int
    draft: int
    state: str = "running"


AFTERS: dict[str, tuple[After, ...]] = {
    "nothing came": (After(10, 9, 5, 6),),
    "all came": (After(17, 16, 4, 6),),
    "the newest token begins a page": (After(9, 8, 4, 5),),
    "computed up to the end of a page": (After(13, 12, 4, 3),),
    "one has no draft and all of its pages": (After(10, 9, 5, 6), After(12, 4, 3, 0)),
    "a prompt that is computed in pieces": (After(30, 8, 8, 0), After(6, 5, 4, 7)),
    "one has ended": (After(10, 9, 0, 6, "finished"), After(6, 5, 4, 7)),
    "all have ended": (After(10, 9, 0, 6, "finished"), After(7, 6, 0, 2, "finished")),
    "there is nothing to give": (After(10, 9, 3, 2),),
    "no chunk": (),
}


def back_probe(seed: int) -> Values:
    """Give back after every step, twice: the second time nothing is left to give."""
    from mini_engine.scheduler.request import RequestState
    from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk

    values = Values()
    for name, afters in back_cases(seed).items():
        scheduler = build_scheduler(Rules(90, 4))
        chunks, firsts = [], []
        for index, after in enumerate(afters):
            request = build_request(Person(f"r{index}", 1, 90, index, after.known - 1, after.computed))
            request.state = RequestState(after.state)
            request.pages = scheduler.allocator.allocate(after.pages)
            firsts.append(list(request.pages))
            chunks.append(ScheduledChunk(request, 0, 1, bool(after.draft), draft=tuple(range(after.draft))))
            scheduler.running += [request] if after.state == "running" else []
        drafting = build_drafting(scheduler, lambda: Fixed([]))
        told = []
        for _ in range(2):
            drafting.give_back(ScheduledBatch(chunks, []))
            scheduler.check_pages()
            kept = [chunk.request.pages for chunk in chunks]
            told.append(
                {
                    "pages": [len(pages) for pages in kept],
                    "the first ones": [pages == own[: len(pages)] for pages, own in zip(kept, firsts, strict=True)],
                    "free pages": scheduler.allocator.num_free,
                }
            )
        values[name] = told
    return values


def back_cases(seed: int) -> dict[str, tuple[After, ...]]:
    """Return the cases above and drawn ones."""
    found = dict(AFTERS)
    for number in range(STATES // 2):
        rng = random.Random(f"back {seed} {number}")
        afters = []
        for _ in range(rng.randint(1, 5)):
            computed = rng.randint(1, 20)
            draft = rng.choice([0, rng.randint(1, 9)])
            afters.append(After(computed + 1, computed, (computed + draft) // 4 + 1, draft))
        found[f"step {number}"] = tuple(afters)
    return found


def back_spec(seed: int) -> Values:
    """Keep the pages that computed tokens lie on; who has no draft keeps all."""
    values = Values()
    for name, afters in back_cases(seed).items():
        kept = [
            min(after.pages, touched(after.computed, 4)) if after.draft and after.state == "running" else after.pages
            for after in afters
        ]
        values[name] = [{"pages": kept, "the first ones": [True] * len(kept), "free pages": 90 - sum(kept)}] * 2
    return values


REGISTRY.add(
    "L10.C.back",
    "After the step a request with a draft keeps the pages of what is computed and gives the others back; one without "
    "a draft keeps all of its pages.",
    back_probe,
    bitwise(back_spec),
)
