"""Calls of functions: what a request may call, the grammar of that, and an answer's calls in the interface's words."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mini_engine.server import hermes
from mini_engine.server.errors import ApiError
from mini_engine.server.hermes import CallReader, Piece
from mini_engine.server.identity import new_id
from mini_engine.server.schema import ChatBody, NamedTool, Tool
from mini_engine.server.structure import Structure
from mini_engine.texts import TOOL_CALL

PARSERS = {hermes.NAME: hermes}  # by the names that ``serve --tool-parser`` takes


@dataclass(frozen=True)
class Calling:
    """What an answer may call: the ``names`` of functions.

    ``is_named``: the request has chosen the one. ``is_forced``: an answer is nothing but calls.
    """

    structure: Structure
    names: tuple[str, ...]
    is_named: bool
    is_forced: bool

    def reader(self) -> "AnswerReader":
        """Return what reads one answer."""
        return AnswerReader(self, CallReader(self.names))


class AnswerReader:
    """Reads one answer as parts of the interface's messages, whole or as it comes."""

    def __init__(self, calling: Calling, calls: CallReader) -> None:
        """Read with ``calls`` what was asked for as ``calling``."""
        self.calling = calling
        self.calls = calls

    def parts(self, text: str, is_last: bool) -> Iterator[dict[str, Any]]:
        """Yield the deltas of a stream that more ``text`` completes. Mutates."""
        for piece in chain(self.calls.add(text), self.calls.flush() if is_last else ()):
            if piece.call is not None or not self.calling.is_forced:  # the rest is the beginning of a call that was cut
                yield delta_of(piece)

    def message(self, text: str) -> dict[str, Any]:
        """Return the content and the calls of a whole answer. Mutates."""
        content = ""
        calls = list[dict[str, Any]]()
        for part in self.parts(text, is_last=True):
            content += part.get("content", "")
            for call in part.get("tool_calls", ()):
                if "id" in call:
                    calls.append({name: value for name, value in call.items() if name != "index"})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def reason(self, ended: str | None) -> str | None:
        """Return why the answer ended: for calls, unless one was cut or the request had named the function."""
        calls = ended == "stop" and self.calls.num_calls and not self.calls.is_cut and not self.calling.is_named
        return "tool_calls" if calls else ended


def delta_of(piece: Piece) -> dict[str, Any]:
    """Return a piece as a stream reports it: id and name once, then text of the arguments."""
    if piece.call is None:
        return {"content": piece.text}
    if piece.name is None:
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
    function = {"name": piece.name, "arguments": ""}
    return {"tool_calls": [{"index": piece.call, "id": f"call-{new_id()}", "type": "function", "function": function}]}


def calling_of(body: ChatBody, structure: Structure | None, template: str, parser: str | None) -> Calling | None:
    """Return what an answer may call, ``None`` if it may not. ``structure``: the form that content must have.

    ``parser``: of the server; without one the words of the chat template say whether they teach a known form. Raises
    ``ApiError``.
    """
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if choice == "none":
        return None
    if not body.tools:
        raise ApiError(400, f"tool_choice is {describe(choice)} and there are no tools; give tools", "tools")
    if choice == "auto" and parser is None and not any(form.is_taught(template) for form in PARSERS.values()):
        raise ApiError(
            400,
            f"tool_choice is 'auto', and the model's chat template teaches no known form of calls ({TOOL_CALL} with "
            "JSON); choose 'required', a named function or 'none', or start the server with --tool-parser hermes",
            "tool_choice",
        )
    tools = [named(body.tools, choice.function.name)] if isinstance(choice, NamedTool) else body.tools
    names = tuple(tool.function.name for tool in tools)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"two tools have the name {twice!r}; rename one of them", "tools")
    is_named = isinstance(choice, NamedTool)
    once = {"stop_after_first": is_named or body.parallel_tool_calls is False}
    tags = {"tags": [tag_of(tool) for tool in tools], **once}
    alone = {"type": "tags_with_separator", "separator": hermes.SEPARATOR, "at_least_one": True, **tags}
    wish = alone if structure is None else either(alone, structure, choice)
    if choice != "auto":
        wish = alone  # there is no text that could have a form
    elif structure is None:
        wish = {"type": "triggered_tags", "triggers": [TOOL_CALL], **tags}
    return Calling(
        Structure("structural_tag", {"type": "structural_tag", "format": wish}, "tools"),
        names,
        is_named,
        choice != "auto",
    )


def tag_of(tool: Tool) -> dict[str, Any]:
    """Return the part of a structural tag that calls a tool."""
    content = {"type": "json_schema", "json_schema": parameters(tool)}
    return {"type": "tag", "begin": hermes.begin(tool.function.name), "content": content, "end": hermes.END}


def either(calls: dict[str, Any], structure: Structure, choice: Any) -> dict[str, Any]:
    """Return the format of an answer that is calls or keeps to a schema. Raises ``ApiError`` if it cannot be both."""
    if structure.kind != "json_schema" or not isinstance(structure.value, dict):
        raise ApiError(
            400,
            f"tool_choice is {describe(choice)} and {structure.param} is given; calls go with a form that is a JSON "
            "Schema, and no text of one; leave one of them",
            "tool_choice",
        )
    return {"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": structure.value}]}


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
    """Return the schema of a tool's arguments, which are an object. Raises ``ApiError`` for one of anything else."""
    schema = tool.function.parameters or {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        name, kind = tool.function.name, schema["type"]
        raise ApiError(400, f"the parameters of {name} are of type {kind!r}; arguments are an object", "tools")
    return schema if "$ref" in schema else {"type": "object", **schema}
