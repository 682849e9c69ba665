"""L7: the backend ``xgrammar``: an adapter of the xgrammar library, which SGLang and vLLM take by default.

A grammar becomes a pushdown automaton at compile time. Most tokens are decided then, for every place in the automaton;
at a step only those are tried that depend on what is on the stack. Masks are cheap, compiling is not. Parallel to
SGLang's ``constrained/xgrammar_backend.py``.

Known of 0.2.9: the mask lacks some tokens that would be accepted where a rule ends in itself from both sides
(palindromes), so it is narrower than the grammar, never wider. In JSON strings without bounds, and in negated sets of
EBNF, bytes may come that are no UTF-8.
"""

import json
import os
from typing import Any

from torch import Tensor

from mini_engine.grammar.automata.regex import parse_regex
from mini_engine.grammar.base import GrammarBackend, GrammarError, GrammarOptions
from mini_engine.grammar.libraries.library import (
    LibraryGrammar,
    compile_error,
    import_library,
    note_schemas,
    read_format,
)
from mini_engine.grammar.libraries.xgrammar_schema import exact_regex, kept_schema
from mini_engine.grammar.masks import BITS
from mini_engine.grammar.schema.converter import parse_schema
from mini_engine.grammar.schema.keywords import INTEGERS
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKind

JSON_LAYOUT: dict[str, dict[str, Any]] = {
    "spaced": {"any_whitespace": False, "separators": (", ", ": ")},
    "compact": {"any_whitespace": False, "separators": (",", ":")},
    "any": {"any_whitespace": True},
}
FORMATS_OF_TEXT = (
    "const_string json_schema any_text grammar regex sequence or tag triggered_tags tags_with_separator optional plus "
    "star repeat"
)


class XGrammarGrammar(LibraryGrammar):
    """A matcher of xgrammar."""

    def __init__(self, matcher: Any, table: TokenTable) -> None:
        """Follow ``matcher``, which is at its beginning."""
        super().__init__(table)
        self.matcher = matcher

    def advance(self, token_id: int) -> bool:
        """Take in a token; the matcher stays where it is if it refuses. Mutates."""
        return bool(self.matcher.accept_token(token_id))

    def undo(self, count: int) -> None:
        """Undo tokens; there is no limit. Mutates."""
        self.matcher.rollback(count)

    def completes(self) -> bool:
        """Whether the root rule is matched."""
        return bool(self.matcher.is_completed())

    def fill_row(self, mask: Tensor, row: int) -> None:
        """Write int32 [ceil(V / 32)]. The library leaves the bits past V as they were; here they become 0."""
        self.matcher.fill_next_token_bitmask(mask, row)
        used = self.table.vocab_size % BITS
        if used:
            mask[row, -1] &= (1 << used) - 1

    def fork(self) -> None:
        """Go on with a fork, which shares what was compiled. Mutates."""
        self.matcher = self.matcher.fork()

    def try_jump_forward(self) -> bytes:
        """Return the forced text, nothing if it begins or ends inside a character: the library cannot say it then."""
        try:
            return str(self.matcher.find_jump_forward_string()).encode()
        except UnicodeDecodeError:
            return b""


class XGrammarBackend(GrammarBackend):
    """Every kind of grammar."""

    name = "xgrammar"

    def __init__(self, table: TokenTable, options: GrammarOptions | None = None) -> None:
        """Hand the vocabulary over. One grammar is compiled by every core, at most 8.

        Raises ``ValueError`` if the library is missing. Its cache is off: the grammar store keeps what is compiled, and
        two caches would keep it twice.
        """
        super().__init__(table, options)
        self.library = import_library("xgrammar")
        # Special tokens have no bytes in the table. The library takes such ids for special ones and bans them; from a
        # tokenizer it would take "<think>" for seven characters of text.
        info = self.library.TokenizerInfo(
            list(table.token_bytes),
            self.library.VocabType.RAW,
            vocab_size=table.vocab_size,
            stop_token_ids=sorted(table.stop_ids),
        )
        threads = min(8, os.cpu_count() or 1)
        self.compiler = self.library.GrammarCompiler(info, max_threads=threads, cache_enabled=False)

    def build(self, kind: GrammarKind, text: str) -> XGrammarGrammar:
        """Compile ``text``. Raises ``GrammarError``."""
        try:
            match kind:
                case "json_schema":
                    compiled = self.compiler.compile_json_schema(kept_schema(parse_schema(text)), **self.json_layout)
                case "regex":
                    compiled = self.compiler.compile_regex(exact_regex(parse_regex(text)))
                case "ebnf":
                    compiled = self.compiler.compile_grammar(text)
                case "structural_tag":
                    compiled = self.compiler.compile_structural_tag(self.structural_tag(text))
        except (RuntimeError, UnicodeError) as error:
            raise compile_error(kind, error) from error
        grammar = XGrammarGrammar(self.library.GrammarMatcher(compiled), self.table).check_start(kind)
        note_schemas(grammar.stats, kind, text, False, (INTEGERS,))
        return grammar

    @property
    def json_layout(self) -> dict[str, Any]:
        """The library's words for the white space of JSON."""
        return JSON_LAYOUT[self.options.whitespace]

    def structural_tag(self, text: str) -> str:
        """Return a structural tag of the library's newer form, whose schemas and expressions are checked."""
        return json.dumps({"type": "structural_tag", "format": self.checked_format(read_format(text))})

    def checked_format(self, part: Any) -> Any:
        """Return one format with all that is inside it: about text alone, and JSON in the layout of the options."""
        if isinstance(part, list):
            return [self.checked_format(item) for item in part]
        if not isinstance(part, dict):
            return part
        kind = part.get("type", "tag")
        if kind not in FORMATS_OF_TEXT.split():
            raise GrammarError(f"the format {kind!r} is not about text; choose among {FORMATS_OF_TEXT}")
        if kind == "regex":
            return part | {"pattern": exact_regex(parse_regex(str(part.get("pattern"))))}
        if kind != "json_schema":
            return {key: self.checked_format(value) for key, value in part.items()}
        if part.keys() - {"type", "json_schema"}:
            raise GrammarError(
                f"the format json_schema has {sorted(part)}; only its type and json_schema are supported"
            )
        schema = kept_schema(part.get("json_schema"))
        # The library's own json_schema format allows any white space; as a grammar it has the layout of the options.
        return {"type": "grammar", "grammar": str(self.library.Grammar.from_json_schema(schema, **self.json_layout))}
