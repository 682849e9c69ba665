"""L7: what the adapters of grammar libraries share: where a library ends and the engine's rules begin.

Owns: ``LibraryGrammar``, which keeps the rules of ``GrammarObject`` around a matcher, and what is read before a library
sees it: regular expressions, schemas, structural tags. Must not know: any one library.

Libraries differ in dialect and in what they overlook. A regular expression is therefore parsed by ``regex`` and
written out again by ``syntax`` without dots, shorthands and anchors, so that every library means the same by it. A
schema with a keyword that a library reads wrongly is refused.
"""

import importlib
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from mini_engine.constraints import GrammarStats
from mini_engine.grammar.base import (
    GrammarError,
    GrammarObject,
    TokenRefusedError,
    UnsupportedKeywordError,
    check_rollback,
)
from mini_engine.grammar.schema.converter import parse_schema
from mini_engine.grammar.schema.keywords import (
    IDENTITIES,
    NO_MORE_ITEMS,
    ORDER,
    OTHER_NAMES,
    REPEATED,
    SPELLING,
    UNDECLARED,
    Place,
    escaped,
    foreign_words,
)
from mini_engine.grammar.schema.values import LEFT_OUT, MAX_DEPTH, format_note
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKind

Change = Callable[[dict[str, Any], str], Mapping[str, Any]]
# Keywords whose value is a schema, a list of them, or schemas by name. Any other mapping is data, and no schema.
ONE_SCHEMA = frozenset("items additionalProperties contains not if then else propertyNames".split())
LIST_OF_SCHEMAS = frozenset("allOf anyOf oneOf prefixItems".split())
NAMED_SCHEMAS = frozenset("properties patternProperties $defs definitions".split())
# Left out of a message: the time and the line in the library's own source, and the text that it made of ours.
NOT_TO_CLIENTS = re.compile(
    r"\[\d\d:\d\d:\d\d\] \S+?:\d+: |Check failed: \([^\n]*?\) is false: "
    r"|^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?|\n(?: +\d+ \| |<state>).*",
    re.DOTALL,
)


def import_library(module: str) -> ModuleType:
    """Return a module of an optional library. Raises ``ValueError`` that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ValueError(f"the grammar backend needs {name}: pip install 'mini-engine[grammars]' ({error})") from error


def compile_error(kind: GrammarKind, message: object) -> GrammarError:
    """Return the error for a grammar that a library refuses, in the library's words without its source files."""
    return GrammarError(f"the {kind} cannot be compiled: {in_short(message)}")


def in_short(message: object) -> str:
    """Return a library's message without its source files and states."""
    if isinstance(message, UnicodeError):  # it quotes a part of a character
        message = "it is faulty at a character outside of ASCII"
    return NOT_TO_CLIENTS.sub("", str(message)).strip()


class LibraryGrammar(GrammarObject):
    """The rules of a grammar object around a library's matcher, which sees tokens of text and never a stop token."""

    def __init__(self, table: TokenTable) -> None:
        """Begin before the first token."""
        super().__init__()
        self.table = table
        self.num_tokens = 0
        self.ended = False

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Take in a token of text; ``False`` and nothing changed if it is not allowed. Mutates."""

    @abstractmethod
    def undo(self, count: int) -> None:
        """Undo the last ``count`` >= 1 tokens of text. Mutates."""

    @abstractmethod
    def fork(self) -> None:
        """Put a copy in the place of the matcher, which another grammar has too. Mutates."""

    @abstractmethod
    def completes(self) -> bool:
        """Whether the text so far is valid as a whole."""

    @abstractmethod
    def fill_row(self, mask: Tensor, row: int) -> None:
        """Write what may come next into a bitmask on the CPU. Mutates the mask."""

    def accept_token(self, token_id: int) -> None:
        """Take in a token, or raise ``TokenRefusedError`` and change nothing. Mutates."""
        stops = token_id in self.table.stop_ids
        if self.ended or not (self.completes() if stops else self.is_text(token_id) and self.advance(token_id)):
            raise TokenRefusedError(f"the grammar does not allow token {token_id} after {self.num_tokens} tokens")
        self.ended = stops
        self.num_tokens += 1

    def is_text(self, token_id: int) -> bool:
        """Whether the token is in the vocabulary and spells something."""
        return 0 <= token_id < self.table.vocab_size and bool(self.table.token_bytes[token_id])

    def rollback(self, count: int) -> None:
        """Undo tokens, the stop token first. Mutates."""
        check_rollback(count, self.num_tokens)
        of_text = count - self.ended if count else 0
        if of_text:
            self.undo(of_text)
        self.ended = self.ended and not count
        self.num_tokens -= count

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""
        return self.ended

    def is_complete(self) -> bool:
        """Whether the text is valid as a whole."""
        return self.ended or self.completes()

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        """Write a row of a bitmask on the CPU. After the end, where libraries raise, nothing is in it."""
        if self.ended:
            mask[row] = 0
        else:
            self.fill_row(mask, row)

    def check_start(self, kind: GrammarKind) -> Self:
        """Return the grammar. Raises ``GrammarError`` if nothing may come: some libraries compile what has no text."""
        mask = self.allocate_vocab_mask(self.table.vocab_size, 1)
        logits = torch.zeros(1, self.table.vocab_size)
        self.fill_vocab_mask(mask, 0)
        self.apply_vocab_mask(logits, mask)
        if bool((logits == -torch.inf).all()):
            raise GrammarError(f"the {kind} allows no text: no token of the vocabulary can begin one")
        return self

    def copy(self) -> Self:
        """Return a grammar in the same state that goes its own way, around a matcher of its own."""
        twin = copy(self)
        twin.finished = False
        twin.stats = GrammarStats(kind=self.stats.kind)
        twin.fork()
        return twin


def map_schema(schema: Any, change: Change, path: str = "") -> Any:
    """Return the schema after ``change(schema, path)`` of every schema inside it and, last, of itself.

    ``path`` is a JSON pointer. Raises what ``change`` raises, and ``GrammarError`` if a part is not a schema.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise GrammarError(f"the schema at {path or '/'} is {schema!r}; write an object, true or false")
    if path.count("/") > 2 * MAX_DEPTH:
        raise GrammarError(f"the schema nests deeper than {MAX_DEPTH} levels; flatten it, or use $ref")
    changed = dict(schema)
    for keyword, value in schema.items():
        place = f"{path}/{keyword}"
        if keyword in LIST_OF_SCHEMAS and isinstance(value, list):
            changed[keyword] = [map_schema(inner, change, f"{place}/{number}") for number, inner in enumerate(value)]
        elif keyword in NAMED_SCHEMAS and isinstance(value, Mapping):
            changed[keyword] = {
                name: map_schema(inner, change, f"{place}/{escaped(name)}") for name, inner in value.items()
            }
        elif keyword in ONE_SCHEMA:
            changed[keyword] = map_schema(value, change, place)
    return change(changed, path)


def without_foreign(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return one schema without the words of no vocabulary. An ``$id`` that moves references stays."""
    foreign = foreign_words(schema, Place(path))
    return {word: value for word, value in schema.items() if word not in foreign or (path and word in IDENTITIES)}


def schemas_in(kind: GrammarKind, text: str) -> list[tuple[str, Any]]:
    """Return the schemas of a grammar, each with its place.

    A structural tag has its places from its format on: ``/tags/0/content/json_schema/properties/a``.
    """
    found = [("", parse_schema(text))] if kind == "json_schema" else list[tuple[str, Any]]()
    waiting: list[tuple[str, Any]] = [("", read_format(text))] if kind == "structural_tag" else []
    while waiting:
        place, part = waiting.pop(0)
        if isinstance(part, dict) and part.get("type") == "json_schema":
            found.append((f"{place}/json_schema", part["json_schema"]))
        elif isinstance(part, dict | list):
            inside = part.items() if isinstance(part, dict) else enumerate(part)
            waiting += [(f"{place}/{key}", each) for key, each in inside]
    return found


def note_schemas(stats: GrammarStats, kind: GrammarKind, text: str, has_others: bool, general: Sequence[str]) -> None:
    """Note the words of no vocabulary in a grammar's schemas, and what a library leaves out of them. Mutates ``stats``.

    ``has_others``: see ``left_out``. ``general``: what the library never writes.
    """
    ignored: list[str] = []
    narrowed: dict[str, None] = {}
    for place, schema in schemas_in(kind, text):
        narrowed.update(dict.fromkeys(map(Place().note, general)))

        def note(part: dict[str, Any], path: str, place: str = place) -> dict[str, Any]:
            at = Place(place + path)
            ignored.extend(f"{at.path}/{escaped(word)}" for word in foreign_words(part, at))
            narrowed.update(dict.fromkeys(left_out(part, at, has_others)))
            return part

        map_schema(schema, note)
    stats.ignored = ignored
    stats.narrowed = list(narrowed)


def left_out(schema: Mapping[str, Any], place: Place, has_others: bool) -> Iterator[str]:
    """Yield what a library leaves out of one schema, with its place.

    ``has_others``: the library writes members that ``properties`` does not declare; xgrammar does not, nor items behind
    ``prefixItems``, and it has its strings from ``schema.values``.
    """
    declared = schema.get("properties") or {}
    others = schema.get("additionalProperties", has_others or not declared)
    about_members = {"properties", "patternProperties", "additionalProperties"} & schema.keys()
    is_object = about_members or schema.get("type") == "object"
    if schema.get("format") in LEFT_OUT:
        yield place.note(format_note(schema["format"]))
    if declared and not has_others and "additionalProperties" not in schema:
        yield place.note(UNDECLARED)
    if not has_others and {"minLength", "maxLength", "pattern", "format"} & schema.keys():
        yield place.note(SPELLING)
    if not has_others and "prefixItems" in schema and "items" not in schema:
        yield place.note(NO_MORE_ITEMS)
    if is_object and (others is not False or schema.get("patternProperties")):
        yield place.note(REPEATED)
    if others is not False and schema.get("patternProperties"):
        yield place.note(OTHER_NAMES)
    if len(declared) > 1:
        yield Place().note(ORDER)


def refuse_keywords(schema: Mapping[str, Any], known: Iterable[str], path: str, library: str) -> None:
    """Raise ``UnsupportedKeywordError`` for a keyword that is not ``known`` to be kept by ``library``."""
    for keyword in schema:
        if keyword not in known:
            reason = f"is not kept by {library}, which ignores it or means less by it; leave it out"
            raise UnsupportedKeywordError(keyword, path, reason)


def read_tags(wish: Any) -> dict[str, Any]:
    """Return SGLang's structural tag, ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, as a format.

    Free text, until a trigger appears; then one of the structures that begin with it. Raises ``GrammarError``.
    """
    if not isinstance(wish, dict) or {"type": "structural_tag", **wish}.keys() != {"type", "structures", "triggers"}:
        raise GrammarError('a structural_tag is {"structures": [{"begin", "schema", "end"}], "triggers": [...]} here')
    if wish.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"the type of a structural_tag is {wish['type']!r}; it is 'structural_tag', or left out")
    triggers, structures = wish["triggers"], wish["structures"]
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise GrammarError(f"triggers is {triggers!r}; it is a list of texts, none empty")
    if not isinstance(structures, list) or not structures:
        raise GrammarError(f"structures is {structures!r}; it is a list of at least one")
    tags = [read_tag(structure, triggers) for structure in structures]
    used = sorted({trigger for trigger, _ in tags})
    return {"type": "triggered_tags", "triggers": used, "tags": [tag for _, tag in tags]}


def read_format(text: str) -> dict[str, Any]:
    """Return the format of a structural tag: the newer form's own, or SGLang's in its words. Raises ``GrammarError``.

    The newer form is ``{"type": "structural_tag", "format": {...}}``, as xgrammar describes it.
    """
    try:
        wish = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the structural_tag is not JSON: {error}") from error
    if isinstance(wish, dict) and isinstance(wish.get("format"), dict):
        if wish.keys() - {"type", "format"} or wish.get("type", "structural_tag") != "structural_tag":
            raise GrammarError(f"a structural_tag with a format has {sorted(wish)}; it has a type and a format alone")
        return dict(wish["format"])
    return read_tags(wish)


def read_tag(structure: Any, triggers: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the trigger of one structure, and the structure as a format. Raises ``GrammarError``."""
    if not isinstance(structure, dict) or not {"begin", "end"} <= structure.keys() <= {"begin", "schema", "end"}:
        raise GrammarError(f'a structure is {{"begin", "schema", "end"}}, not {structure!r}')
    begin = structure["begin"]
    end = structure["end"]
    schema = structure.get("schema")
    if not (isinstance(begin, str) and isinstance(end, str)):
        raise GrammarError(f"a structure begins with {begin!r} and ends with {end!r}; both are texts")
    found = [trigger for trigger in triggers if begin.startswith(trigger)]
    if not found:
        raise GrammarError(
            f"the structure {begin!r} begins with none of the triggers {triggers}; nothing would start it"
        )
    content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
    return found[0], {"type": "tag", "begin": begin, "content": content, "end": end}
