"""L7: the backend ``llguidance``: an adapter of the llguidance library.

Nothing is decided before it is needed: a lexer of derivatives under an Earley parser walks the trie of the vocabulary
at every step. Compiling takes a millisecond for any grammar, a mask more than xgrammar's. Parallel to SGLang's
``constrained/llguidance_backend.py``.

The library splits text into lexemes, longest first: ``a a`` with ``a ::= "x"+`` never matches, as the first ``a`` takes
every x. The language is then narrower than the grammar, never wider.
"""

import json
import re
from typing import Any

from torch import Tensor

from mini_engine.grammar.automata.regex import parse_regex
from mini_engine.grammar.automata.syntax import to_regex
from mini_engine.grammar.base import GrammarBackend, GrammarError, GrammarOptions, UnsupportedKeywordError
from mini_engine.grammar.libraries.library import (
    LibraryGrammar,
    compile_error,
    import_library,
    in_short,
    map_schema,
    note_schemas,
    read_format,
    refuse_keywords,
    without_foreign,
)
from mini_engine.grammar.libraries.llguidance_tags import TagRules
from mini_engine.grammar.schema.converter import parse_schema
from mini_engine.grammar.schema.keywords import ANNOTATIONS, INTEGERS, SPELLING, Place, list_of
from mini_engine.grammar.schema.values import FORMATS, texts_without
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKind

JSON_LAYOUT: dict[str, dict[str, Any]] = {
    "spaced": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "any": {"whitespace_flexible": True},
}
KEYWORDS = frozenset(
    "type enum const properties patternProperties required additionalProperties minProperties maxProperties items "
    "prefixItems minItems maxItems minLength maxLength pattern format minimum maximum exclusiveMinimum "
    "exclusiveMaximum multipleOf anyOf oneOf allOf $ref".split()
)
# Without this the mask holds one spelling of a text that is forced, though others are accepted: ab, but not a, b.
EVERY_SPELLING = '%llguidance {"no_forcing": true}\n'
NUMERIC = frozenset("const enum minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
LARGEST_INTEGER = 2**53
LONGEST = "/: each repeat takes all that it can, so that some texts of the grammar have no end; xgrammar reads it whole"
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


class LLGuidanceGrammar(LibraryGrammar):
    """A matcher of llguidance."""

    def __init__(self, matcher: Any, table: TokenTable, fill: Any) -> None:
        """Follow ``matcher``; ``fill`` is the library's function that writes a mask."""
        super().__init__(table)
        self.matcher = matcher
        self.fill = fill

    def advance(self, token_id: int) -> bool:
        """Take in a token. ``consume_token`` would never recover from a wrong one. Mutates."""
        num_accepted: int = self.matcher.try_consume_tokens([token_id])
        self.check()
        return num_accepted == 1

    def undo(self, count: int) -> None:
        """Undo tokens; there is no limit. Mutates."""
        self.matcher.rollback(count)
        self.check()

    def completes(self) -> bool:
        """Whether the parser accepts."""
        return bool(self.matcher.is_accepting())

    def fill_row(self, mask: Tensor, row: int) -> None:
        """Write int32 [ceil(V / 32)] through NumPy: ``llguidance.torch`` takes 2 s to import."""
        self.fill(self.matcher, mask.numpy(), row)
        self.check()

    def check(self) -> None:
        """Raise ``GrammarError`` if the matcher gave up, as it does at a limit of the library: it never raises."""
        if self.matcher.is_error():
            raise GrammarError(f"llguidance gave up: {in_short(self.matcher.get_error())}")

    def fork(self) -> None:
        """Go on with a copy, which shares what was compiled. Mutates."""
        self.matcher = self.matcher.deep_copy()

    def try_jump_forward(self) -> bytes:
        """Return the forced bytes, which may begin or end inside a character."""
        return bytes(self.matcher.compute_ff_bytes())


class LibraryTokens:
    """The vocabulary as the library wants to see it. An id without bytes needs a name of its own, and is special."""

    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        """Name the special ids."""
        self.tokens = [spelling or b"<|%d|>" % token for token, spelling in enumerate(table.token_bytes)]
        self.special_token_ids = [token for token, spelling in enumerate(table.token_bytes) if not spelling]
        self.eos_token_id = min(table.stop_ids)

    def __call__(self, text: object) -> list[int]:
        """Refuse: the library may ask for a tokenization where it forces text, and it does not force."""
        raise NotImplementedError("grammars know bytes, no tokenizer")


class LLGuidanceBackend(GrammarBackend):
    """Every kind of grammar; of structural tags, the formats of ``llguidance_tags``."""

    name = "llguidance"

    def __init__(self, table: TokenTable, options: GrammarOptions | None = None) -> None:
        """Hand the vocabulary over. Raises ``ValueError`` if the library is missing or there is no stop id."""
        super().__init__(table, options)
        if not table.stop_ids:
            raise ValueError(
                "llguidance needs a stop id, and the token table has none; name the token that ends a text"
            )
        self.library = import_library("llguidance")
        self.gbnf_to_lark = import_library("llguidance.gbnf_to_lark").gbnf_to_lark
        self.fill = import_library("llguidance.numpy").fill_next_token_bitmask
        self.tokenizer = self.library.LLTokenizer(
            self.library.TokenizerWrapper(LibraryTokens(table)),
            n_vocab=table.vocab_size,
            eos_token=sorted(table.stop_ids),
        )

    def build(self, kind: GrammarKind, text: str) -> LLGuidanceGrammar:
        """Compile ``text``. Raises ``GrammarError``."""
        matcher = self.library.LLMatcher(self.tokenizer, EVERY_SPELLING + self.lark(kind, text), log_level=0)
        if matcher.is_error():
            raise compile_error(kind, matcher.get_error())
        grammar = LLGuidanceGrammar(matcher, self.table, self.fill).check_start(kind)
        note_schemas(grammar.stats, kind, text, True, (SPELLING, INTEGERS))
        if kind == "ebnf":
            grammar.stats.narrowed = [LONGEST]
        return grammar

    def lark(self, kind: GrammarKind, text: str) -> str:
        """Return the grammar in the library's language, a dialect of Lark, without its first line."""
        match kind:
            case "json_schema":
                return "start: %json " + self.json_schema(parse_schema(text))
            case "regex":
                expression = to_regex(parse_regex(text))  # an empty one would be a comment: //
                return f"start: /{self.library.regex_to_lark(expression, '')}/" if expression else 'start: ""'
            case "ebnf":
                try:
                    return str(self.gbnf_to_lark(plain_escapes(text))).removeprefix("%llguidance {}")
                except Exception as error:  # the library raises plain exceptions here
                    raise compile_error(kind, error) from error
            case "structural_tag":
                return TagRules(self.json_schema).grammar(read_format(text))

    def json_schema(self, schema: Any) -> str:
        """Return a schema with the layout of its JSON inside. Raises ``GrammarError``."""
        schema = map_schema(schema, check_keywords)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return json.dumps(schema | {"x-guidance": JSON_LAYOUT[self.options.whitespace]})


def check_keywords(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema. Raises ``UnsupportedKeywordError``: what the library has never heard of, it ignores."""
    schema = without_foreign(schema, path)
    refuse_keywords(schema, ANNOTATIONS | KEYWORDS, path, "llguidance")
    check_integers(schema, path)
    check_counts(schema, path)
    schema = with_names(with_format(schema, path))
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and reference.startswith("#")):
        raise UnsupportedKeywordError("$ref", path, f"is {reference!r}; only places in the schema itself are looked up")
    return schema


def check_integers(schema: dict[str, Any], path: str) -> None:
    """Refuse integers that a double does not hold: the library rounds them and takes another number."""
    for keyword in NUMERIC & schema.keys():
        waiting = [schema[keyword]]
        while waiting:
            value = waiting.pop()
            if isinstance(value, list | dict):
                waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
                reason = f"has the integer {value}, which llguidance rounds: the largest is 2**53; take fsm"
                raise UnsupportedKeywordError(keyword, path, reason)


def check_counts(schema: dict[str, Any], path: str) -> None:
    """Refuse a least number of names that are free: the library counts members, and a name may come twice."""
    least = schema.get("minProperties", 1)
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    required = schema.get("required", [])
    num_required = len({*map(str, required)}) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(num_required, 1) and not is_closed:
        reason = f"is {least}, and llguidance counts a name that comes twice as two; name {least} members in required"
        raise UnsupportedKeywordError("minProperties", path, reason)


def with_names(schema: dict[str, Any]) -> dict[str, Any]:
    r"""Return the schema with its other members under a pattern that all names match but for the declared ones.

    The library spells a name that matches a pattern in one way. Any other name it takes in every spelling, so that
    ``"\u0061"`` would be no ``"a"`` to it, and have no schema. Beside patterns, other names are therefore not written.
    """
    others = schema.get("additionalProperties", True)
    if others is False or not (schema.get("properties") or schema.get("patternProperties")):
        return schema
    if schema.get("patternProperties"):
        return schema | {"additionalProperties": False}
    free = texts_without(schema["properties"].keys()) if others is not True else None  # its schema is for those alone
    pattern = f"^({to_regex(free)})$" if free else ""
    return schema | {"patternProperties": {pattern: others}, "additionalProperties": False}


def with_format(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema with the format of a string as a pattern of ours; the library's own ones are looser."""
    name = schema.get("format")
    if name is None:
        return schema
    if name not in FORMATS:
        reason = f"is {name!r}, of which llguidance takes more than it says; it may be {', '.join(FORMATS)}"
        raise UnsupportedKeywordError("format", path, reason)
    rest = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    own = {"pattern": f"^({FORMATS[name]})$"}
    if "pattern" not in schema:
        return rest | own
    return rest | {"allOf": [*list_of(schema, "allOf", Place(path)), own]}


def plain_escapes(text: str) -> str:
    r"""Write characters instead of ``\u00e9`` and ``\U0001f600``, whose zeros the library's converter loses.

    Raises ``UnicodeEncodeError`` for half a surrogate pair, which is not a character.
    """

    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2]
        if digits is None:
            return match[0]
        code = int(digits, 16)
        return f"\\x{code:02x}" if code < 0x80 else chr(code)  # a quote or a bracket keeps its escape

    plain = ESCAPE.sub(character, text)
    plain.encode()
    return plain
