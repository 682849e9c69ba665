"""The devices of this machine, and how much of their memory is free."""

import contextlib
import ctypes
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def check_device(device: str) -> None:
    """Raise ``ValueError`` for a torch device that is not there, and for "meta", which has no numbers."""
    try:
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {device!r} cannot be used ({str(error).splitlines()[0]}); use another one, such as cpu"
        ) from error


def give_memory_back() -> None:
    """Give the system the memory that this process has freed and still keeps, where its C library can."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def give_threads_back() -> None:
    """End the threads that help the calling one to compute, where they are those of GNU's OpenMP.

    Each thread that computes keeps helpers of its own. Where there are more threads than cores, OpenMP lets a helper
    sleep as soon as it waits, and waking it for each product took a quarter of the speed of decoding.
    """
    with contextlib.suppress(AttributeError, OSError):  # another OpenMP
        ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(1)  # it begins anew when it is needed


def free_memory(device: str) -> int:
    """Return the bytes that can still be had on ``device``. On a CPU no more than the limits of its cgroups leave."""
    kind = torch.device(device)
    if kind.type == "cuda":
        unused = torch.cuda.memory_reserved(kind) - torch.cuda.memory_allocated(kind)
        return torch.cuda.mem_get_info(kind)[0] + unused
    return max(0, min([psutil.virtual_memory().available, *cgroup_memory()]))


def cgroup_memory() -> list[int]:
    """Return the bytes that each limited cgroup of this process has left, of version 2 or 1; none without a limit.

    Pages of files can be given back, so they count as free.
    """
    try:
        lines = OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    left = []
    for line in lines:
        number, controllers, path = line.split(":", maxsplit=2)
        if number == "0":
            top, names, prefix = CGROUPS, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            top, names, prefix = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder == top or top in folder.parents:
                left += memory_left(folder, *names, prefix)
    return left


def memory_left(folder: Path, limit: str, usage: str, prefix: str) -> list[int]:
    """Return what one cgroup has left, in a list that is empty where it has no limit or cannot be read."""
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max"; the top has no files, and a container sees only some
        return []
    files = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return [most - used + files]
