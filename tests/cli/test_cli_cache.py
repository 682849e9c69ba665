"""``mini-engine cache``: the tree in the terminal is the tree in the engine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from mini_engine.bench.reuse import edge_tokens
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.app import app
from mini_engine.cli.cache import LABEL_WIDTH, QUESTIONS, STORIES, drawn, shortened, tree_edges
from mini_engine.radix_cache import RadixCache

TOKENIZER = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], env={"COLUMNS": "160"})


def report(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def paths(edges: list[dict[str, Any]]) -> list[str]:
    """The text from the root to the end of each edge."""
    texts: list[str] = []
    for edge in edges:
        texts.append((texts[edge["parent"]] if edge["parent"] is not None else "") + edge["text"])
    return texts


def test_json_is_the_tree_of_the_prompts() -> None:
    """One token a page, one new token, which has no keys: what is cached are the prompts and nothing else."""
    known = report(*STORIES, "--page-size", "1", "--max-new-tokens", "1")
    ids = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in STORIES]
    assert known["num_pages_cached"] == known["num_pages_inserted"] == edge_tokens(ids)
    assert sum(edge["num_tokens"] for edge in known["edges"]) == edge_tokens(ids)
    assert set(STORIES) <= set(paths(known["edges"]))
    assert known["num_tokens"] == sum(map(len, ids))
    assert known["num_tokens_hit"] == known["num_tokens"] - edge_tokens(ids), "waiting reaches the bound"
    assert known["hit_rate"] == known["num_tokens_hit"] / known["num_tokens"]
    assert (known["num_pages_evicted"], known["num_pages_locked"], known["num_uses"]) == (0, 0, 4)
    assert known["num_nodes"] == len(known["edges"])
    assert known["depth"] == 1 + max(edge["depth"] for edge in known["edges"])


def test_by_default_stories_and_chats_run_and_the_system_prompt_is_shared() -> None:
    known = report()
    assert known["num_uses"] == len(STORIES) + len(QUESTIONS)
    (system,) = [edge for edge in known["edges"] if "<|im_start|>system" in edge["text"]]
    assert (system["depth"], system["num_uses"]) == (0, len(QUESTIONS) - 1)
    assert known["hit_rate"] > 0.25
    result = invoke()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "cache"
    assert len(lines) == 1 + known["num_nodes"] + 3
    for line, edge in zip(lines[1:], known["edges"], strict=False):
        # What was drawn is in the order of the report, four columns deeper with every step down.
        assert re.search(r"['\"]", line).start() == 4 * (edge["depth"] + 1)
        assert f"{edge['num_pages']} page" in line
        assert f"{edge['num_uses']} use" in line
        assert line.endswith(f"at {edge['last_used']}")
        assert repr(edge["text"])[:10] in line
    assert f"hit rate {known['hit_rate']:.1%}" in result.stdout
    assert f"{known['num_pages_inserted']} pages went in, 0 were evicted" in result.stdout


def test_few_pages_evict_and_the_orders_differ() -> None:
    runs = {order: report("--num-pages", "24", "--eviction", order) for order in ("lru", "mru")}
    for known in runs.values():
        assert known["num_pages"] == 24
        assert known["num_pages_evicted"] == known["num_pages_inserted"] - known["num_pages_cached"] > 0
    assert paths(runs["lru"]["edges"]) != paths(runs["mru"]["edges"])


def test_a_run_that_is_stopped_shows_what_is_locked() -> None:
    known = report("--steps", "2", "--running", "1", STORIES[0])
    assert 0 < known["num_pages_locked"] == known["num_pages_cached"]
    assert {edge["locks"] for edge in known["edges"]} == {1}
    assert invoke("--steps", "2", "--running", "1", STORIES[0]).stdout.count("  locked\n") == known["num_nodes"]
    assert report("--steps", "0")["num_nodes"] == 0
    assert invoke("--steps", "0").stdout.startswith("cache\n0 requests of 0 tokens")


def test_prompts_of_a_file_come_after_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{STORIES[1]}\n\n{STORIES[2]}\n")
    one = report("--file", str(file), STORIES[0])
    assert one["edges"] == report(*STORIES[:3])["edges"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eviction", "clock"], "eviction is 'clock'; choose one of lru, lfu, fifo, mru, priority"),
        (["--page-size", "0"], "page_size is 0; it must be a whole number of at least 1"),
        (["--num-pages", "2"], "prompt 1, 'Once upon a ti … d in a forest.': request 0 may need"),
        (["a", ""], "prompt 2, '': the prompt has 0 tokens; give at least 1"),
        (["--file", "no/such/file"], "--file no/such/file cannot be read"),
    ],
)
def test_faulty_input_is_one_line_on_standard_error_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


class Letters:
    """Token 0 is "a", and so on; 26 is what rich would read as markup."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("[red]" if token == 26 else chr(97 + token) for token in tokens)


def test_the_worked_example_with_keys_and_markup() -> None:
    cache = RadixCache(2)
    cache.insert([0, 1, 2, 3], [0, 1])
    cache.insert([0, 1, 26, 26], [5, 2])
    cache.insert([0, 1], [3], "tenant")
    cache.record(cache.match([0, 1, 2, 3]), 5)
    cache.lock(cache.match([0, 1, 2, 3]))
    cache.lock(cache.match([0, 1]))
    top = drawn(tree_edges(cache, Letters()))
    (tenant, own) = top.children
    assert str(tenant.label) == "key 'tenant'"
    assert [str(child.label) for child in tenant.children] == ["'ab'  1 page, 0 uses, at 3"]
    assert str(own.label) == "'ab'  1 page, 1 use, at 6  locked 2 times"
    assert [str(child.label) for child in own.children] == [
        "'cd'  1 page, 1 use, at 5  locked",
        "'[red][red]'  1 page, 0 uses, at 2",
    ]


def test_long_texts_lose_their_middle() -> None:
    assert shortened("a\nb") == "'a\\nb'"
    long = shortened("x" * 50 + "end")
    assert len(long) <= LABEL_WIDTH
    assert long.endswith("end'")
    assert " … " in long
