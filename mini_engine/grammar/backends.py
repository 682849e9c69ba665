"""L7: from the name of a grammar backend to the backend, and the one that chooses among them for each grammar.

Owns: the names, and ``AutoBackend``. Must not know: what the backends do. A production backend is imported when it is
asked for.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from mini_engine.checks import choice
from mini_engine.grammar.base import REGISTRY, GrammarBackend, GrammarError, GrammarObject, GrammarOptions
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKind

BUILT_IN = {
    "fsm": "mini_engine.grammar.fsm:FsmBackend",
    "xgrammar": "mini_engine.grammar.libraries.xgrammar:XGrammarBackend",
    "llguidance": "mini_engine.grammar.libraries.llguidance:LLGuidanceBackend",
    "outlines": "mini_engine.grammar.libraries.outlines:OutlinesBackend",
}


# The order in which "auto" asks. The first is exact, and slow for a grammar with many states; the others take more.
IN_TURN = ("fsm", "llguidance", "xgrammar")
FEW_STATES = 4000  # which fsm compiles in a fraction of a second


class AutoBackend(GrammarBackend):
    """Compiles each grammar with the first backend that takes it. Its stats say which one that was."""

    name = "auto"

    def __init__(self, table: TokenTable, options: GrammarOptions | None = None) -> None:
        """Compile for the tokens of ``table``. A library that is not installed is passed over."""
        super().__init__(table, options)
        self.made: dict[str, GrammarBackend] = {}

    def build(self, kind: GrammarKind, text: str) -> GrammarObject:
        """Compile ``text``. Raises ``GrammarError`` with the reasons of all backends if none takes it.

        A grammar that ``fsm`` narrows is kept for the case that no library takes it.
        """
        reasons = []
        narrowed = None
        for backend in self.backends():
            try:
                grammar = backend.compile((kind, text))
            except GrammarError as error:
                reasons.append(f"{backend.name}: {error}")
                continue
            grammar.stats.backend = backend.name
            if not grammar.stats.narrowed:
                return grammar
            narrowed = grammar
        if narrowed is None:
            raise GrammarError("; ".join(reasons))
        return narrowed

    def backends(self) -> Iterator[GrammarBackend]:
        """Yield the backends in turn, made when they are first needed."""
        few = GrammarOptions(self.options.whitespace, min(FEW_STATES, self.options.max_states))
        for name in IN_TURN:
            if name != "fsm" and find_spec(name) is None:
                continue
            if name not in self.made:
                self.made[name] = make_backend(name, self.table, few if name == "fsm" else self.options)
            yield self.made[name]


def make_backend(name: str, table: TokenTable, options: GrammarOptions) -> GrammarBackend:
    """Return a backend for the tokens of ``table``; a registered one goes before a built-in one of the same name.

    Raises ``ValueError`` for an unknown name, and for a library that is not installed.
    """
    if name in REGISTRY.factories:
        return REGISTRY.factories[name](table, options)
    if name == "auto":
        return AutoBackend(table, options)
    choice("grammar_backend", name, BUILT_IN)
    module, kind = BUILT_IN[name].split(":")
    backend: GrammarBackend = getattr(import_module(module), kind)(table, options)
    return backend
