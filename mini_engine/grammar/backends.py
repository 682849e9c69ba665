"""L7: from the name of a grammar backend to the backend.

Owns: the names. Must not know: what the backends do. A production backend is imported when it is asked for.
"""

from importlib import import_module
from importlib.util import find_spec

from mini_engine.grammar.base import REGISTRY, GrammarBackend, GrammarOptions
from mini_engine.grammar.tokens import TokenTable

BUILT_IN = {
    "fsm": "mini_engine.grammar.fsm:FsmBackend",
    "xgrammar": "mini_engine.grammar.xgrammar_backend:XGrammarBackend",
    "llguidance": "mini_engine.grammar.llguidance_backend:LLGuidanceBackend",
    "outlines": "mini_engine.grammar.outlines_backend:OutlinesBackend",
}


def backend_name(name: str) -> str:
    """Return the backend that ``name`` means: "auto" is xgrammar if it is installed, else fsm.

    Raises ``ValueError`` for a name that nobody knows.
    """
    if name == "auto":
        return "xgrammar" if find_spec("xgrammar") is not None else "fsm"
    known = ["none", "auto", *BUILT_IN, *sorted(REGISTRY.factories)]
    if name not in known:
        raise ValueError(
            f"grammar_backend is {name!r}; choose one of {', '.join(dict.fromkeys(known))}, or register it first "
            "(register_grammar_backend)"
        )
    return name


def make_backend(name: str, table: TokenTable, options: GrammarOptions) -> GrammarBackend:
    """Return a backend for the tokens of ``table``; a registered one goes before a built-in one of the same name.

    Raises ``ValueError`` for an unknown name, and for a library that is not installed.
    """
    name = backend_name(name)
    if name in REGISTRY.factories:
        return REGISTRY.factories[name](table, options)
    module, kind = BUILT_IN[name].split(":")
    backend: GrammarBackend = getattr(import_module(module), kind)(table, options)
    return backend
