"""The frontend language: programs that generate, choose, fork and join, and never pay twice for a prefix.

.. code-block:: python

    from mini_engine import lang

    @lang.program
    def opinion(s, topic):
        s += lang.user(f"What do you think of {topic}?")
        s += lang.assistant(lang.select("verdict", ["Good.", "Bad."]) + " Because" + lang.gen("why", stop="."))

    print(opinion.run("rain")["verdict"])
"""

from mini_engine.lang.backends import ALWAYS_SHARE, Endpoint
from mini_engine.lang.context import Answer
from mini_engine.lang.expressions import assistant, gen, image, select, system, user
from mini_engine.lang.run import Program, program
from mini_engine.lang.state import State

__all__ = [
    "ALWAYS_SHARE",
    "Answer",
    "Endpoint",
    "Program",
    "State",
    "assistant",
    "gen",
    "image",
    "program",
    "select",
    "system",
    "user",
]
