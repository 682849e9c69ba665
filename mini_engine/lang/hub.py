"""The turns of everything that waits: programs that read a value, and states whose next call is not answered yet.

There are no threads. A state's work is a generator that yields what it waits for. A program of a batch is a greenlet:
where it reads a value that is not there yet, the next one goes on. When nothing can go on, the backend works.
"""

from collections.abc import Callable, Generator
from functools import cache, partial
from threading import RLock
from typing import Any

from greenlet import getcurrent, greenlet

from mini_engine.lang.backends import Backend
from mini_engine.lang.roles import read_marks
from mini_engine.prompts import opening_ids

Condition = Callable[[], Any]  # true once it need not be waited for any more
Work = Generator[Condition, None, None]


class Hub:
    """Runs the programs of one backend."""

    def __init__(self, backend: Backend) -> None:
        """Nothing waits yet."""
        self.backend = backend
        self.waiting: list[tuple[Condition, Callable[[], Any]]] = []
        self.programs: set[greenlet] = set()
        self.lock = RLock()  # held while a run or a batch lasts: one thread at a time
        self.alone: dict[tuple[int, ...], list[float]] = {}  # a choice's ids -> their values without a prompt
        self.opening = opening_ids(backend.tokenizer)
        self.marks = cache(partial(read_marks, backend.tokenizer))

    def start(self, function: Callable[[], None]) -> greenlet:
        """Let ``function`` run until it waits for something; ``turn`` goes on with it."""
        program = greenlet(function)
        self.programs.add(program)
        self.switch(program)
        return program

    def switch(self, program: greenlet) -> None:
        """Go on with a program, and come back here when it waits or ends."""
        program.parent = getcurrent()
        program.switch()
        if program.dead:
            self.programs.discard(program)

    def carry_out(self, work: Work) -> None:
        """Go on with a state's work until it waits for something or ends."""
        for condition in work:
            if not condition():
                self.waiting.append((condition, partial(self.carry_out, work)))
                return

    def wait(self, condition: Condition) -> None:
        """Return once ``condition()`` is true. Others go on meanwhile. Raises what the backend raises."""
        own = getcurrent()
        while not condition():
            if own in self.programs:
                self.waiting.append((condition, partial(self.switch, own)))
                own.parent.switch()
            else:
                self.turn()

    def turn(self) -> None:
        """Go on with everything that need not wait any more; if there is nothing, let the backend work."""
        waiting = self.waiting
        self.waiting = []
        num_ready = 0
        for condition, go_on in waiting:
            if condition():
                num_ready += 1
                go_on()
            else:
                self.waiting.append((condition, go_on))
        if not num_ready:
            self.backend.advance()
