"""How results travel from a candidate's process to its judge: JSON for the structure, safetensors for the tensors.

Owns: the file format. Must not know: checks. Nothing that is read here can run code: no pickle, and both formats are
checked before use.
"""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smoke.framework.check import Plain, ProbeError, Values, is_tensor

if TYPE_CHECKING:  # an answer without tensors needs no torch
    from torch import Tensor

# Of one answer. The largest honest one has 2.1 million elements and 380,000 items, 32 deep.
MAX_ELEMENTS = 16_000_000
MAX_TENSOR_BYTES = 8 * MAX_ELEMENTS
MAX_JSON_BYTES = 16 * 2**20
MAX_ITEMS, MAX_DEPTH = 2_000_000, 200
TENSOR_KEY = "$tensor"
STACK = "stack.txt"  # in a candidate's folder: where its threads are


def write_answer(folder: Path, index: int, answer: Values | ProbeError, seconds: float) -> None:
    """Write the answer of the probe number ``index``. The JSON file appears last, and whole."""
    tensors: dict[str, Tensor] = {}
    body: dict[str, Any] = {"seconds": seconds}
    if isinstance(answer, ProbeError):
        body["error"] = asdict(answer)
    else:
        body["values"] = flatten(answer, tensors)
        if tensors:
            from safetensors.torch import save_file

            save_file(tensors, folder / f"{index}.safetensors")
    partial = folder / f"{index}.partial"
    partial.write_text(json.dumps(body))
    partial.rename(folder / f"{index}.json")


def flatten(value: Plain, tensors: "dict[str, Tensor]") -> Any:
    """Replace every tensor by its name in ``tensors``, which is filled. Mutates ``tensors``."""
    if is_tensor(value):
        import torch

        name = f"t{len(tensors)}"
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
        return {TENSOR_KEY: name}
    if isinstance(value, dict):
        return {key: flatten(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flatten(item, tensors) for item in value]
    return value


def read_answer(folder: Path, index: int) -> tuple[Values | ProbeError, float]:
    """Read an answer and its seconds. Raises ``ValueError`` for a file that is no answer."""
    try:
        body = read_json(folder / f"{index}.json")
        seconds = float(body["seconds"])
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"the result cannot be read: it took {seconds} seconds")
        if "error" in body:
            error = body["error"]
            return ProbeError(**{each.name: str(error[each.name]) for each in fields(ProbeError)}), seconds
        return restore(body["values"], read_tensors(folder / f"{index}.safetensors"), count(1)), seconds
    except (OSError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the result cannot be read: {type(error).__name__}: {error}") from error


def read_tensors(file: Path) -> "dict[str, Tensor]":
    """Read the tensors of an answer, none if it has no file of them. Raises ``ValueError`` for another kind of file."""
    if not os.path.lexists(file):
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(read_regular(file, MAX_TENSOR_BYTES))
    except SafetensorError as error:
        raise ValueError(f"the result cannot be read: {type(error).__name__}: {error}") from error
    elements = sum(tensor.numel() for tensor in tensors.values())
    if elements > MAX_ELEMENTS:
        raise ValueError(f"the result cannot be read: it has {elements} elements; {MAX_ELEMENTS} is the most")
    return tensors


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file that a candidate's process wrote. Raises ``ValueError`` if it is no plain small JSON file."""
    try:
        return json.loads(read_regular(file, max_bytes))
    except (OSError, RecursionError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error


def read_regular(file: Path, max_bytes: int) -> bytes:
    """Read a file. Raises ``ValueError`` for a pipe, a device or a large file, and ``OSError`` for a link.

    A candidate may have put one there, and may exchange it at any moment: so the file is opened once, without waiting
    for a process to write to it, and looked at through what was opened.
    """
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError(f"{file.name} is no regular file")
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{file.name} is larger than {max_bytes >> 20} MiB")
    return data


def restore(value: Any, tensors: "dict[str, Tensor]", items: Iterator[int], depth: int = 0) -> Any:
    """Put each tensor back in its one place. ``items`` counts what is restored. Mutates ``tensors``.

    A comparison takes time and memory for every item: so a small file that stands for a large answer is refused.
    """
    if next(items) > MAX_ITEMS or depth > MAX_DEPTH:
        raise ValueError(f"the result cannot be read: {MAX_ITEMS} items, {MAX_DEPTH} deep, are the most")
    if isinstance(value, dict):
        if set(value) == {TENSOR_KEY}:
            if value[TENSOR_KEY] not in tensors:
                raise ValueError("the result cannot be read: a tensor is not there, or it is named twice")
            return tensors.pop(value[TENSOR_KEY])
        return {key: restore(item, tensors, items, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [restore(item, tensors, items, depth + 1) for item in value]
    return value
