"""The options that say what an answer must be."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def grammar_option(*names: str, help: str) -> Any:
    """Return an option under the heading of this file's."""
    return typer.Option(*names, help=help, rich_help_panel="What the answer must be")


@dataclass(frozen=True)
class Grammar:
    """At most one grammar, and how the engine keeps to it. ``None``: not given."""

    regex: Annotated[str | None, grammar_option(help="The whole answer matches this regular expression.")] = None
    json_schema: Annotated[
        Path | None, grammar_option(help="The answer is JSON that is valid under the schema in this file.")
    ] = None
    choices: Annotated[str | None, grammar_option(help="The answer is one of these, such as yes,no,maybe.")] = None
    grammar_backend: Annotated[
        str | None,
        grammar_option(
            help="fsm, llguidance, xgrammar or outlines; by default the first of three that takes the grammar."
        ),
    ] = None
    jump_forward: Annotated[
        bool, grammar_option("--jump-forward", help="Append what the grammar forces without asking the model.")
    ] = False

    def params(self, thinks: bool) -> dict[str, Any]:
        """Return the sampling parameters that the options ask for, none if they ask for none.

        ``thinks``: the grammar begins after the model's thought. Raises ``ValueError`` for more than one grammar, a
        file that cannot be read and an empty choice.
        """
        given = {"--regex": self.regex, "--json-schema": self.json_schema, "--choices": self.choices}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are given; an answer has one grammar, so leave one")
        if self.regex is not None:
            return {"regex": self.regex, "reasoning": thinks}
        if self.json_schema is not None:
            return {"json_schema": read_schema(self.json_schema), "reasoning": thinks}
        if self.choices is not None:
            return {"regex": any_of(self.choices), "reasoning": thinks}
        return {}

    def engine_options(self) -> dict[str, Any]:
        """Return the changes to the configuration of an engine for one request.

        Raises ``ValueError`` for options that change nothing without a grammar.
        """
        if self.regex is not None or self.json_schema is not None or self.choices is not None:
            return {"grammar_backend": self.grammar_backend or "auto", "jump_forward": self.jump_forward}
        if self.grammar_backend is not None or self.jump_forward:
            name = "--grammar-backend" if self.grammar_backend is not None else "--jump-forward"
            raise ValueError(
                f"{name} changes nothing without --regex, --json-schema or --choices; add one, or leave it out"
            )
        return {}


def read_schema(file: Path) -> str:
    """Return the text of a schema. Raises ``ValueError`` for a file that cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--json-schema {file} cannot be read ({error}); give a file with a schema") from error


def any_of(choices: str) -> str:
    """Return a regular expression for a list with commas. Raises ``ValueError`` for an empty choice."""
    options = [choice.strip() for choice in choices.split(",")]
    if not all(options):
        raise ValueError(f"--choices is {choices!r}, and one of them is empty; separate them by single commas")
    return "|".join(map(re.escape, options))
