"""What an answer must be: one of many ways to say it becomes one grammar of the engine."""

import json
import re
from dataclasses import dataclass
from typing import Any

from mini_engine.server.errors import ApiError
from mini_engine.server.schema import GenerationBody, ResponseFormat, StructuredOutputs


@dataclass(frozen=True)
class Structure:
    """A grammar: its ``kind`` and text as ``SamplingParams`` takes them. ``param``: the field that asked for it."""

    kind: str
    value: str | dict[str, Any]
    param: str

    @property
    def size(self) -> int:
        """Characters of its text."""
        return len(self.value if isinstance(self.value, str) else json.dumps(self.value))


def structure_of(body: GenerationBody) -> Structure | None:
    """Return the grammar that a request asks for, ``None`` if it asks for none. Raises ``ApiError`` for two."""
    found = [
        ("response_format", from_format(body.response_format)),
        ("structured_outputs", from_structured_outputs(body.structured_outputs)),
        ("guided_json", ("json_schema", body.guided_json)),
        ("guided_regex", ("regex", body.guided_regex)),
        ("guided_choice", from_choice("guided_choice", body.guided_choice)),
        ("guided_grammar", ("ebnf", body.guided_grammar)),
        ("json_schema", ("json_schema", body.json_schema)),
        ("regex", ("regex", body.regex)),
        ("ebnf", ("ebnf", body.ebnf)),
        ("structural_tag", ("structural_tag", body.structural_tag)),
    ]
    asked = [Structure(kind, value, param) for param, (kind, value) in found if value is not None]
    if len(asked) > 1:
        names = " and ".join(each.param for each in asked)
        raise ApiError(400, f"{names} are given; an answer has one grammar, so leave one", asked[1].param)
    return asked[0] if asked else None


Found = tuple[str, Any]


def from_format(asked: ResponseFormat | None) -> Found:
    """Return the kind and the value of ``response_format``; the value is ``None`` for free text."""
    param = "response_format"
    if asked is None or asked.type == "text":
        return "", None
    if asked.type == "json_object":
        return "json_schema", {"type": "object"}
    if asked.type == "structural_tag":
        if asked.format is not None:
            if asked.structures is not None or asked.triggers is not None:
                raise ApiError(400, "a structural_tag has a format, or structures and triggers; leave one", param)
            return "structural_tag", {"type": "structural_tag", "format": asked.format}
        if asked.structures is None or asked.triggers is None:
            raise ApiError(400, "a structural_tag needs a format, or structures and triggers", param)
        return "structural_tag", {"structures": asked.structures, "triggers": asked.triggers}
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise ApiError(400, "response_format of type json_schema needs json_schema.schema", param)
    return "json_schema", asked.json_schema.schema_


def from_structured_outputs(asked: StructuredOutputs | None) -> Found:
    """Return the kind and the value of ``structured_outputs``. Raises ``ApiError`` unless it has exactly one."""
    if asked is None:
        return "", None
    ways = {
        "json": ("json_schema", asked.json_),
        "regex": ("regex", asked.regex),
        "choice": from_choice("structured_outputs", asked.choice),
        "grammar": ("ebnf", asked.grammar),
        "json_object": ("json_schema", {"type": "object"} if asked.json_object else None),
        "structural_tag": ("structural_tag", asked.structural_tag),
    }
    given = [found for found in ways.values() if found[1] is not None]
    if len(given) != 1:
        raise ApiError(400, f"structured_outputs has {len(given)} of {', '.join(ways)}; give one", "structured_outputs")
    return given[0]


def from_choice(param: str, choices: list[str] | None) -> Found:
    """Return a list of choices as a regular expression. Raises ``ApiError`` for an empty list or choice."""
    if choices is None:
        return "regex", None
    if not choices or not all(choices):
        raise ApiError(400, f"{param} is {choices}; give at least one choice, and none of them empty", param)
    return "regex", "|".join(map(re.escape, choices))
