"""What an answer depended on, so that it can be computed again, alone, and compared to the bit: its receipt.

A receipt is a dictionary of plain JSON. ``mini-engine replay`` (``cli/replay.py``) runs its request again.

Nothing here changes a request: log-probabilities are taken from the rows of logits that its tokens came from, after the
step. An engine that no request has asked for a receipt has no listener and does nothing more than before.
"""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_engine.checkpoint import INDEX_FILE, TINY_MODEL, TOKENIZER_FILES, weight_files
from mini_engine.config import EngineConfig
from mini_engine.engine_core import EngineCore, Entry
from mini_engine.invariant.attention import InvariantAttention, query_rows
from mini_engine.invariant.findings import CAPS, cpu
from mini_engine.outputs import StepOutput
from mini_engine.overlay import REFERENCE, installed
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams

FORMAT = 1
ANSWER = ("token_ids", "text", "finish_reason", "matched")
MORE_OF_TOKENIZER = "tokenizer_config.json merges.txt added_tokens.json special_tokens_map.json chat_template.jinja"
LIBRARIES = ("mini-engine", "torch", "transformers", "tokenizers", "numpy")
LIBRARY_OF = {"compiled": "numba", "triton": "triton", "xgrammar": "xgrammar", "llguidance": "llguidance"}
LIBRARY_OF["outlines"] = "outlines-core"  # all of them: of a way to compute, or of a grammar backend
Facts = dict[str, Any]  # "checkpoint" and "environment" of a receipt
Receipt = dict[str, Any]


class Receipts:
    """A listener of an engine's steps: it gives the answers that ask for it their receipts as they end.

    An answer that was aborted or failed gets none.
    """

    def __init__(self, engine: EngineCore, folder: Path) -> None:
        """Listen to no step yet. ``folder``: the one that the engine's model was loaded from."""
        self.engine = engine
        self.folder = folder
        self.facts: Facts = {}
        self.logprobs: dict[str, list[str | None]] = {}  # of the requests that have not ended

    def begin(self) -> None:
        """Find the facts and listen from now on; later calls do nothing. Raises ``ValueError`` as ``facts_of``."""
        if not self.facts:
            self.facts = facts_of(self.engine.driver, self.folder)
            self.engine.log.listeners.append(self)

    def __call__(self, step: StepOutput) -> None:
        """Note the log-probabilities of a step's tokens, and give receipts to what ended. Mutates the outputs."""
        for delta in step.deltas:
            entry = self.engine.entries.get(delta.request_id)
            if entry is None or not entry.request.params.receipt:
                continue
            known = self.logprobs.setdefault(delta.request_id, [])
            if delta.token_id is not None:
                known.append(None if delta.logits is None else logprob_bits(delta.logits, delta.token_id))
            if delta.finish_reason is not None:
                del self.logprobs[delta.request_id]
            if delta.finish_reason in ("stop", "length"):
                entry.output.receipt = make_receipt(self.facts, config_of(self.engine.driver), entry, known)


def config_of(driver: SamplingDriver) -> EngineConfig:
    """Return the configuration, with ``quantize`` as the weights are: those of a folder may be quantized already."""
    stored: Any = getattr(driver.model.projections, "quantize", driver.config.quantize)
    return replace(driver.config, quantize=stored)


def logprob_bits(logits: Tensor, token_id: int) -> str:
    """Return the log-probability of a token in a row of the model's logits [V], float64, with all its bits as text."""
    return float(logits.double().log_softmax(-1)[token_id]).hex()


def make_receipt(facts: Facts, config: EngineConfig, entry: Entry, logprobs: Sequence[str | None]) -> Receipt:
    """Return the receipt of a request that has ended.

    ``logprobs``: one for each token of the answer; ``None`` for a token that a grammar forced, for which the model was
    not asked.
    """
    params, output = entry.request.params, entry.output
    backend = output.grammar_stats and output.grammar_stats.backend
    receipt = {
        "receipt": FORMAT,
        **facts,
        "engine": asdict(config),
        "grammar": backend and {"backend": backend, "version": version_of(LIBRARY_OF.get(backend, "mini-engine"))},
        "request": {"prompt_ids": output.prompt_ids, "params": asdict(params)},
        "answer": {name: getattr(output, name) for name in ANSWER} | {"logprobs": logprobs},
        "cannot_promise": cannot_promise(config, params),
    }
    receipt = json.loads(json.dumps(receipt, default=repr))  # as it will be read
    return {**receipt, "digest": digest_of(receipt)}


def digest_of(receipt: Receipt) -> str:
    """Return the sha256 of a receipt's canonical form, with its own ``digest`` as null."""
    return hashlib.sha256(json.dumps({**receipt, "digest": None}, sort_keys=True).encode()).hexdigest()


NOT_INVARIANT = "batch_invariant is off: bits may depend on what shared a step, on chunks, threads and the process"
NO_SEED = "no seed: the tokens cannot be drawn again; a replay gives them to the model and compares log-probabilities"


def cannot_promise(config: EngineConfig, params: SamplingParams) -> list[str]:
    """Return, in words, what keeps a replay from giving the same bits for certain; empty if nothing does."""
    reasons = [] if config.batch_invariant else [NOT_INVARIANT]
    reasons += [] if can_be_drawn_again(params) else [NO_SEED]
    return reasons + [f"the receipt has not the code of {name!r}" for name in params.logits_processors or ()]


def can_be_drawn_again(params: SamplingParams) -> bool:
    """Whether the tokens are a function of the logits: greedy, or drawn with a seed."""
    return params.is_greedy or params.seed is not None


def facts_of(driver: SamplingDriver, folder: Path) -> Facts:
    """Return what all answers of a driver depend on. Raises ``ValueError`` as ``checkpoint_of``."""
    return {"checkpoint": checkpoint_of(folder), "environment": environment_of(driver)}


def checkpoint_of(folder: Path) -> dict[str, Any]:
    """Return the digests of a checkpoint's files. Reads all of them, once; ``None`` stands for the embedded folder.

    Digests are of the files and not of the tensors in memory: these are packed by then, and the hub shows the same
    digests. Raises ``ValueError`` for a file that cannot be read.
    """
    return {
        "folder": None if folder == TINY_MODEL else str(folder.resolve()),
        "weights": file_digests([*weight_files(folder), folder / INDEX_FILE]),
        "configuration": file_digests([folder / "config.json", folder / "generation_config.json"]),
        "tokenizer": file_digests([folder / name for name in (*TOKENIZER_FILES, *MORE_OF_TOKENIZER.split())]),
    }


def environment_of(driver: SamplingDriver) -> dict[str, Any]:
    """Return the machine, the libraries, and what the engine chose for itself on this machine."""
    config = driver.config
    libraries = [*LIBRARIES, *([LIBRARY_OF[config.compute]] if config.compute in LIBRARY_OF else [])]
    return {
        "sources": sources_digest(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in libraries}},
        "cpu": cpu()["model name"],
        "device": torch.cuda.get_device_name(config.device) if "cuda" in config.device else config.device,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "caps": {name: os.environ[name] for name in CAPS if name in os.environ},
        "threads": torch.get_num_threads(),
        "products": dict(getattr(driver.model.projections, "choices", {})),
        "attention": attention_of(driver),
    }


def attention_of(driver: SamplingDriver) -> str:
    """Return the name of what makes the attention of each step; with the rows that the invariant one pads to."""
    make: Any = driver.make_attention
    name: str = getattr(make, "func", make).__qualname__
    if name != InvariantAttention.__qualname__:
        return name
    cfg = driver.model.config
    rows = query_rows(cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, driver.model.embedding.dtype)
    return f"{name}, query rows {' '.join(map(str, rows))}"


def version_of(library: str) -> str:
    """Return the version of a distribution; "0+unknown" for one that is not installed, as a folder of sources is."""
    with suppress(PackageNotFoundError):
        return version(library)
    return "0+unknown"


def sources_digest() -> str:
    """Return one digest of all modules of the engine, with those of ``--engine`` in the place of its own."""
    overlay = installed()
    own = {} if overlay is None else {name: overlay.folder / name for name in overlay.files.values()}
    digest = hashlib.sha256()
    for file in sorted(REFERENCE.rglob("*.py")):
        digest.update(own.get(str(file.relative_to(REFERENCE)), file).read_bytes())
    return digest.hexdigest()


def file_digests(files: Sequence[Path]) -> dict[str, str]:
    """Return the sha256 of those of ``files`` that exist, by name. Raises ``ValueError`` for one that is unreadable."""
    found = dict[str, str]()
    for file in filter(Path.is_file, files):
        try:
            about = file.stat()
            found[file.name] = file_digest(file, about.st_size, about.st_mtime_ns)
        except OSError as error:
            raise ValueError(f"{file} cannot be read for a receipt ({error}); ask for none") from error
    return found


@cache
def file_digest(file: Path, size: int, mtime_ns: int) -> str:
    """Return the sha256 of a file, read once for each of its states: ``size`` in bytes, time of the last change."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
