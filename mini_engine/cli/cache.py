"""``mini-engine cache``: run prompts through an engine with the radix cache and show the tree that they leave."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from mini_engine.cli import options
from mini_engine.cli.start import input_errors, start
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.llm import make_engine
from mini_engine.prompts import encode_chat, encode_prompt
from mini_engine.radix_cache import EVICTIONS, Node, RadixCache
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import POLICIES
from mini_engine.view import EngineView

STORIES = [
    "Once upon a time there was a fox named Mila who lived in a forest.",
    "Once upon a time there was a fox named Tom who lived in a forest.",
    "Once upon a time there was a bear named Mila.",
    "One day, a cat found a red ball.",
]
SYSTEM = "You tell short stories. They end well."
QUESTIONS = ["Tell me a story about a fox named Ruva.", "Tell me a story about a fox named Ida.", "Who is Ida?"]
LABEL_WIDTH = 34  # characters of an edge's text; longer ones lose their middle


@dataclass(frozen=True)
class Edge:
    """A node as it is reported. ``parent`` is the index of another edge, ``None`` right below a root."""

    text: str
    num_tokens: int
    num_pages: int
    num_uses: int
    last_used: int
    locks: int
    depth: int
    parent: int | None
    cache_key: str | None


def tree_edges(cache: RadixCache, tokenizer: PreTrainedTokenizerBase) -> list[Edge]:
    """Return the edges of all trees of ``cache``, parents before children."""
    places = dict[int, int]()
    edges = list[Edge]()
    for depth, node in cache.descend():
        places[node.number] = len(edges)
        parent = places.get(node.parent.number) if node.parent else None
        text = tokenizer.decode(node.tokens)
        key = root_of(node).cache_key
        sizes = (len(node.tokens), len(node.pages), node.num_uses, node.last_used, node.lock_count)
        edges.append(Edge(text, *sizes, depth, parent, key))
    return edges


def root_of(node: Node) -> Node:
    """Return the root of the tree that ``node`` is in."""
    while node.parent is not None:
        node = node.parent
    return node


def figures(engine: Engine, cache: RadixCache, edges: Sequence[Edge]) -> dict[str, Any]:
    """Return what the cache did and what it looks like now."""
    stats = cache.stats
    return {
        **asdict(stats),
        "hit_rate": stats.hit_rate,
        "num_nodes": len(edges),
        "depth": max((edge.depth + 1 for edge in edges), default=0),
        "num_pages_cached": cache.num_pages,
        "num_pages_locked": cache.num_pages - cache.num_evictable,
        "num_pages": EngineView(engine).num_pages,
    }


def shortened(text: str) -> str:
    """Return ``text`` in quotes on one line, without its middle if it is long."""
    shown = repr(text)
    half = (LABEL_WIDTH - 3) // 2
    return shown if len(shown) <= LABEL_WIDTH else f"{shown[:half]} … {shown[-half:]}"


def drawn(edges: Sequence[Edge]) -> Tree:
    """Return the tree to print; one branch below the top for every cache key."""
    top = Tree("cache")
    roots = dict[str | None, Tree]()
    branches = list[Tree]()
    for edge in edges:
        if edge.cache_key not in roots:
            key = edge.cache_key
            roots[key] = top if key is None else top.add(Text(f"key {key!r}", style="bold"))
        label = Text.assemble(
            shortened(edge.text),
            (f"  {counted(edge.num_pages, 'page')}, {counted(edge.num_uses, 'use')}, at {edge.last_used}", "dim"),
            ("  locked" if edge.locks == 1 else f"  locked {edge.locks} times" if edge.locks else "", "yellow"),
        )
        branches.append((roots[edge.cache_key] if edge.parent is None else branches[edge.parent]).add(label))
    return top


def counted(number: int, noun: str) -> str:
    """Return "1 page" or "2 pages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def summary(known: dict[str, Any]) -> str:
    """Return the figures as three lines of text."""
    return (
        f"{counted(known['num_uses'], 'request')} of {known['num_tokens']} tokens: {known['num_tokens_hit']} not "
        f"computed, hit rate {known['hit_rate']:.1%}\n"
        f"{counted(known['num_nodes'], 'node')}, {known['depth']} deep; {known['num_pages_cached']} of "
        f"{known['num_pages']} pages cached, {known['num_pages_locked']} of them locked\n"
        f"{known['num_pages_inserted']} pages went in, {known['num_pages_evicted']} were evicted"
    )


def read_prompts(
    prompts: Sequence[str], file: Path | None, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], str]]:
    """Return ids and text of what to run: arguments, then the lines of ``file``, or some stories and chats.

    Raises ``ValueError`` for a file that cannot be read or has no lines.
    """
    texts = list(prompts)
    if file is not None:
        try:
            lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--file {file} cannot be read ({error}); give a text file, one prompt a line") from error
        if not lines:
            raise ValueError(f"--file {file} has no lines; write one prompt on each")
        texts += lines
    chats = []
    if not texts:
        texts = STORIES
        if tokenizer.chat_template:
            chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask}] for ask in QUESTIONS]
    plain = [(encode_prompt(tokenizer, text), text) for text in texts]
    return plain + [(encode_chat(tokenizer, chat, think=False), chat[-1]["content"]) for chat in chats]


def run(engine: Engine, prompts: Sequence[tuple[list[int], str]], params: SamplingParams, steps: int | None) -> None:
    """Step until all is done, or ``steps`` times. Raises ``ValueError`` for a prompt that cannot be run."""
    for number, (ids, text) in enumerate(prompts, start=1):
        try:
            engine.add_request(ids, params)
        except ValueError as error:
            raise ValueError(f"prompt {number}, {shortened(text)}: {error}") from error
    done = 0
    while engine.has_work and (steps is None or done < steps):
        engine.step()
        done += 1


@dataclass(frozen=True)
class Sharing:
    """How the prompts share the pool."""

    eviction: Annotated[str, typer.Option(help=f"Who goes first: {', '.join(EVICTIONS)}.")] = "lru"
    policy: Annotated[str, typer.Option(help=f"Who is let in first: {', '.join(POLICIES)}.")] = "lpm"
    page_size: Annotated[int, typer.Option(help="Tokens in a page; edges are cut between pages.")] = 4
    num_pages: Annotated[int | None, typer.Option(help="Pages in the pool; few make it evict.")] = None
    running: Annotated[int, typer.Option(help="So many requests at a time.")] = 2
    wait: Annotated[bool, typer.Option(help="Wait for a beginning that another request is just computing.")] = True

    def config(self) -> EngineConfig:
        """Build the configuration, which checks every option."""
        return EngineConfig(
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_running_requests=self.running,
            max_tokens_per_step=64,
            policy=self.policy,
            preemption=True,
            prefix_cache="radix",
            eviction=self.eviction,
            wait_for_prefix=self.page_size if self.wait else None,
        )


@options.with_groups
def cache(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="What to run; some stories and chats if not given.")
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="More prompts, one on each line.")] = None,
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = 12,
    sharing: Sharing,
    steps: Annotated[int | None, typer.Option(min=0, help="Stop after so many steps and show what is locked.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a drawing.")] = False,
    engine: options.Engine = None,
) -> None:
    """Run PROMPTS with the radix cache and draw the tree: text, pages, uses and last use of every edge."""
    with input_errors():
        params = SamplingParams(max_new_tokens=max_new_tokens)
        driver, tokenizer = start(model, engine, sharing.config(), params)
        served = make_engine(driver)
        run(served, read_prompts(prompts or [], file, tokenizer), params, steps)
    tree = EngineView(served).tree
    assert tree is not None, "the configuration asks for one"
    edges = tree_edges(tree, tokenizer)
    known = figures(served, tree, edges)
    if as_json:
        typer.echo(json.dumps({**known, "edges": [asdict(edge) for edge in edges]}))
        return
    Console(highlight=False).print(drawn(edges))
    typer.echo(summary(known))
