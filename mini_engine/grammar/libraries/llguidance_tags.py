"""L7: structural tags in llguidance's dialect of Lark.

Free text is one lexeme that ends as soon as a trigger is complete; the library calls it lazy. Formats that its lexer
would read more narrowly than they are meant, such as regular expressions beside each other, are refused by name.
"""

import json
from collections.abc import Callable
from typing import Any

from mini_engine.grammar.base import GrammarError

FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags"},
    "tags_with_separator": {"tags", "separator"},
}
SWITCHES = {"triggered_tags": {"stop_after_first"}, "tags_with_separator": {"at_least_one", "stop_after_first"}}


class TagRules:
    """The rules of one grammar, written as its formats are read. ``json_schema`` returns the text of a schema."""

    def __init__(self, json_schema: Callable[[Any], str]) -> None:
        """Begin without rules."""
        self.json_schema = json_schema
        self.rules = list[str]()

    def grammar(self, form: Any) -> str:
        """Return the grammar of a format. Raises ``GrammarError``. Mutates."""
        return "\n".join([f"start: {self.expression(form)}", "FREE: /(.|\\n)*/", *self.rules])

    def expression(self, form: Any) -> str:
        """Return the right side of a rule. Raises ``GrammarError``. Mutates."""
        kind = form.get("type", "tag") if isinstance(form, dict) else None
        if kind not in FIELDS:
            raise GrammarError(
                f"the format {kind!r} is none of those that llguidance takes in structural tags: {', '.join(FIELDS)}; "
                "choose one, or the backend xgrammar"
            )
        if not FIELDS[kind] <= form.keys() <= FIELDS[kind] | SWITCHES.get(kind, set()) | {"type"}:
            raise GrammarError(f"the format {kind} has {sorted(form)}; here it has {sorted(FIELDS[kind])}")
        match kind:
            case "const_string":
                return quoted(form["value"])
            case "json_schema":
                return f"%json {self.json_schema(form['json_schema'])}"
            case "sequence":
                return f"({' '.join(map(self.expression, listed(form, 'elements')))})"
            case "or":
                return f"({' | '.join(map(self.expression, listed(form, 'elements')))})"
            case "tag":
                return self.after(form, quoted(form["begin"]))
            case "triggered_tags":
                return self.triggered(form)
        return self.separated(form)

    def after(self, tag: dict[str, Any], begin: str) -> str:
        """Return a tag behind its beginning, which ``begin`` stands for. Mutates."""
        return f"{begin} {self.expression(tag['content'])} {quoted(tag['end'])}"

    def separated(self, form: dict[str, Any]) -> str:
        """Return tags with a text between them and no other. Mutates."""
        one = f"({' | '.join(map(self.expression, listed(form, 'tags')))})"
        tags = one if form.get("stop_after_first") else f"{one} ({quoted(form['separator'])} {one})*"
        return f"({tags})" if form.get("at_least_one") else f"({tags})?"

    def triggered(self, form: dict[str, Any]) -> str:
        """Return free text in which a trigger begins one of the tags. Mutates."""
        names = []
        for tag in listed(form, "tags"):
            begin = tag.get("begin") if isinstance(tag, dict) else None
            trigger = next((each for each in listed(form, "triggers") if str(begin).startswith(str(each))), None)
            if not isinstance(begin, str) or not trigger:
                raise GrammarError(f"the tag {begin!r} begins with none of the triggers {form['triggers']}")
            rest = {**tag, "begin": begin[len(trigger) :]}
            name = f"tag_{len(self.rules)}"
            self.rules += [f"{name}_free[lazy]: FREE {quoted(trigger)}", f"{name}: {name}_free {self.expression(rest)}"]
            names.append(name)
        once = " | ".join(names)
        return f"({once} | FREE)" if form.get("stop_after_first") else f"(({once})* FREE)"


def quoted(text: Any) -> str:
    """Return a text as Lark writes it. Raises ``GrammarError`` for anything else."""
    if not isinstance(text, str):
        raise GrammarError(f"a structural tag has {text!r} where a text belongs")
    return json.dumps(text, ensure_ascii=False)


def listed(form: dict[str, Any], field: str) -> list[Any]:
    """Return a list of a format. Raises ``GrammarError`` for anything else, and for an empty one."""
    found = form[field]
    if not isinstance(found, list) or not found:
        raise GrammarError(f"{field} of a structural tag is {found!r}; it is a list of at least one")
    return found
