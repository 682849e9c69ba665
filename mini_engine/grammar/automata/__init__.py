"""L7: from a regular expression to the tokens that an automaton allows.

``regex`` reads the expression into a tree of ``syntax``, whose characters ``utf8`` spells in bytes. ``automaton`` turns
the tree into an automaton over bytes, and ``trie`` walks all tokens through it at once.
"""
