"""The reader of calls: whatever pieces a text comes in, the content and the calls are the same."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mini_engine.server.hermes import END, CallReader, begin, is_taught

CALL = f'{begin("f")}{{"a": {{"b": "<tool_call>\\n}}"}}}}{END}'
OTHER = f"{begin('fo')}{{}}{END}"
F, FO = ("f", '{"a": {"b": "<tool_call>\\n}"}}'), ("fo", "{}")
READ = {  # text: content, calls, whether one is cut
    "": ("", [], False),
    "Hello. ": ("Hello. ", [], False),
    CALL: ("", [F], False),
    f"{CALL}\n{OTHER}": ("", [F, FO], False),
    f"{CALL}{OTHER}\n": ("", [F, FO], False),
    f"\n So:\n\n{CALL}": ("\n So:", [F], False),
    f"{OTHER} and\n{CALL}.\n": (" and.", [FO, F], False),
    "a <tool_call> is none": ("a <tool_call> is none", [], False),
    "<tool_calls>\n< <<tool_call": ("<tool_calls>\n< <<tool_call", [], False),
    f"<tool_call>\n{OTHER}": ("<tool_call>", [FO], False),
    f"<<<tool_{OTHER}": ("<<<tool_", [FO], False),
    begin("g") + "{}" + END: (begin("g") + "{}" + END, [], False),
    begin("f")[:-3]: ("", [], True),
    f"So:\n{begin('f')[:11]}": ("So:", [], True),
    f"{OTHER}\n{begin('f')[:-1]}": ("", [FO], True),
    begin("f"): ("", [("f", "")], True),
    begin("f") + '{"a': ("", [("f", '{"a')], True),
    begin("f") + '{"a": {"b": 1}': ("", [("f", '{"a": {"b": 1}')], True),
    begin("f") + '{"a": {"b": 1}}': ("", [("f", '{"a": {"b": 1}}')], False),
    begin("f") + '{"a": {"b": 1}}}': ("", [("f", '{"a": {"b": 1}}')], False),
    begin("f") + '{"a": {"b": 1}}}\n</tool': ("", [("f", '{"a": {"b": 1}}')], False),
}


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]], bool]:
    reader = CallReader(["f", "fo"])
    content, calls = "", list[tuple[str, str]]()
    for piece in [*(each for text in pieces for each in reader.add(text)), *reader.flush()]:
        if piece.call is None:
            assert piece.text
            content += piece.text
        elif piece.name is not None:
            assert piece.call == len(calls)
            calls.append((piece.name, ""))
        else:
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls, reader.is_cut


@pytest.mark.parametrize("text", READ)
def test_a_text_is_read_alike_whole_in_two_pieces_and_by_character(text: str) -> None:
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        assert read(pieces) == READ[text]


PARTS = st.sampled_from(
    ["<", "<tool_call>", "\n", " ", "}", "</tool_call>", END, begin("f"), begin("fo"), "{}", "é", CALL, OTHER, "[1]"]
)


@given(st.lists(PARTS, max_size=8).map("".join), st.data())
@example(f"x {CALL} ", None)
def test_no_split_of_any_text_changes_what_is_read(text: str, data: st.DataObject | None) -> None:
    cuts = [] if data is None else data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text]) == read(list(text))


OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.tuples(st.sampled_from(["f", "fo"]), st.dictionaries(st.text(), OBJECTS, max_size=3)), max_size=3),
    st.booleans(),
    st.integers(1, 30),
)
def test_calls_come_back_as_they_were_written(calls: list[tuple[str, object]], is_ascii: bool, length: int) -> None:
    """Also with the marks inside their strings: a line break in JSON is escaped."""
    written = [(name, json.dumps(value, ensure_ascii=is_ascii)) for name, value in calls]
    text = "Now. " + "\n".join(f"{begin(name)}{arguments}{END}" for name, arguments in written)
    pieces = [text[start : start + length] for start in range(0, len(text), length)]
    assert read(pieces) == ("Now." if calls else "Now. ", written, False)


def test_what_may_be_content_is_shown_at_once() -> None:
    reader = CallReader(["f"])
    shown = [
        "".join(piece.text for piece in reader.add(text)) for text in ("Hi", " the", "re <b", " x <tool_", "call x")
    ]
    assert shown == ["Hi", " the", "re <b", " x", " <tool_call x"]


def test_templates_of_other_forms_with_the_same_marks_are_not_taken() -> None:
    assert is_taught('{{ "<tool_call>" }}')
    assert not is_taught("{{ messages }}")
    assert not is_taught('{{ "<tool_call>\n<function=f>" }}')  # Qwen3-Coder
    assert not is_taught('{{ "<tool_call>f\n<arg_key>" }}')  # GLM-4.5
