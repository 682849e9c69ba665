"""An example takes the blocks that it needs from the pages before it, and all of them where that is not enough."""

import pytest

from smoke.course.example import blocks, needed_by, run_pages

FIRST = """
```python
import nothing_like_this
print("never needed")
```

```python
base = 2
log = []
```

```python
def double(x):
    return base * x
log.append("a note")
```

```python
import sys as system
system.left_there = 5
```
"""
NEEDS_TWO = """
```python
print(double(21))
```
```output
42
```
"""
NEEDS_A_CHANGE = """
```python
print(log)
```
```output
['a note']
```
"""
NEEDS_A_TRACE = """
```python
import sys
print(sys.left_there)
```
```output
5
```
"""


@pytest.fixture
def pages(tmp_path):
    """Return a maker of two pages: FIRST, and one with the given text."""

    def make(text):
        for name, words in (("first.md", FIRST), ("last.md", text)):
            (tmp_path / name).write_text(words)
        return [tmp_path / "first.md", tmp_path / "last.md"]

    return make


def chosen(first, last):
    """The first words of the blocks that ``needed_by`` chooses."""
    earlier, late = (list(blocks(page)) for page in (first, last))
    return [block.fence.text.split()[:2] for block in needed_by(late, earlier)]


def test_blocks_are_chosen_by_the_names_that_are_used(pages):
    definition, function = ["base", "="], ["def", "double(x):"]
    assert chosen(*pages(NEEDS_TWO)) == [definition, function], "a name inside a function counts"
    assert chosen(*pages(NEEDS_A_CHANGE)) == [definition, function], "a value that a later block uses may be changed"
    assert chosen(*pages(NEEDS_A_TRACE)) == []


def test_what_is_not_needed_does_not_run(pages, capsys):
    assert run_pages(pages(NEEDS_TWO))
    assert capsys.readouterr().out == "42\n"


def test_all_blocks_run_where_the_chosen_ones_print_something_else(pages, capsys):
    assert run_pages(pages(NEEDS_A_TRACE))
    out = capsys.readouterr().out
    assert out.startswith("first.md:2: this block ended with ModuleNotFoundError")
    assert out.endswith("\n5\n")


def test_an_example_that_does_not_hold_is_shown_once(pages, capsys):
    assert not run_pages(pages(NEEDS_TWO.replace("42\n```\n", "43\n```\n")))
    assert capsys.readouterr().out.count("the page shows for this block") == 1
