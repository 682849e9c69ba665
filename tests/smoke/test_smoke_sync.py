"""Generated tables: in step with the manifest, the bank, the checks and the code's own defaults."""

from dataclasses import replace

import pytest

from smoke.course.sync import options_table, refreshed, stale_files
from smoke.framework.manifest import FunctionName, load_manifest, parse_manifest


def test_every_committed_table_is_up_to_date() -> None:
    assert not stale_files(), "run `python -m smoke sync`"


def test_a_region_is_refilled_and_the_text_around_it_is_left_alone() -> None:
    text = "before\n<!-- generated: options L1 -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    new = refreshed(text)
    assert new.startswith("before\n<!-- generated: options L1 -->\n| option | off |")
    assert new.endswith("<!-- end -->\nafter <!-- end -->\n")
    assert "old" not in new
    assert refreshed(new) == new


def test_an_off_value_that_is_not_the_default_is_refused() -> None:
    lesson = load_manifest().lesson("L1")
    wrong = replace(lesson.options[0], off="'packed'")
    with pytest.raises(ValueError, match="the manifest says off is 'packed', the code's default is 'reference'"):
        options_table(replace(lesson, options=(wrong,)))
    gone = replace(lesson.options[0], name=FunctionName.parse("config:EngineConfig.lineer"))
    with pytest.raises(ValueError, match="which the engine does not have"):
        options_table(replace(lesson, options=(gone,)))


def test_an_unknown_kind_of_region_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing generates a region 'tables'"):
        refreshed("<!-- generated: tables L1 -->\n<!-- end -->")


def test_an_option_lacking_a_key_is_refused() -> None:
    lesson = {"id": "L9", "slug": "x", "title": "x", "goal": "x", "option": [{"name": "config:EngineConfig.dtype"}]}
    with pytest.raises(ValueError, match=r"option config:EngineConfig\.dtype lacks the key"):
        parse_manifest({"lesson": [lesson]})
