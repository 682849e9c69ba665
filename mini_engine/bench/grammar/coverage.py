"""``bench grammar --parts coverage``: how many JSON Schemas of a folder a backend compiles, and whether it keeps them.

Every schema is compiled, and texts are written under those that compile by choosing among the tokens that the masks
allow. The package ``jsonschema`` says whether each text is valid, formats too. It is no part of the engine. Instances
that come with a schema are matched (``instances``).
"""

import codecs
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from tqdm import tqdm

from mini_engine.bench.grammar.instances import Case, Judge, cases_of
from mini_engine.bench.grammar.loads import tiny_tokenizer
from mini_engine.bench.grammar.masks import cpu_ms
from mini_engine.bench.workload import percentile
from mini_engine.grammar.backends import make_backend
from mini_engine.grammar.base import (
    SHALLOW,
    GrammarBackend,
    GrammarError,
    GrammarObject,
    GrammarOptions,
    TooManyStatesError,
    UnsupportedKeywordError,
)
from mini_engine.grammar.tokens import TokenTable
from mini_engine.tiny.corpus import IM_END

NUM_TEXTS = 8  # written under each schema
MOST_TOKENS = 200  # of a text; one that finds no end by then is given up
CLOSING = {b'"', b"}", b"]", b","}
SHOWN = 12  # reasons of refusals in the printed table; all of them are in the JSON


@dataclass
class Coverage:
    """One backend over all schemas. Seconds are CPU time of compiling a schema or refusing it, all threads together.

    ``refusals``: reason -> how many schemas. ``narrowed``: compiled, but written texts nest less deep than allowed.
    ``texts`` were written to their end, ``unfinished`` were given up; ``invalid``: name of the schema, text. Of
    ``unjudged`` the package cannot say it: a pattern that Python does not read, a reference to elsewhere.
    """

    backend: str
    schemas: int = 0
    compiled: int = 0
    narrowed: int = 0
    cpu_s: list[float] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    texts: int = 0
    unfinished: int = 0
    unjudged: int = 0
    invalid: list[tuple[str, str]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures, percentiles in the place of single times."""
        return {
            "backend": self.backend,
            "schemas": self.schemas,
            "compiled": self.compiled,
            "narrowed": self.narrowed,
            "cpu_p50_s": percentile(self.cpu_s, 50),
            "cpu_p99_s": percentile(self.cpu_s, 99),
            "cpu_max_s": max(self.cpu_s),
            "texts": self.texts,
            "unfinished": self.unfinished,
            "unjudged": self.unjudged,
            "invalid": self.invalid,
            "refusals": dict(self.refusals.most_common()),
        }


def read_schemas(place: Path, count: int, seed: int) -> list[Case]:
    """Return ``count`` schemas drawn from ``place``, all if it is 0 or there are no more.

    ``place`` is a folder, in which every ``*.json`` at any depth holds schemas, or a file with a schema on each line:
    see ``cases_of``. Raises ``typer.BadParameter`` if there is none.
    """
    if place.is_dir():
        files = sorted(place.rglob("*.json"))
        texts = [(str(path.relative_to(place)), path.read_text(encoding="utf-8", errors="replace")) for path in files]
    else:
        lines = place.read_text(encoding="utf-8").splitlines() if place.is_file() else []
        texts = [(f"{place.name}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    cases = drawn([case for name, text in texts for case in cases_of(name, text)], count, seed)
    if not cases:
        raise typer.BadParameter(f"{place} holds no schemas; give a folder with *.json, or a file of JSON lines")
    return list(cases)


def drawn(schemas: Sequence[Any], count: int, seed: int) -> Sequence[Any]:
    """Return the first ``count`` of the schemas in a drawn order, so that a larger draw begins like a smaller one.

    All of them, in their own order, for a ``count`` of 0 or if there are no more.
    """
    whole = not 0 < count < len(schemas)
    return schemas if whole else random.Random(seed).sample(schemas, len(schemas))[:count]


def measure_coverage(schemas: Sequence[Case], names: Sequence[str], seed: int) -> Iterator[dict[str, Any]]:
    """Yield the summary of each backend over the schemas, with the vocabulary of the embedded model.

    Raises ``ValueError`` for a backend whose library is missing.
    """
    tokenizer = tiny_tokenizer()
    stop = tokenizer.token_to_id(IM_END)
    assert stop is not None, "the embedded model has it"
    table = TokenTable.from_tokenizer(tokenizer, tokenizer.get_vocab_size(), frozenset({stop}))
    for name in names:
        backend = make_backend(name, table, GrammarOptions())
        coverage = Coverage(name)
        judge = Judge(tokenizer, table)
        for case in tqdm(schemas, desc=f"schemas with {name}", unit="schema"):
            grammar = compile_one(backend, case.schema, coverage)
            if grammar is not None:
                judge.take(case, grammar)
                write_texts(grammar, table, case, coverage, seed)
        yield coverage.summary() | {"instances": judge.judged.summary()}


def compile_one(backend: GrammarBackend, text: str, coverage: Coverage) -> GrammarObject | None:
    """Compile a schema, ``None`` if the backend refuses it. Mutates ``coverage``."""
    made: list[GrammarObject] = []

    def attempt() -> None:
        try:
            made.append(backend.compile(("json_schema", text)))
        except GrammarError as error:
            coverage.refusals[reason_of(error)] += 1

    coverage.schemas += 1
    coverage.cpu_s.append(cpu_ms(attempt) / 1e3)
    if not made:
        return None
    coverage.compiled += 1
    coverage.narrowed += any(SHALLOW in note for note in made[0].stats.narrowed)
    return made[0]


def reason_of(error: GrammarError) -> str:
    """Return a refusal without what differs from schema to schema: its place, values and numbers."""
    if isinstance(error, TooManyStatesError):
        return "too many states"
    if isinstance(error, UnsupportedKeywordError):
        return f"keyword {error.keyword!r}"
    text = re.sub(r"at /\S*", "at …", str(error).splitlines()[0])
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", text)[:100]


def write_texts(grammar: GrammarObject, table: TokenTable, case: Case, coverage: Coverage, seed: int) -> None:
    """Write ``NUM_TEXTS`` texts under a schema and validate them. Mutates ``coverage``."""
    validator = validator_of(json.loads(case.schema))
    draw = random.Random(f"{seed} {case.name}")
    for _ in range(NUM_TEXTS):
        text = random_text(grammar.copy(), table, draw)
        if text is None:
            coverage.unfinished += 1
            continue
        coverage.texts += 1
        valid = is_valid(text, validator)
        coverage.unjudged += valid is None
        if valid is False:
            coverage.invalid.append((case.name, text.decode(errors="replace")))


def validator_of(schema: Any) -> Any:
    """Return the validator of the draft that ``schema`` names, of 2020-12 if it names none; it fetches nothing.

    Raises ``typer.BadParameter`` without the package ``jsonschema``.
    """
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY
    except ImportError as error:
        raise typer.BadParameter(f"coverage needs {error.name}; pip install 'jsonschema[format-nongpl]'") from None
    kind = validator_for(schema, default=Draft202012Validator)
    return kind(schema, format_checker=Draft202012Validator.FORMAT_CHECKER, registry=REGISTRY)


def is_valid(text: bytes, validator: Any) -> bool | None:
    """Whether a text is JSON and valid, ``None`` if the package cannot judge it: a reference to elsewhere, say."""
    from referencing.exceptions import Unresolvable

    try:
        return bool(validator.is_valid(json.loads(text)))
    except (re.error, Unresolvable):
        return None
    except ValueError:
        return False


def is_utf8(text: bytes) -> bool:
    """Whether bytes can begin a text."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    return True


def allowed_tokens(grammar: GrammarObject, vocab_size: int) -> list[int]:
    """Return the tokens that the mask allows, read off logits: every backend has its own form of mask."""
    mask = grammar.allocate_vocab_mask(vocab_size, 1)
    logits = torch.zeros(1, vocab_size)
    grammar.fill_vocab_mask(mask, 0)
    grammar.apply_vocab_mask(logits, mask)
    return np.flatnonzero(logits[0].numpy() == 0).tolist()


def random_text(grammar: GrammarObject, table: TokenTable, draw: random.Random, length: int = 25) -> bytes | None:
    """Write a text by walking the masks; ``None`` if it has no end after ``MOST_TOKENS`` tokens. Mutates ``grammar``.

    Also ``None`` if a library gives the grammar up, as llguidance does at its limits. After ``length`` tokens it ends
    as soon as it may, and prefers tokens that close something.
    """
    spelling = table.token_bytes
    text = b""
    for step in range(MOST_TOKENS):
        try:
            allowed = set(allowed_tokens(grammar, table.vocab_size))
        except GrammarError:
            return None
        may_end = bool(allowed & table.stop_ids)
        if may_end and (draw.random() < 0.4 or step > length):
            return text
        allowed -= table.stop_ids
        near = [token for token in sorted(allowed) if spelling[token] in CLOSING]
        choice = near if near and draw.random() < (0.3 if step < length else 0.8) else sorted(allowed)
        token = draw.choice(choice) if choice else None
        if token is not None and not is_utf8(text + spelling[token]):
            # Bytes that are not UTF-8 may come in xgrammar's own strings: see its module.
            whole = [one for one in choice if is_utf8(text + spelling[one])]
            token = draw.choice(whole) if whole else None
        if token is None:
            return text if may_end else None
        grammar.accept_token(token)
        text += spelling[token]
    return None


def print_coverage(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the figures of each backend, the commonest reasons of its refusals, and texts that are not valid."""
    typer.echo(
        f"\n{'backend':12}{'schemas':>8}{'compiled':>9}{'share':>7}{'narrowed':>9}{'CPU p50, s':>11}{'p99':>7}"
        f"{'max':>7}{'texts':>8}{'invalid':>8}{'no end':>7}"
    )
    for row in rows:
        typer.echo(
            f"{row['backend']:12}{row['schemas']:8}{row['compiled']:9}{row['compiled'] / row['schemas']:7.1%}"
            f"{row['narrowed']:9}{row['cpu_p50_s']:11.3f}{row['cpu_p99_s']:7.2f}{row['cpu_max_s']:7.2f}"
            f"{row['texts']:8}{len(row['invalid']):8}{row['unfinished']:7}"
        )
    print_instances(rows)
    for row in rows:
        typer.echo(f"\nrefused by {row['backend']}: {row['schemas'] - row['compiled']}")
        for reason, count in list(row["refusals"].items())[:SHOWN]:
            typer.echo(f"{count:8}  {reason}")
        for name, text in row["invalid"][:SHOWN]:
            typer.echo(f"invalid under {name}: {text:.200}")


def print_instances(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what became of the instances that come with the schemas, if any do."""
    if not any(row["instances"]["valid"] + row["instances"]["invalid"] for row in rows):
        return
    typer.echo(
        f"\n{'backend':12}{'right':>8}{'invalid':>9}{'accepted':>9}{'valid':>9}{'rejected':>9}{'share':>7}{'silent':>8}"
    )
    for row in rows:
        judged = row["instances"]
        silent = len(judged["silent"])
        rejected = sum(judged["stated"].values()) + silent
        typer.echo(
            f"{row['backend']:12}{judged['right']:8}{judged['invalid']:9}{len(judged['false_accepts']):9}"
            f"{judged['valid']:9}{rejected:9}{rejected / max(judged['valid'], 1):7.1%}{silent:8}"
        )
    for row in rows:
        for reason, count in row["instances"]["stated"].items():
            typer.echo(f"{count:8}  valid and rejected by {row['backend']}: {reason}")
        for what in ("false_accepts", "silent"):
            for name, text in row["instances"][what][:SHOWN]:
                typer.echo(f"{what} of {row['backend']} under {name}: {text:.200}")
