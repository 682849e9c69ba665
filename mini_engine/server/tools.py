"""Calls of functions: the grammar that makes the model write one, and what it wrote as ``tool_calls``."""

import json
from typing import Any
from uuid import uuid4

from mini_engine.server.errors import ApiError
from mini_engine.server.schema import ChatBody, NamedTool, Tool
from mini_engine.server.structure import Structure


def tool_structure(body: ChatBody) -> Structure | None:
    """Return the grammar of the calls that ``tool_choice`` asks for, ``None`` if it asks for none.

    A named function: a JSON Schema of its arguments. "required": a list of calls. Raises ``ApiError`` for what cannot
    be done: "auto" needs a parser for each family of models.
    """
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if choice == "none":
        return None
    if not body.tools:
        raise ApiError(400, f"tool_choice is {describe(choice)} and there are no tools; give tools", "tools")
    if choice == "auto":
        raise ApiError(
            400,
            "tool_choice 'auto' is not supported: choose 'required', a named function, or 'none' for a text",
            "tool_choice",
        )
    if isinstance(choice, NamedTool):
        return Structure("json_schema", parameters(named(body.tools, choice.function.name)), "tools")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": without_definitions(tool)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in body.tools
    ]
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}
    return Structure("json_schema", schema | definitions(body.tools), "tools")


def describe(choice: Any) -> str:
    """Return a choice as an error message names it."""
    return repr(choice.function.name if isinstance(choice, NamedTool) else choice)


def named(tools: list[Tool], name: str) -> Tool:
    """Return the tool of a name. Raises ``ApiError`` if there is none."""
    for tool in tools:
        if tool.function.name == name:
            return tool
    known = ", ".join(tool.function.name for tool in tools)
    raise ApiError(400, f"tool_choice names {name!r}, and the tools are {known}", "tool_choice")


def parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments."""
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def without_definitions(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments as a part of another: references look for definitions at the root."""
    return {name: value for name, value in parameters(tool).items() if name != "$defs"}


def definitions(tools: list[Tool]) -> dict[str, Any]:
    """Return the definitions of all schemas together. Raises ``ApiError`` where two have the same name and differ."""
    joint: dict[str, Any] = {}
    for tool in tools:
        for name, schema in parameters(tool).get("$defs", {}).items():
            if joint.setdefault(name, schema) != schema:
                raise ApiError(400, f"two tools define {name!r} in $defs, and not alike; rename one of them", "tools")
    return {"$defs": joint} if joint else {}


def call(name: str, arguments: str) -> dict[str, Any]:
    """Return a call as the interface reports it."""
    return {"id": f"call-{uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_in(text: str, body: ChatBody) -> list[dict[str, Any]]:
    """Return the calls that an answer under ``tool_structure`` makes; none if it was cut."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    if isinstance(body.tool_choice, NamedTool):
        return [call(body.tool_choice.function.name, text)]
    return [call(each["name"], json.dumps(each["parameters"], ensure_ascii=False)) for each in value]
