"""The checks of single decisions: what a request starts from and leaves behind (L6.H), and who waits (L6.I).

Owns: requests that are put into a state by hand, and a prefix cache of these checks: they need none of the candidate's
tree. Whole runs are in ``h_life.py`` and ``h_engine.py``. No model.
"""

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from smoke.checks.l6.spec_prefixes import Entry, Name, Prefixes
from smoke.framework.check import Probe, Registry, Values
from smoke.framework.compare import Expected, bitwise

REGISTRY = Registry()


class Store:
    """A prefix cache over a dict, with hits of the candidate's kind. A page's node has the page's number."""

    def __init__(self, page_size: int) -> None:
        """Start empty; ``asked`` notes what was looked for."""
        from mini_engine.scheduler.prefix_cache import PrefixHit

        self.prefixes = Prefixes(page_size)
        self.hit_type = PrefixHit
        self.asked: list[list[Any]] = []
        self.most: int | None = None  # pages of one insert

    def hit(self, names: Sequence[Name]) -> Any:
        """Return names as a hit."""
        pages = tuple(self.prefixes.pages(names))
        return self.hit_type(pages, pages)

    def names(self, hit: Any) -> list[Name]:
        """Return a hit as names."""
        return [name for page in hit.pages for name, entry in self.prefixes.entries.items() if entry.page == page]

    def match(self, token_ids: Sequence[int], key: str | None = None) -> Any:
        """Look up."""
        self.asked.append([list(token_ids), key])
        return self.hit(self.prefixes.match(token_ids, key))

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], key: str | None = None, priority: int = 0) -> Any:
        """Take pages over, no more than ``most``."""
        tokens = token_ids if self.most is None else token_ids[: self.most * self.prefixes.page_size]
        return self.hit(self.prefixes.insert(tokens, pages, key, priority))

    def lock(self, hit: Any) -> int:
        """Protect a hit."""
        return self.prefixes.lock(self.names(hit))

    def unlock(self, hit: Any) -> None:
        """Undo one lock."""
        self.prefixes.unlock(self.names(hit))


@dataclass
class Asker:
    """A request in plain numbers. ``pages`` of its own follow those of its ``hit``, a number of pages."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    computed: int = 0
    hit: int = 0
    pages: list[int] = field(default_factory=list)
    key: str | None = None
    priority: int = 0
    prompt_logprobs: int | None = None
    reports_from: int = 0
    state: str = "running"

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output]


def build(asker: Asker, name: str = "r0", siblings: Sequence[Any] = ()) -> Any:
    """Build the candidate's request, with its own pages alone."""
    from mini_engine.sampler.params import SamplingParams
    from mini_engine.scheduler.request import Request, RequestOptions, RequestState

    return Request(
        name,
        list(asker.prompt),
        SamplingParams(max_new_tokens=50, prompt_logprobs=asker.prompt_logprobs),
        output_ids=list(asker.output),
        state=RequestState(asker.state),
        pages=list(asker.pages),
        siblings=siblings,
        num_computed_tokens=asker.computed,
        options=RequestOptions(asker.key, asker.priority, asker.reports_from),
    )


# What it starts from ------------------------------------------------------------------------------------------------

LONG = list(range(100, 124))  # six pages of 4
STORED: tuple[tuple[list[int], list[int], str | None], ...] = (
    (LONG, [40, 43, 41, 45, 42, 44], None),
    ([*LONG[:8], 7, 7, 7, 7], [0, 0, 50], None),
    (LONG[:12], [60, 61, 62], "tenant"),
)
LOOKERS: dict[str, Asker] = {
    "all of it is cached": Asker(LONG),
    "all but its last token": Asker([*LONG, 5]),
    "a prompt that ends with a page": Asker(LONG[:8]),
    "one token after a page": Asker(LONG[:9]),
    "a page less one token": Asker(LONG[:3]),
    "exactly one page": Asker(LONG[:4]),
    "one token": Asker(LONG[:1]),
    "something else": Asker([1, 2, 3, 4, 5, 6]),
    "another key": Asker(LONG, key="tenant"),
    "a key that no request has": Asker(LONG, key="somebody"),
    "a key that is the empty string": Asker(LONG, key=""),
    "back from a preemption": Asker(LONG[:10], LONG[10:15], state="preempted"),
    "back, and its output ends with a page": Asker(LONG[:10], LONG[10:16], state="preempted"),
    "back, and its output went another way": Asker(LONG[:8], [7, 7, 7, 7, 7], state="preempted"),
}
REPORTERS: dict[str, Asker] = {
    "it reports its prompt": Asker(LONG, prompt_logprobs=3),
    "it reports the chosen tokens of its prompt alone": Asker(LONG, prompt_logprobs=0),
    "it reports its prompt, back from a preemption": Asker(LONG[:10], LONG[10:15], prompt_logprobs=1),
    "it reports from token 1 on": Asker(LONG, prompt_logprobs=1, reports_from=1),
    "it reports from token 2 on": Asker(LONG, prompt_logprobs=1, reports_from=2),  # token 0 is looked up
    "it reports from the last token of a page on": Asker(LONG, prompt_logprobs=1, reports_from=11),
    "it reports from the first token of a page on": Asker(LONG, prompt_logprobs=1, reports_from=12),
    "it reports from the second token of a page on": Asker(LONG, prompt_logprobs=0, reports_from=13),
    "it reports the last token of its prompt": Asker(LONG, prompt_logprobs=1, reports_from=23),
    "it reports from beyond its end on": Asker(LONG, prompt_logprobs=1, reports_from=90),
    "it reports from a token on, under a key": Asker(LONG, prompt_logprobs=1, reports_from=14, key="tenant"),
}


def stored(page_size: int = 4) -> Any:
    """Return a store with three prompts in it."""
    store = Store(page_size)
    for tokens, pages, key in STORED:
        store.prefixes.insert(tokens, pages, key, 0)
    return store


def match_probe(people: Mapping[str, Asker]) -> Probe:
    """Return a probe that looks every request up."""

    def probe(seed: int) -> Values:
        from mini_engine.scheduler.sharing import match_prefix

        values: Values = {}
        for name, asker in people.items():
            store = stored()
            request = build(asker)
            hit = match_prefix(request, store)
            values[name] = {
                "pages": list(hit.pages),
                "path": list(hit.path),
                "asked under": [key for tokens, key in store.asked if tokens or asker.prompt_logprobs is not None],
                "the request": [len(request.pages), len(request.hit.pages), request.num_computed_tokens],
            }
        return values

    return probe


def match_spec(people: Mapping[str, Asker]) -> Expected:
    """Return a spec that takes a page if all of its tokens are cached and one token at least comes after it.

    In a report that begins later, this is the token before the first one that is reported.
    """

    def spec(seed: int) -> Values:
        values: Values = {}
        for name, asker in people.items():
            pages: list[int] = []
            reports = asker.prompt_logprobs is not None and asker.reports_from <= 1
            most = min(asker.reports_from, len(asker.tokens)) if asker.reports_from else len(asker.tokens)
            for end in range(4, most, 4):
                entry = stored().prefixes.entries.get((asker.key, tuple(asker.tokens[:end])))
                if entry is None or reports:
                    break
                pages.append(entry.page)
            asked = [] if reports or most == 1 else [asker.key]  # nothing need not be looked up
            values[name] = {"pages": pages, "path": pages, "asked under": asked, "the request": [0, 0, 0]}
        return values

    return spec


REGISTRY.add(
    "L6.H.match",
    "A request finds the whole pages that are cached under its own key, and keeps at least one token to compute.",
    match_probe(LOOKERS),
    bitwise(match_spec(LOOKERS)),
)
REGISTRY.add(
    "L6.H.reports",
    "A request that reports on its prompt finds only what comes before the rows that it needs.",
    match_probe(REPORTERS),
    bitwise(match_spec(REPORTERS)),
)

# What it leaves there -----------------------------------------------------------------------------------------------

OWN = [9, 3, 8, 2, 7, 1, 6]  # pages of its own
SHARERS: dict[str, Asker] = {
    "nothing computed": Asker([1, 2, 3, 4, 5], pages=OWN[:2]),
    "less than a page": Asker([1, 2, 3, 4, 5], computed=3, pages=OWN[:2]),
    "one page and a token more": Asker([1, 2, 3, 4, 5], [6], computed=5, pages=OWN[:2]),
    "all pages are new": Asker([*range(1, 13)], [20], computed=12, pages=OWN[:4]),
    "the newest token would fill the page": Asker([*range(1, 8)], [20], computed=7, pages=OWN[:2]),
    "a chunk in the middle of the prompt": Asker([*range(1, 20)], computed=10, pages=OWN[:5]),
    "output, too": Asker([1, 2, 3], [4, 5, 6, 7, 8, 9, 10], computed=9, pages=OWN[:3]),
    "all of it is there already": Asker(LONG, [5], computed=24, pages=OWN[:7]),
    "the beginning is there already": Asker([*LONG[:10], *range(1, 9)], [5], computed=18, pages=OWN[:5]),
    "it differs in the first page": Asker([*LONG[:3], *range(1, 9)], [5], computed=11, pages=OWN[:3]),
    "it started from a hit": Asker([*LONG[:8], *range(1, 9)], [5], computed=16, hit=2, pages=OWN[:3]),
    "it started from a hit, and others computed the rest": Asker(LONG, [5], computed=24, hit=2, pages=OWN[:5]),
    "it started from a hit, the rest is partly there": Asker(
        [*LONG[:16], *range(1, 9)], [5], computed=24, hit=1, pages=OWN[:6]
    ),
    "it started from a hit and has computed less than a page": Asker(
        [*LONG[:8], 1, 2, 3], computed=11, hit=2, pages=OWN[:1]
    ),
    "another key": Asker(LONG[:12], [5], computed=12, pages=OWN[:4], key="somebody"),
    "another key with a beginning": Asker(LONG[:16], [5], computed=16, pages=OWN[:5], key="tenant"),
    "a priority": Asker([*LONG[:8], *range(1, 9)], [5], computed=16, pages=OWN[:5], priority=3),
    "it reports its prompt": Asker(LONG, [5], computed=24, pages=OWN[:7], prompt_logprobs=0),
}

MOST = (None, 0, 1, 3)  # pages that the cache takes at once


def share_probe(seed: int) -> Values:
    """Share what is computed, twice; also with a cache that takes nothing, or less than it is given."""
    from mini_engine.scheduler.sharing import share_pages

    values: Values = {}
    for name, asker in SHARERS.items():
        for most in MOST:
            store = stored()
            request = build(asker)
            request.hit = store.match(asker.tokens[: 4 * asker.hit], asker.key)
            store.lock(request.hit)
            request.pages = [*request.hit.pages, *request.pages]
            store.most = most
            results = []
            for _ in range(2):
                duplicates = share_pages(request, store, 4)
                results.append(left_by(request, store, sorted(duplicates)))
            values[f"{name}, the cache takes {'all' if most is None else most} of its pages"] = results
    return values


def left_by(request: Any, store: Store, duplicates: list[int]) -> Values:
    """Return what a request has and what the store holds."""
    return {
        "to be freed": duplicates,
        "pages": list(request.pages),
        "hit": list(request.hit.pages),
        "computed": request.num_computed_tokens,
        "cached": sorted(
            [str(key), len(tokens), e.page, e.locks, e.priority] for (key, tokens), e in store.prefixes.entries.items()
        ),
    }


def share_spec(seed: int) -> Values:
    """Go through the pages one by one: not whole, not computed, of the hit, a duplicate or new."""
    values: Values = {}
    for name, asker in SHARERS.items():
        for most in MOST:
            entries = deepcopy(stored().prefixes.entries)
            names: list[Name] = [(asker.key, tuple(asker.tokens[:end])) for end in range(4, len(asker.tokens) + 1, 4)]
            pages = [*(entries[name].page for name in names[: asker.hit]), *asker.pages]
            taken = []
            freed = []
            for place, name_ in enumerate(names[: asker.computed // 4][:most]):
                entries.setdefault(name_, Entry(pages[place], 0, 0))
                entries[name_].priority = max(entries[name_].priority, asker.priority)
                if entries[name_].page != pages[place]:
                    freed.append(pages[place])
                    pages[place] = entries[name_].page
                taken.append(pages[place])
            taken = max(pages[: asker.hit], taken, key=len)
            for name_ in names[: len(taken)]:
                entries[name_].locks = 1
            rows = [[str(key), len(tokens), e.page, e.locks, e.priority] for (key, tokens), e in entries.items()]
            once = {"pages": pages, "hit": taken, "computed": asker.computed, "cached": sorted(rows)}
            values[f"{name}, the cache takes {'all' if most is None else most} of its pages"] = [
                {"to be freed": sorted(freed), **once},
                {"to be freed": [], **once},
            ]
    return values


REGISTRY.add(
    "L6.H.share",
    "Exactly the whole pages whose keys and values are written are shared; duplicates are freed and the cache's pages "
    "stand in their place; all of them are locked once. The second time nothing changes.",
    share_probe,
    bitwise(share_spec),
)

# L6.I ---------------------------------------------------------------------------------------------------------------

THRESHOLDS = (
    (None, 32),
    (0, 32),
    (1, 0),
    (1, 32),
    (1, 200),
    (3, 32),
    (8, 0),
    (8, 4),
    (8, 32),
    (9, 8),
    (13, 32),
    (24, 32),
    (25, 32),
)


@dataclass(frozen=True)
class Meeting:
    """Who asks, how many pages it has found, who runs, its siblings, and the page size."""

    asks: Asker
    found: int = 0
    runs: tuple[Asker, ...] = ()
    siblings: tuple[Asker, ...] = ()
    page_size: int = 4


WAITS = Asker(LONG, state="waiting")
COMPUTES = Asker([*LONG[:16], 1, 2, 3], computed=4)
MEETINGS: dict[str, dict[str, Meeting]] = {
    "enough": {
        "no request runs": Meeting(WAITS),
        "a page of 130 and 69 tokens in common, one page found": Meeting(
            Asker([7] * 300, state="waiting"), 1, (Asker([7] * 199),), page_size=130
        ),
        "16 tokens in common": Meeting(WAITS, 0, (COMPUTES,)),
        "16 tokens in common, 1 page found": Meeting(WAITS, 1, (COMPUTES,)),
        "16 tokens in common, 2 pages found": Meeting(WAITS, 2, (COMPUTES,)),
        "16 tokens in common, 3 pages found": Meeting(WAITS, 3, (COMPUTES,)),
        "part of a page in common": Meeting(WAITS, 0, (Asker([*LONG[:3], 1, 2], computed=1),)),
        "2 pages and part of a third in common": Meeting(WAITS, 0, (Asker([*LONG[:11], 1, 2], computed=1),)),
        "2 pages and part of a third, 2 pages found": Meeting(WAITS, 2, (Asker([*LONG[:11], 1, 2], computed=8),)),
        "one token is left": Meeting(Asker([*LONG[:16], 5], state="waiting"), 0, (COMPUTES,)),
        "no token would be left": Meeting(Asker(LONG[:16], state="waiting"), 0, (COMPUTES,)),
        "no token would be left, but it has output": Meeting(Asker(LONG[:16], [9], state="preempted"), 0, (COMPUTES,)),
        "all 24 in common": Meeting(WAITS, 0, (Asker([*LONG, 1], computed=1),)),
        "the very same prompt": Meeting(WAITS, 0, (Asker(LONG, computed=1),)),
        "the very same prompt, 4 pages found": Meeting(WAITS, 4, (Asker(LONG, computed=16),)),
        "8 tokens in common": Meeting(WAITS, 0, (Asker([*LONG[:8], 1], computed=0),)),
        "7 tokens in common": Meeting(WAITS, 0, (Asker([*LONG[:7], 1, 2, 3], computed=0),)),
        "the first page differs, the rest is the same": Meeting(WAITS, 0, (Asker([0, *LONG[1:]], computed=0),)),
        "a page that was found differs in the other": Meeting(WAITS, 1, (Asker([0, *LONG[1:]], computed=0),)),
        "a short prompt that is the beginning": Meeting(WAITS, 0, (Asker(LONG[:6]),)),
        "two whole pages that are the beginning": Meeting(WAITS, 0, (Asker(LONG[:8]),)),
        "who asks is short": Meeting(Asker(LONG[:6], state="waiting"), 0, (COMPUTES,)),
        "who asks has exactly 8": Meeting(Asker(LONG[:8], state="waiting"), 0, (COMPUTES,)),
        "it decodes already": Meeting(WAITS, 0, (Asker(LONG, [4], computed=24),)),
        "its last prompt token is left": Meeting(WAITS, 0, (Asker(LONG, computed=23),)),
        "it is back, and computes its prompt again": Meeting(WAITS, 0, (Asker(LONG, [4, 5], computed=8),)),
        "it is back, and computes its output again": Meeting(WAITS, 0, (Asker(LONG, [4, 5, 6], computed=25),)),
        "what is in common is its output": Meeting(
            Asker(LONG[:4], LONG[4:], state="preempted"), 0, (Asker(LONG, computed=0),)
        ),
        "the second of three": Meeting(WAITS, 0, (Asker([1, 2]), COMPUTES, Asker(LONG, [5], computed=24))),
    },
    "whose": {
        "another key": Meeting(WAITS, 0, (Asker(LONG, key="tenant"),)),
        "no key and the empty string": Meeting(WAITS, 0, (Asker(LONG, key=""),)),
        "the same key": Meeting(Asker(LONG, key="tenant", state="waiting"), 0, (Asker(LONG, key="tenant"),)),
        "it reports its prompt": Meeting(Asker(LONG, prompt_logprobs=0, state="waiting"), 0, (COMPUTES,)),
        "the other reports its prompt": Meeting(WAITS, 0, (Asker(LONG, prompt_logprobs=0),)),
    },
    "siblings": {
        "a sibling computes": Meeting(WAITS, 0, (), (Asker(LONG, computed=5),)),
        "a sibling computes, and all was found": Meeting(WAITS, 5, (), (Asker(LONG, computed=20),)),
        "one sibling computes, another one has the whole prompt": Meeting(
            WAITS, 0, (), (Asker(LONG, computed=9), Asker(LONG, [4], computed=24))
        ),
        "a sibling has the whole prompt, and a stranger computes": Meeting(
            WAITS, 0, (COMPUTES,), (Asker(LONG, [4], computed=24),)
        ),
        "a sibling waits, and a stranger computes": Meeting(WAITS, 0, (COMPUTES,), (WAITS,)),
        "two siblings compute": Meeting(WAITS, 0, (), (Asker(LONG, computed=9), Asker(LONG, computed=3))),
        "a sibling decodes": Meeting(WAITS, 0, (), (Asker(LONG, [4], computed=24),)),
        "a sibling waits": Meeting(WAITS, 0, (), (WAITS,)),
        "a sibling was preempted": Meeting(WAITS, 0, (), (Asker(LONG, [4], state="preempted"),)),
        "a sibling of one that reports its prompt computes": Meeting(
            Asker(LONG, prompt_logprobs=2, state="waiting"), 0, (), (Asker(LONG, prompt_logprobs=2, computed=3),)
        ),
        "the second sibling computes": Meeting(WAITS, 0, (), (WAITS, Asker(LONG, computed=9))),
    },
}


def meetings(group: str, seed: int) -> dict[str, Meeting]:
    """Return the meetings of a group; to those about how much is enough, 30 are added that are drawn."""
    if group != "enough":
        return MEETINGS[group]
    rng = random.Random(f"meetings {seed}")
    drawn = {}
    for index in range(30):
        length, shared = rng.randint(5, 24), rng.randint(0, 24)
        other = [*LONG[:shared], *[1] * rng.randint(1, 6)]
        asks = Asker(LONG[:length], state="waiting")
        runs = (Asker(other, computed=rng.randrange(len(other))), Asker([7] * rng.randint(1, 9)))
        drawn[f"drawn meeting {index}"] = Meeting(asks, rng.randrange(length // 4 + 1), runs)
    return MEETINGS[group] | drawn


def meet_probe(group: str) -> Probe:
    """Return a probe that asks in every meeting of a group, with all thresholds."""

    def probe(seed: int) -> Values:
        from mini_engine.scheduler.prefix_cache import PrefixHit
        from mini_engine.scheduler.sharing import SharingLimits, could_share_soon

        values: Values = {}
        for name, meeting in meetings(group, seed).items():
            for least, below in THRESHOLDS:
                siblings: list[Any] = []
                request = build(meeting.asks, "r0", siblings)
                siblings += [build(other, f"s{index}", siblings) for index, other in enumerate(meeting.siblings)]
                siblings += [request] if meeting.siblings else []
                running = [build(other, f"r{index}") for index, other in enumerate(meeting.runs, 1)]
                running += [other for other in siblings if other.state.value == "running"]
                pages = tuple(range(meeting.found))
                limits = SharingLimits(least, below)
                results = could_share_soon(request, PrefixHit(pages, pages), running, meeting.page_size, limits)
                values[meeting_name(name, least, below)] = bool(results)
        return values

    return probe


def meet_spec(group: str) -> Expected:
    """Return a spec that counts the tokens that both prompts begin with, and of them the whole pages."""

    def spec(seed: int) -> Values:
        values: Values = {}
        for name, meeting in meetings(group, seed).items():
            for least, below in THRESHOLDS:
                siblings = [sibling for sibling in meeting.siblings if sibling.state == "running"]
                waits = bool(siblings) and all(is_computing(sibling) for sibling in siblings)
                size = meeting.page_size
                found = size * meeting.found
                asks = meeting.asks
                if least is not None and found <= below and asks.prompt_logprobs is None and not siblings:
                    for other in meeting.runs:
                        passed_on = min(common(asks.prompt, other.prompt), len(asks.tokens) - 1) // size * size
                        waits = waits or (passed_on - found >= least and asks.key == other.key and is_computing(other))
                values[meeting_name(name, least, below)] = waits
        return values

    return spec


def meeting_name(name: str, least: int | None, below: int) -> str:
    """Name a case."""
    return f"{name}, wait_for_prefix={least}, wait_below_match={below}"


def is_computing(asker: Asker) -> bool:
    """Whether it runs with a part of its prompt to compute."""
    return asker.state == "running" and asker.computed < len(asker.prompt)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that both begin with."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


REGISTRY.add(
    "L6.I.enough",
    "A request waits exactly if a running request computes enough whole pages of what both prompts begin with, beyond "
    "what it has found in the cache, and it has not found much; one token at least is left for itself.",
    meet_probe("enough"),
    bitwise(meet_spec("enough")),
)
REGISTRY.add(
    "L6.I.whose",
    "It does not wait for a request of another key. One that reports on its prompt waits for siblings "
    "only; others wait for it.",
    meet_probe("whose"),
    bitwise(meet_spec("whose")),
)
REGISTRY.add(
    "L6.I.siblings",
    "It waits while every sibling that runs computes their prompt, whatever the thresholds are: one that has all of it "
    "is copied from at once.",
    meet_probe("siblings"),
    bitwise(meet_spec("siblings")),
)
