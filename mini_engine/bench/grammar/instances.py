"""Instances that come with a schema: whether a grammar takes the valid ones and refuses the others.

An instance is written as ``json.dumps`` writes it, with its members in their own order and characters as themselves,
and goes to the matcher in the tokens of the embedded model, a stop token last. It is accepted if all of them are.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from mini_engine.grammar.base import SHALLOW, GrammarError, GrammarObject, TokenRefusedError
from mini_engine.grammar.schema.keywords import (
    DIGITS,
    FIRST_ITEMS,
    INTEGERS,
    NO_MORE_ITEMS,
    ORDER,
    OTHER_NAMES,
    OTHER_TYPES,
    UNDECLARED,
)
from mini_engine.grammar.schema.values import OPEN_DIGITS
from mini_engine.grammar.tokens import TokenTable

LEXEME = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
A_FORMAT = "the format "
# What may be noted in ``GrammarStats.narrowed`` where a text is refused, by what stands there.
MAY_EXPLAIN: dict[str, tuple[str, ...]] = {
    "declared name": (ORDER, UNDECLARED, SHALLOW),
    "other name": (UNDECLARED, OTHER_NAMES, SHALLOW),
    "items": (FIRST_ITEMS, NO_MORE_ITEMS),
    "value": (OTHER_TYPES, SHALLOW),
    "inside a string": (A_FORMAT,),
    "inside a fraction": (INTEGERS, DIGITS),
    "inside a number": (),
    "inside a long number": (DIGITS,),
}


@dataclass(frozen=True)
class Case:
    """A schema as text, and its instances, each with whether it is valid."""

    name: str
    schema: str
    tests: Sequence[tuple[Any, bool]] = ()


@dataclass
class Judged:
    """What became of the instances of the schemas that compiled.

    ``false_accepts``: name of the schema, text. ``stated``: note -> false rejects that it may be the reason of.
    ``silent``: the other ones, each with what stands before and behind the place. ``right``: schemas with instances of
    which none is judged wrongly.
    """

    valid: int = 0
    invalid: int = 0
    right: int = 0
    false_accepts: list[tuple[str, str]] = field(default_factory=list)
    stated: Counter[str] = field(default_factory=Counter)
    silent: list[tuple[str, str]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures; the commonest notes come first."""
        return vars(self) | {"stated": dict(self.stated.most_common())}


def cases_of(name: str, text: str) -> Iterator[Case]:
    """Yield the schemas of a text: of the groups of JSON-Schema-Test-Suite, of maskbench, or the text itself.

    A text may also be an object with the schema, or its text, in ``json_schema``.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None  # the backend says what is wrong with it
    groups = value if isinstance(value, list) else [value]
    if value and all(isinstance(group, Mapping) and {"schema", "tests"} <= group.keys() for group in groups):
        for number, group in enumerate(groups):
            tests = [(test["data"], test["valid"]) for test in group["tests"]]
            own = f"{name}#{number}" if value is groups else name
            yield Case(own, json.dumps(group["schema"]), tests)
        return
    inner = value.get("json_schema", text) if isinstance(value, Mapping) else text
    yield Case(name, inner if isinstance(inner, str) else json.dumps(inner))


@dataclass
class Judge:
    """Feeds the instances of a schema to its grammar. ``judged`` is what was found so far."""

    tokenizer: Tokenizer
    table: TokenTable
    judged: Judged = field(default_factory=Judged)

    def take(self, case: Case, grammar: GrammarObject) -> None:
        """Judge all instances of one schema. Mutates ``judged``."""
        wrong = 0
        for data, is_valid in case.tests:
            text = written(data)
            refused_at = self.refused_at(text, grammar.copy())
            self.judged.valid += is_valid
            self.judged.invalid += not is_valid
            wrong += is_valid == (refused_at is not None)
            if not is_valid and refused_at is None:
                self.judged.false_accepts.append((case.name, text))
            elif is_valid and refused_at is not None:
                self.blame(case, text, refused_at, grammar.stats.narrowed)
        self.judged.right += bool(case.tests) and not wrong

    def refused_at(self, text: str, grammar: GrammarObject) -> int | None:
        """Return the byte that the grammar does not take, the length if that is the end; ``None`` if it takes all.

        The bytes of the token that is refused are tried one by one. Mutates ``grammar``.
        """
        place = 0
        for token in self.tokens_of(text):
            spelling = self.table.token_bytes[token]
            if not takes(grammar, token):
                return place + next((n for n, byte in enumerate(spelling) if not takes(grammar, self.alone(byte))), 0)
            place += len(spelling)
        return None if takes(grammar, min(self.table.stop_ids)) else place

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text, a token for each byte if the tokenizer writes some characters in another way."""
        tokens: list[int] = self.tokenizer.encode(text).ids
        spelled = text.encode()
        is_whole = b"".join(self.table.token_bytes[token] for token in tokens) == spelled
        return tokens if is_whole else [self.alone(byte) for byte in spelled]

    def alone(self, byte: int) -> int:
        """Return the token that spells one byte."""
        return self.table.token_bytes.index(bytes([byte]))

    def blame(self, case: Case, text: str, place: int, narrowed: Sequence[str]) -> None:
        """Count a false reject under the first note of ``narrowed`` that speaks of what stands there. Mutates.

        The place of the note is not compared with that of the text, as references move it. So a reject that has
        another cause may count as stated, where a note of the same kind stands elsewhere in the schema.
        """
        notes = MAY_EXPLAIN[part_at(text, place, json.loads(case.schema))]
        found = next((note for note in notes for each in narrowed if note in each), None)
        if found is None:
            before, behind = text.encode()[:place][-80:], text.encode()[place:][:80]
            self.judged.silent.append(
                (case.name, f"{before.decode(errors='replace')}⇥{behind.decode(errors='replace')}")
            )
        else:
            self.judged.stated[found.strip()] += 1


def written(data: Any) -> str:
    """Return an instance as JSON; half of a surrogate pair is no text and stays escaped, with all beside it."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data)
    return text


def takes(grammar: GrammarObject, token: int) -> bool:
    """Whether the grammar takes a token; one that a library gives up takes none. Mutates ``grammar`` if it does."""
    try:
        grammar.accept_token(token)
    except (TokenRefusedError, GrammarError):
        return False
    return True


def part_at(text: str, place: int, schema: Any) -> str:
    """Return what of a JSON text stands at a byte: a key of ``MAY_EXPLAIN``.

    What ends an object, or comes behind a member, stands for the next name; what ends an array, for its items.
    """
    characters = len(text.encode()[:place].decode(errors="ignore"))
    lexemes = [*LEXEME.finditer(text)]
    closers: list[str] = []
    for index, found in enumerate(lexemes):
        word = found[0]
        if found.end() > characters or (found.end() == len(text) and word[-1].isdigit()):
            behind = [each[0] for each in lexemes[index : index + 3]]
            return kind_of(behind, closers, found.start() == characters, keys_in(schema))
        if word in "[{":
            closers.append(word)
        elif word in "]}":
            closers.pop()
    return "value"


def kind_of(behind: Sequence[str], closers: Sequence[str], begins: bool, names: set[str]) -> str:
    """Return the key of ``MAY_EXPLAIN`` for the lexemes from the refused one on, inside of open brackets.

    ``begins``: that one is refused at its first byte. ``names``: of a schema.
    """
    word = behind[0]
    if closers and word in ",]}" and closers[-1] == "[":
        return "items"
    if word == "," and len(behind) > 1:
        behind = behind[1:]
    if word == "}" or behind[1:2] == [":"]:
        return "declared name" if word == "}" or json.loads(behind[0]) in names else "other name"
    if begins or word[0] not in '"-0123456789':
        return "value"
    if word[0] == '"':
        return "inside a string"
    return f"inside a {'fraction' if set('.eE') & {*word} else 'long number' if len(word) > OPEN_DIGITS else 'number'}"


def keys_in(value: Any) -> set[str]:
    """Return all names of members anywhere in a value; a name that is in no schema is not declared there."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return {*(value if isinstance(value, Mapping) else ())}.union(*map(keys_in, inside))
