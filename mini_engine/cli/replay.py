"""``mini-engine replay``: run the requests of receipts again, each alone, and compare with the receipts to the bit."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedTokenizerBase

from mini_engine.cli.answers import complete_samples
from mini_engine.cli.options import Engine, Model
from mini_engine.cli.start import input_errors, start
from mini_engine.config import EngineConfig
from mini_engine.receipt import FORMAT, NO_SEED, Receipt, can_be_drawn_again, digest_of
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams

MOST_BYTES = 1 << 28  # of a file; its values take some times as much memory
# Options of the engine that a replay leaves off: it runs alone.
SHARING = "max_running_requests policy policy_seed preemption num_pages drafts max_draft_rows".split()
SHARING += "prefix_cache eviction wait_for_prefix wait_below_match".split()
GRAMMARS = "grammar_backend json_whitespace jump_forward".split()
Load = Callable[[str | None, EngineConfig], tuple[SamplingDriver, PreTrainedTokenizerBase]]


def replay(
    file: Annotated[Path, typer.Argument(help="Receipts, or answers that hold some: one JSON value, or one a line.")],
    *,
    model: Model = None,
    engine: Engine = None,
) -> None:
    """Run the requests of FILE's receipts again, alone, and compare to the bit. Exit code 1: one differs."""
    code = 0
    with input_errors():
        receipts = read_receipts(file)
        load = lru_cache(1)(lambda folder, config: start(folder, engine, config))
        for number, receipt in enumerate(receipts, start=1):
            before = f"receipt {number} of {len(receipts)}: " if len(receipts) > 1 else ""
            try:
                is_same, lines = replay_one(receipt, model, load)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:  # from outside
                typer.secho(
                    f"error: {before}it cannot be replayed ({type(error).__name__}: {error})", fg="red", err=True
                )
                code = 2
            else:
                typer.echo("\n".join(before + line for line in lines))
                code = max(code, 0 if is_same else 1)
    raise typer.Exit(code)


def read_receipts(file: Path) -> list[Receipt]:
    """Return every receipt in a file, wherever it lies in its JSON. Raises ``ValueError`` if there is none."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes; split it")
        lines = [line for line in data.split(b"\n") if line.strip()]
        values = [data] if len(lines) < 2 or lines[0].strip() in (b"{", b"[") else lines
        found = list(receipts_in([json.loads(value) for value in values]))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give the JSON that --receipt has written") from error
    if not found:
        raise ValueError(f"{file} holds no receipt; ask for one with --receipt, or receipt=True")
    return found


def receipts_in(value: Any) -> Iterator[Receipt]:
    """Yield the receipts within a JSON value: the objects whose "receipt" is a number, the version of the format."""
    if isinstance(value, dict) and type(value.get("receipt")) is int:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from receipts_in(inner)


def replay_one(receipt: Receipt, model: str | None, load: Load) -> tuple[bool, list[str]]:
    """Run a receipt's request; return whether answer, receipt and checkpoint are the same, and what to print.

    Raises ``ValueError`` and what Python raises for a receipt whose parts are missing or of another kind.
    """
    if receipt["receipt"] != FORMAT:
        raise ValueError(f"the receipt has format {receipt['receipt']}; this version reads format {FORMAT}")
    here = compute_again(receipt, model, load)
    fault = first_difference(parts_of(receipt["answer"]), parts_of(here["answer"]))
    fact = first_difference(facts_in(receipt), facts_in(here))
    was_changed = digest_of(receipt) != receipt["digest"]
    lines = ["the receipt was changed after it was written: its digest is another"] if was_changed else []
    lines.append(all_equal(receipt) if fault is None else fault)
    if fact is not None or fault is not None:
        lines.append(f"the first fact that differs: {fact or 'none'}")
    lines += [f"the receipt said beforehand: {reason}" for reason in receipt["cannot_promise"]]
    return fault is None and not was_changed and files_in(receipt) == files_in(here), lines


def compute_again(receipt: Receipt, model: str | None, load: Load) -> Receipt:
    """Run a receipt's request alone -> its receipt here. Raises as ``replay_one`` does.

    Tokens that cannot be drawn again are given to the model, by a receipt's request that goes on from them.
    """
    kept = {name: value for name, value in receipt["engine"].items() if name not in SHARING}
    plain = EngineConfig(**{name: value for name, value in kept.items() if name not in GRAMMARS})
    driver, tokenizer = load(model or receipt["checkpoint"]["folder"], plain)
    grammar, answer, ids = receipt["grammar"], receipt["answer"], receipt["request"]["prompt_ids"]
    driver.config = plain if grammar is None else EngineConfig(**{**kept, "grammar_backend": grammar["backend"]})
    params = SamplingParams(**{**receipt["request"]["params"], "receipt": True})
    if params.num_samples > 1:
        raise ValueError(f"a receipt is of one answer, and its parameters ask for {params.num_samples}")
    if can_be_drawn_again(params):
        return complete_samples(driver, tokenizer, ids, params)[0].receipt or {}
    scoring = SamplingParams(max_new_tokens=1, prompt_logprobs=0, receipt=True)
    (scored,) = complete_samples(driver, tokenizer, [*ids, *answer["token_ids"]], scoring)
    found = [report[0].logprob.hex() for report in (scored.prompt_logprobs or [])[len(ids) :] if report is not None]
    logprobs = [old and new for old, new in zip_longest(answer["logprobs"], found)]
    return {**(scored.receipt or {}), "answer": {**answer, "logprobs": logprobs}, "grammar": grammar}


def all_equal(receipt: Receipt) -> str:
    """Return in words that nothing differs."""
    count, num_forced = len(receipt["answer"]["token_ids"]), receipt["answer"]["logprobs"].count(None)
    is_given = NO_SEED in receipt["cannot_promise"]
    what = "log-probabilities of the given tokens" if is_given else "tokens and log-probabilities"
    forced = f" (a grammar forced {num_forced} tokens, for which there are none)" if num_forced else ""
    return f"{count} of {count} {what} equal, to the bit{forced}"


def parts_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer by the names of its parts: "token 1" and so on, then how it ended."""
    tokens = enumerate(zip_longest(answer["token_ids"], answer["logprobs"]), start=1)
    named = {f"token {number}": f"id {token} at {bits and float.fromhex(bits)}" for number, (token, bits) in tokens}
    return named | {name: value for name, value in answer.items() if name not in ("token_ids", "logprobs")}


def first_difference(then: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return in words where two mappings differ first, ``None`` if they do not."""
    for name in {**then, **here}:
        if then.get(name) != here.get(name):
            return f"{name} is {then.get(name)} in the receipt, {here.get(name)} here"
    return None


def files_in(receipt: Receipt) -> dict[str, Any]:
    """Return the digests of a checkpoint's files by "weights model.safetensors" and so on."""
    return flat({name: value for name, value in receipt["checkpoint"].items() if name != "folder"})


def facts_in(receipt: Receipt) -> dict[str, Any]:
    """Return what may explain a difference, the most telling first."""
    return files_in(receipt) | flat({**receipt["environment"], "grammar": receipt["grammar"]})


def flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested facts as one level: ``{"versions": {"torch": …}}`` becomes ``{"versions torch": …}``."""
    found = dict[str, Any]()
    for name, value in facts.items():
        found |= flat(value, f"{before}{name} ") if isinstance(value, dict) else {f"{before}{name}": value}
    return found
