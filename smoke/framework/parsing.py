"""Python as a tree, from any thread: in Python 3.11 two threads that parse at the same time can disturb each other.

The interpreter counts how deep a tree is for all threads together (https://github.com/python/cpython/issues/106905).
"""

import ast
import threading

LOCK = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Return ``ast.parse(source)``. Raises ``SyntaxError``, and ``ValueError`` for null bytes."""
    with LOCK:
        return ast.parse(source)
