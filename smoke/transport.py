"""How results travel from a candidate's process to its judge: JSON for the structure, safetensors for the tensors.

Owns: the file format. Must not know: checks. Nothing that is read here can run code: no pickle, and both formats are
checked before use.
"""

import json
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smoke.check import Plain, ProbeError, Values

MAX_TENSOR_BYTES = 512 * 2**20  # of one result; the largest honest one has about 15 MiB
MAX_JSON_BYTES = 16 * 2**20
TENSOR_KEY = "$tensor"


def write_answer(folder: Path, index: int, answer: Values | ProbeError, seconds: float) -> None:
    """Write the answer of the probe number ``index``. The JSON file appears last, and whole."""
    tensors: dict[str, Tensor] = {}
    body: dict[str, Any] = {"seconds": seconds}
    if isinstance(answer, ProbeError):
        body["error"] = {"kind": answer.kind, "message": answer.message, "place": answer.place}
    else:
        body["values"] = flatten(answer, tensors)
        save_file(tensors, folder / f"{index}.safetensors")
    partial = folder / f"{index}.partial"
    partial.write_text(json.dumps(body))
    partial.rename(folder / f"{index}.json")


def flatten(value: Plain, tensors: dict[str, Tensor]) -> Any:
    """Replace every tensor by its name in ``tensors``, which is filled. Mutates ``tensors``."""
    if isinstance(value, Tensor):
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
        if "error" in body:
            error = body["error"]
            return ProbeError(str(error["kind"]), str(error["message"]), str(error["place"])), seconds
        require_regular(folder / f"{index}.safetensors", MAX_TENSOR_BYTES)
        return restore(body["values"], load_file(folder / f"{index}.safetensors")), seconds
    except (OSError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"the result cannot be read: {type(error).__name__}: {error}") from error


def read_json(file: Path) -> Any:
    """Read a JSON file that a candidate's process wrote. Raises ``ValueError`` if it is no plain small JSON file."""
    try:
        require_regular(file, MAX_JSON_BYTES)
        return json.loads(file.read_text())
    except (OSError, RecursionError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error


def require_regular(file: Path, max_bytes: int) -> None:
    """Raise ``ValueError`` for a link, a pipe, a device or a large file: a candidate may have put one there."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{file.name} is no regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"{file.name} is larger than {max_bytes >> 20} MiB")


def restore(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Put the tensors back."""
    if isinstance(value, dict):
        if set(value) == {TENSOR_KEY}:
            return tensors[value[TENSOR_KEY]]
        return {key: restore(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [restore(item, tensors) for item in value]
    return value
