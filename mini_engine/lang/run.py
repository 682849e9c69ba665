"""Programs: a function that writes on a state, run once or many times on one backend."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from tqdm import tqdm

from mini_engine.lang.backends import ALWAYS_SHARE, Backend, InProcess
from mini_engine.lang.context import Settings
from mini_engine.lang.expressions import SAMPLING
from mini_engine.lang.hub import Hub
from mini_engine.lang.state import State
from mini_engine.llm import LLM

HUBS: WeakKeyDictionary[Any, Hub] = WeakKeyDictionary()  # of every backend or LLM that ran a program
SETTINGS = tuple(each.name for each in fields(Settings) if each.name != "defaults")


def hub_of(backend: LLM | Backend | None) -> Hub:
    """Return the hub of a backend, of an ``LLM``, or of the embedded model."""
    key = embedded() if backend is None else backend
    if key not in HUBS:
        HUBS[key] = Hub(InProcess(key) if isinstance(key, LLM) else key)
    return HUBS[key]


@cache
def embedded() -> LLM:
    """Return the embedded model with a prefix cache, loaded once."""
    return LLM(**ALWAYS_SHARE)


class Program:
    """A function whose first argument is a state. ``run`` and ``run_batch`` call it.

    Both take ``backend`` (an ``LLM``, an ``Endpoint``, or ``None`` for the embedded model), any field of
    ``SamplingParams`` as a default for all gens, and these settings. ``canonical``: encode the text as a whole before
    each call. ``think``: let a model that can think do so in turns of the assistant. ``num_api_spec_tokens``: calls
    have no stop string and at least so many tokens, and later gens are cut from them; ``None`` is off.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        """Wrap ``function``. Raises ``ValueError`` for a parameter that has the name of an option."""
        names = [*inspect.signature(function).parameters]
        taken = [name for name in names[1:] if name in (*SAMPLING, *SETTINGS, "backend")]
        if not names or taken:
            raise ValueError(
                f"the parameter {taken[0]!r} of a program is an option of its run; give it another name"
                if taken
                else "a program takes the state as its first parameter; add one"
            )
        self.function = function
        self.__doc__ = function.__doc__

    def run(self, *args: Any, backend: LLM | Backend | None = None, **options: Any) -> State:
        """Run the program to its end and return its state. Raises what a call raised, in forks too."""
        hub = hub_of(backend)
        with hub.lock:
            state, kwargs = self.prepare(hub, options)
            self.write(state, *args, **kwargs)
        return state

    def start(self, *args: Any, backend: LLM | Backend | None = None, **options: Any) -> State:
        """Begin the program and return its state at once; reading it, or ``state.stream(name)``, goes on with it."""
        hub = hub_of(backend)
        state, kwargs = self.prepare(hub, options)
        hub.start(partial(self.attempt, state, *args, **kwargs))
        return state

    def run_batch(
        self,
        inputs: Sequence[Mapping[str, Any]],
        *,
        num_workers: int = 64,
        progress: bool = False,
        backend: LLM | Backend | None = None,
        **options: Any,
    ) -> list[State]:
        """Run the program for every one of ``inputs``, its keyword arguments, and return the states in this order.

        At most ``num_workers`` are under way at a time. A program that fails does not stop the others: its state has
        ``error``, and reading from it raises that. Raises ``ValueError`` for fewer than 1 worker.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; at least 1 program is under way")
        hub = hub_of(backend)
        states = list[State]()
        running = list[State]()

        def wait(most: int) -> None:
            hub.wait(lambda: sum(not state.has_ended for state in running) <= most)
            running[:] = [state for state in running if not state.has_ended]
            bar.update(len(states) - len(running) - bar.n)

        with hub.lock, tqdm(total=len(inputs), disable=not progress, unit="program") as bar:
            try:
                for given in inputs:
                    wait(num_workers - 1)
                    states.append(self.prepare(hub, options)[0])
                    running.append(states[-1])
                    hub.start(partial(self.attempt, states[-1], **given))
                wait(0)
            finally:
                for state in running:
                    state.give_up(RuntimeError("the batch was stopped"))
        return states

    async def run_async(self, *args: Any, **options: Any) -> State:
        """Do what ``run`` does, in another thread. Runs of one backend wait for each other; batches share steps."""
        return await asyncio.to_thread(self.run, *args, **options)

    async def run_batch_async(self, inputs: Sequence[Mapping[str, Any]], **options: Any) -> list[State]:
        """Do what ``run_batch`` does in another thread."""
        return await asyncio.to_thread(self.run_batch, inputs, **options)

    def prepare(self, hub: Hub, options: dict[str, Any]) -> tuple[State, dict[str, Any]]:
        """Return a new state, and those of ``options`` that are the program's own."""
        defaults = {name: value for name, value in options.items() if name in SAMPLING}
        settings = Settings(defaults, **{name: options[name] for name in SETTINGS if name in options})
        own = {name: value for name, value in options.items() if name not in (*SAMPLING, *SETTINGS)}
        return State(hub, settings), own

    def write(self, state: State, *args: Any, **kwargs: Any) -> None:
        """Call the function and wait for all that it has appended. Raises what it raises. Mutates ``state``."""
        try:
            self.function(state, *args, **kwargs)
            state.settle_all()
        except BaseException as error:
            state.error = error if isinstance(error, Exception) else RuntimeError(f"stopped by {error!r}")
            state.give_up(state.error)
            raise
        finally:
            state.has_ended = True

    def attempt(self, state: State, *args: Any, **kwargs: Any) -> None:
        """Do the same, and leave an error to ``state.error``. Mutates ``state``."""
        try:
            self.write(state, *args, **kwargs)
        except Exception:
            assert state.error is not None, "a state that fails knows why"


program = Program
