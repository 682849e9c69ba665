"""L7: from the name of a grammar backend to the backend, and the one that chooses among them for each grammar.

A production backend is imported when it is asked for.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

from mini_engine.checks import choice
from mini_engine.grammar.base import (
    REGISTRY,
    SHALLOW,
    GrammarBackend,
    GrammarError,
    GrammarObject,
    GrammarOptions,
    TooManyStatesError,
)
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKind

BUILT_IN = {
    "fsm": "mini_engine.grammar.fsm:FsmBackend",
    "xgrammar": "mini_engine.grammar.libraries.xgrammar:XGrammarBackend",
    "llguidance": "mini_engine.grammar.libraries.llguidance:LLGuidanceBackend",
    "outlines": "mini_engine.grammar.libraries.outlines:OutlinesBackend",
}


# The order in which "auto" asks. fsm is exact, and slow for a grammar with many states; the others take more. Of the
# grammars that fsm does not have, llguidance reads an EBNF more narrowly than it is written.
IN_TURN: dict[GrammarKind, tuple[str, ...]] = {
    "json_schema": ("fsm", "llguidance", "xgrammar"),
    "regex": ("fsm", "llguidance", "xgrammar"),
    "ebnf": ("xgrammar", "llguidance"),
    "structural_tag": ("llguidance", "xgrammar"),
}
FEW_STATES = 4000  # which fsm compiles in a fraction of a second
NAMES_ANOTHER = re.compile(r"\btake (?:the backend )?(?:fsm|xgrammar|llguidance)\b")  # in the message of an error


class AutoBackend(GrammarBackend):
    """Compiles each grammar with the first backend that takes it. Its stats say which one that was."""

    name = "auto"

    def __init__(self, table: TokenTable, options: GrammarOptions | None = None) -> None:
        """Compile for the tokens of ``table``. A library that is not installed is passed over."""
        super().__init__(table, options)
        self.made: dict[tuple[str, int], GrammarBackend] = {}

    def build(self, kind: GrammarKind, text: str) -> GrammarObject:
        """Compile ``text``. Raises ``GrammarError`` with one reason if no backend takes it.

        A grammar in which ``fsm`` writes any JSON less deep than it may be is kept for the case that no library takes
        it. One with more than ``FEW_STATES`` states is tried again then, with all that the options allow.
        """
        refusals: dict[str, GrammarError] = {}
        shallow = None
        for name, options in self.turns(kind):
            if options.max_states > FEW_STATES and not isinstance(refusals.get(name), TooManyStatesError):
                continue
            backend = self.backend(name, options)
            try:
                grammar = backend.compile((kind, text))
            except GrammarError as error:
                refusals[name] = error
                continue
            grammar.stats.backend = name
            if not any(SHALLOW in note for note in grammar.stats.narrowed):
                return grammar
            shallow = shallow or grammar
        if shallow is None:
            raise one_of(refusals)
        return shallow

    def turns(self, kind: GrammarKind) -> Iterator[tuple[str, GrammarOptions]]:
        """Yield the backends that are installed in turn, each with its options; ``fsm`` comes twice."""
        few = replace(self.options, max_states=min(FEW_STATES, self.options.max_states))
        for name in IN_TURN[kind]:
            if name == "fsm" or find_spec(name) is not None:
                yield name, few
        if "fsm" in IN_TURN[kind] and few != self.options:
            yield "fsm", self.options

    def backend(self, name: str, options: GrammarOptions) -> GrammarBackend:
        """Return a backend, made when it is first needed. Mutates."""
        key = name, options.max_states
        if key not in self.made:
            self.made[key] = make_backend(name, self.table, options)
        return self.made[key]


def one_of(refusals: Mapping[str, GrammarError]) -> GrammarError:
    """Return the first error that sends to no other backend, as all have refused; else one with every reason."""
    final = [error for error in refusals.values() if not NAMES_ANOTHER.search(str(error))]
    return final[0] if final else GrammarError("; ".join(f"{name}: {error}" for name, error in refusals.items()))


def make_backend(name: str, table: TokenTable, options: GrammarOptions) -> GrammarBackend:
    """Return a backend for the tokens of ``table``; a registered one goes before a built-in one of the same name.

    Raises ``ValueError`` for an unknown name, and for a library that is not installed.
    """
    if name in REGISTRY:
        return REGISTRY[name](table, options)
    if name == "auto":
        return AutoBackend(table, options)
    choice("grammar_backend", name, BUILT_IN)
    module, kind = BUILT_IN[name].split(":")
    backend: GrammarBackend = getattr(import_module(module), kind)(table, options)
    return backend
