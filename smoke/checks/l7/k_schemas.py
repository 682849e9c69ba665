"""The check of the whole lesson: JSON Schemas through automata, masks and the engine (L7.K), and JSON that is valid.

Owns: a schema, requests that would rather write something else, and the rules of the schema's members.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from smoke.checks.l4.k_driver import make_params
from smoke.checks.l7.h_engine import engine_of, raise_missing
from smoke.framework.cases import prompts
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
COLORS = ["red", "green", 'a "sort of" blue']
SCHEMA = {
    "type": "object",
    "properties": {
        "nick": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "color": {"enum": COLORS},
        "lucky": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "maxItems": 2},
    },
    "required": ["name", "color"],
    "additionalProperties": False,
}
WRITERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "frequency_penalty": 1.0},
    {"logit_bias": {89: 20.0, 90: 20.0, 0: 20.0}},
)


def schemas_probe(seed: int) -> Values:
    """Let the backend fsm constrain a few writers, with jumps and without."""
    values: Values = {}
    for jump in (False, True):
        engine = engine_of(num_pages=60, max_running_requests=4, grammar_backend="fsm", jump_forward=jump)
        names = [
            engine.add_request(prompts(seed)[3], make_params({**params, "json_schema": SCHEMA, "max_new_tokens": 70}))
            for params in WRITERS
        ]
        while engine.has_work:
            engine.step()
        outputs = [engine.take_output(name) for name in names]
        for output in outputs:
            raise_missing(output.error)
        values[str(jump)] = [[o.text, str(o.finish_reason), o.is_grammar_complete, o.error] for o in outputs]
    return values


def schemas_verdict(seed: int, got: Values) -> list[Failure]:
    """Read every answer as JSON, and look at its members; one that was cut is the beginning of an object."""
    failures = []
    for jump, rows in got.items():
        for params, (text, reason, complete, error) in zip(WRITERS, rows, strict=True):
            case = f"{params or 'greedy'}, jump_forward {jump}"
            if reason == "length" and not complete and text.startswith('{"'):
                continue
            failures += differences(["stop", True, None], [reason, complete, error], None, case)
            failures += [Failure(case, fault, "JSON that is valid under the schema", text) for fault in faults_of(text)]
    return failures


def faults_of(text: str) -> list[str]:
    """Return what is wrong with an object, member by member."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return [str(error)]
    rules: dict[str, Callable[[Any], bool]] = {
        "nick": lambda nick: isinstance(nick, str) and re.fullmatch("[A-Z][a-z]{1,6}", nick) is not None,
        "name": lambda name: isinstance(name, str) and 1 <= len(name) <= 8,
        "age": lambda age: type(age) is int and 1 <= age <= 120,
        "color": lambda color: color in COLORS,
        "lucky": lambda lucky: len(lucky) <= 2 and all(type(n) is int and -9 <= n <= 9 for n in lucky),
    }
    lacking = [name for name in ("name", "color") if name not in value]
    unknown = [name for name in value if name not in rules]
    return lacking + unknown + [name for name, rule in rules.items() if name in value and not rule(value[name])]


REGISTRY.add(
    "L7.K.schemas",
    "With everything of this lesson in place, an engine's answers to a JSON Schema are valid JSON under it.",
    schemas_probe,
    schemas_verdict,
    needs=("L7.C", "L7.D", "L7.F", "L7.G", "L7.H", "L7.J"),
    seconds=60.0,
)
