"""The state of a program: a context, and a queue of what is still to be appended to it; forks and joins."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mini_engine.lang.choices import choose
from mini_engine.lang.context import Answer, Context, Settings
from mini_engine.lang.expressions import Constant, Expression, Gen, Select, Turn, parts
from mini_engine.lang.hub import Hub, Work
from mini_engine.lang.speculate import generate
from mini_engine.prompts import encode_text


@dataclass(frozen=True)
class Mark:
    """The beginning or the end of a turn."""

    role: str
    is_end: bool = False


@dataclass(frozen=True)
class Fork:
    """Here the forks begin."""

    forks: list["State"]


@dataclass(frozen=True)
class Join:
    """Here the values of the forks are needed."""

    forks: list["State"]
    appends: bool


Operation = Expression | Mark | Fork | Join


class State(Context):
    """What a program writes on. ``state += piece`` appends; ``state["name"]`` waits for a value."""

    def __init__(self, hub: Hub, settings: Settings, parent: "State | None" = None) -> None:
        """Begin empty; a fork begins when its parent has come to it."""
        super().__init__(hub, settings)
        self.parent = parent
        self.coming: Counter[str | None] = Counter()  # names that the queue will set; None: a join, which sets any
        self.queue: deque[Operation] = deque()
        self.forks: list[State] = []
        self.forked_at = (0, 0)  # ids and characters
        self.num_turns = 0
        self.error: Exception | None = None
        self.is_started = parent is None
        self.is_working = self.is_joined = self.has_ended = False

    # ---- what a program uses ----

    def __iadd__(self, piece: Expression | str) -> "State":
        """Append a piece; nothing waits. Raises ``ValueError`` for what is none, and for a fork that was joined."""
        operations: list[Operation] = []
        for part in parts(piece):
            if isinstance(part, Turn):
                operations += [Mark(part.role), *part.body, Mark(part.role, is_end=True)]
            else:
                operations.append(part)
        self.append(operations)
        return self

    def __getitem__(self, name: str) -> Any:
        """Wait for a variable and return its value.

        Raises what its call raised, ``KeyError`` for a name that nothing sets.
        """
        return self.answer(name).value

    def answer(self, name: str) -> Answer:
        """Wait for a variable and return it with its scores and its output. Raises what ``state[name]`` raises."""
        self.hub.wait(partial(self.has, name))
        if self.is_settled(name) and name in self.variables:
            return self.variables[name]
        if self.error is not None:
            raise self.error
        raise KeyError(f"nothing sets {name!r}; there are {', '.join(self.variables) or 'no variables'}")

    def stream(self, name: str) -> Iterator[str]:
        """Yield the text of a gen as it comes. Raises what ``state[name]`` raises.

        From an endpoint, and with ``num_api_spec_tokens``, it comes whole.
        """
        shown = 0
        while not self.has(name):
            text = self.text_of(name)
            yield text[shown:]
            shown = max(shown, len(text))
            self.hub.wait(partial(self.has_more, name, shown))
        answer = self.answer(name)
        if answer.output is not None and len(answer.output.text) > shown:
            yield answer.output.text[shown:]

    @property
    def text(self) -> str:
        """All text, when everything is appended. Raises what a call raised."""
        self.settle()
        return self.known_text

    @property
    def ids(self) -> list[int]:
        """The token ids of all text, when everything is appended. Raises what a call raised."""
        self.settle()
        return self.prompt()

    def fork(self, count: int = 1) -> list["State"]:
        """Return ``count`` states that go on from here, each on its own. It costs a list of ids."""
        forks = [State(self.hub, self.settings, self) for _ in range(count)]
        self.append([Fork(list(forks))])
        self.forks += forks
        return forks

    def join(self, forks: Sequence["State"], *, appends: bool = False) -> None:
        """Gather what ``forks`` have set: ``state[name]`` is a list with a value of each fork, ``None`` without one.

        A name that an earlier join gathered gets more values. ``appends``: also append what the forks have written.
        The forks end here. Raises ``ValueError`` for a state that is not a fork of this one, or was joined.
        """
        for fork in forks:
            if fork.parent is not self or fork.is_joined:
                raise ValueError("a state is joined that is not a fork of this one, or was joined before; fork again")
            fork.is_joined = True
        self.append([Join(list(forks), appends)])

    def settle(self) -> None:
        """Wait until everything is appended. Raises what a call raised."""
        self.hub.wait(lambda: self.is_idle)
        if self.error is not None:
            raise self.error

    def settle_all(self) -> None:
        """Wait for this state and all its forks. Raises what a call raised."""
        self.settle()
        for fork in self.forks:
            fork.settle_all()

    # ---- how it is carried out ----

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to append."""
        return self.error is not None or (self.is_started and not self.queue)

    def is_settled(self, name: str) -> bool:
        """Whether nothing in the queue will set this variable."""
        return not self.coming[name] and not self.coming[None]

    def has(self, name: str) -> bool:
        """Whether a variable need not be waited for any more."""
        return self.error is not None or (self.is_started and self.is_settled(name))

    def has_more(self, name: str, shown: int) -> bool:
        """Whether there is more of a variable's text than ``shown`` characters, or the whole of it."""
        return self.has(name) or len(self.text_of(name)) > shown

    def text_of(self, name: str) -> str:
        """Return what a gen has written so far, if it is carried out now and its call writes nothing ahead."""
        current = self.queue[0] if self.queue and self.settings.num_api_spec_tokens is None else None
        return self.calls[0].text if isinstance(current, Gen) and current.name == name and self.calls else ""

    def append(self, operations: list[Operation]) -> None:
        """Queue operations, and begin with them if nothing comes before. Mutates."""
        if self.is_joined:
            raise ValueError("something is appended to a fork that was joined; append to its parent, or fork again")
        self.queue += operations
        self.coming.update(names_of(operations))
        self.proceed()

    def proceed(self) -> None:
        """Carry out the queue as far as nothing must be waited for. Mutates."""
        if self.error is not None:
            self.fail(self.error)
        elif self.is_started and not self.is_working:
            self.is_working = True
            self.hub.carry_out(self.work())

    def work(self) -> Work:
        """Carry out the queue; yields what must be waited for. Mutates."""
        try:
            while self.queue:
                yield from self.carry_out(self.queue[0])
                self.coming.subtract(names_of([self.queue.popleft()]))
        except Exception as error:
            self.fail(error)
        finally:
            self.is_working = False

    def carry_out(self, operation: Operation) -> Work:
        """Carry out one operation. Mutates."""
        match operation:
            case Constant(text):
                opening = self.hub.opening if text and not self.known_ids else []
                self.extend(text, [*opening, *encode_text(self.tokenizer, text)])
            case Mark(role, is_end):
                text = self.mark(role, is_end)
                self.extend(text, encode_text(self.tokenizer, text))
            case Gen():
                yield from generate(self, operation)
            case Select():
                yield from choose(self, operation)
            case Fork(forks):
                for fork in forks:
                    fork.begin()
            case Join(forks, appends):
                yield lambda: all(fork.is_idle for fork in forks)
                open_once(self, forks)
                gather(self, forks, appends)

    def fail(self, error: Exception) -> None:
        """End here: nothing in the queue is carried out, and forks that have not begun fail as well. Mutates."""
        self.error = self.error or error
        for operation in self.queue:
            for fork in operation.forks if isinstance(operation, Fork) else ():
                fork.fail(error)
        self.queue.clear()

    def give_up(self, error: Exception) -> None:
        """Abort what is under way, here and in the forks. Mutates."""
        for call in self.calls:
            if not call.is_done:
                self.hub.backend.abort(call)
        if not self.is_idle:
            self.fail(error)
        for fork in self.forks:
            fork.give_up(error)

    def begin(self) -> None:
        """Begin as a fork: with all that the parent has now, but for a draw without a seed. Mutates."""
        assert self.parent is not None, "only a fork begins later"
        self.known_ids = list(self.parent.known_ids)
        self.known_text = self.parent.known_text
        self.variables = dict(self.parent.variables)
        ahead = self.parent.ahead
        self.ahead = ahead if ahead and ahead.is_repeatable else None
        self.num_turns = self.parent.num_turns
        self.is_started = True
        self.forked_at = (len(self.known_ids), len(self.known_text))
        self.proceed()

    def mark(self, role: str, is_end: bool) -> str:
        """Return what the chat template writes before or after a turn. Mutates. Raises ``ValueError``."""
        marks = self.hub.marks(self.settings.think)
        if not is_end:
            self.num_turns += 1
        known = marks.ends if is_end else marks.first if self.num_turns == 1 else marks.later
        if role not in known:
            place = "first" if self.num_turns == 1 else "later"
            raise ValueError(f"the chat template has no place for a {place} turn of the {role}; begin with the user")
        return known[role]


def names_of(operations: Iterable[Operation]) -> list[str | None]:
    """Return the variables that operations will set; ``None`` for a join, which may set any."""
    named = [o.name for o in operations if isinstance(o, Gen | Select) and o.name is not None]
    return [*named, *(None for o in operations if isinstance(o, Join))]


def open_once(state: State, forks: Iterable[State]) -> None:
    """Leave out the special tokens that several forks of an empty state have put before their texts. Mutates forks."""
    opening = state.hub.opening
    has_begun = bool(state.known_ids)
    for fork in forks:
        num_ids, num_characters = fork.forked_at
        if has_begun and not num_ids and fork.known_ids[: len(opening)] == opening:
            fork.forked_at = len(opening), num_characters
        has_begun = has_begun or bool(fork.known_ids)


def gather(state: State, forks: Sequence[State], appends: bool) -> None:
    """Make lists of what ``forks`` have set, and append what they have written if asked. Mutates ``state``.

    Raises what a fork's call raised, and ``ValueError`` for a name whose value here is not from a join.
    """
    for fork in forks:
        if fork.error is not None:
            raise fork.error
        if appends:
            num_ids, num_characters = fork.forked_at
            state.extend(fork.known_text[num_characters:], fork.known_ids[num_ids:])
            state.num_turns = max(state.num_turns, fork.num_turns)
    for name in dict.fromkeys(name for fork in forks for name in fork.own):
        before = state.variables[name] if name in state.own else None  # what a fork began with does not count
        if before is not None and not before.is_joined:
            raise ValueError(f"{name!r} is set here and in forks, so a join would replace it; rename one of them")
        values = [fork.variables[name].value if name in fork.own else None for fork in forks]
        state.set(name, Answer([*(before.value if before else []), *values], is_joined=True))
