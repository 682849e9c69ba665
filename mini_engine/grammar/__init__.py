"""L7: grammar masks: which tokens may come next, so that the text is valid.

``schema`` reads a JSON Schema, and ``automata`` makes an automaton of what it found or of a regular expression. The
modules here serve the engine: ``service`` gives each request a grammar (``store``, ``queue``), which ``fsm`` or one of
``libraries`` compiles behind the interface of ``base``, and each step turns the grammars into ``rows`` of ``masks``.
"""
