"""What a child has used since one began to wait for its answer: processor time, time on the clock, and files.

Owns: asking the system. Must not know: checks, results.
"""

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

TIME_SECONDS, DISK_SECONDS = 0.1, 0.5  # between two looks
MAX_ENTRIES, MAX_DEPTH = 5000, 60
BLOCK = 512


class Deadline:
    """The limit of a process that has ``seconds`` on the clock, and no other."""

    def __init__(self, seconds: float) -> None:
        """Begin to count."""
        self.seconds = seconds
        self.began = time.monotonic()

    def spent(self) -> float:
        """Return how many of its seconds are used up."""
        return time.monotonic() - self.began

    def excess(self) -> str | None:
        """Return what is used beyond its limit, in words; the empty text for time, ``None`` for nothing."""
        return "" if self.spent() > self.seconds else None


class Use:
    """Compares the use of the process ``pid``, which keeps its files in ``folder``, with its limits.

    ``seconds`` are those of the processor, of the process and of all that it started; on the clock it has ``patience``
    times as many. The time that it stood in the processor's queue is not counted: so what others do on the machine
    takes nothing from it. ``disk`` are the bytes that it may keep, ``None`` for any number.
    """

    def __init__(
        self, pid: int, root: int, folder: Path, seconds: float, patience: float, disk: int | None = None
    ) -> None:
        """Begin to count. ``root`` adopts what the process leaves behind."""
        self.pid = pid
        self.folder = folder
        self.seconds = seconds
        self.patience = patience
        self.disk = disk
        self.root = root
        self.began = self.looked_at_time = self.looked_at_disk = time.monotonic()
        self.processor = self.processor_before = tree_seconds(self.root)
        self.queued = self.queued_before = queued_seconds(pid)

    def spent(self) -> float:
        """Return how many of its seconds are used up."""
        self.processor = max(self.processor, tree_seconds(self.root))
        self.queued = max(self.queued, queued_seconds(self.pid))  # 0 when it is gone
        on_the_clock = time.monotonic() - self.began - (self.queued - self.queued_before)
        return max(self.processor - self.processor_before, on_the_clock / self.patience)

    def excess(self) -> str | None:
        """Return what is used beyond its limit, in words; the empty text for time, ``None`` for nothing."""
        now = time.monotonic()
        if now - self.looked_at_time > TIME_SECONDS:
            self.looked_at_time = now
            if self.spent() > self.seconds:
                return ""
        if self.disk is not None and now - self.looked_at_disk > DISK_SECONDS:
            self.looked_at_disk = now
            return self.too_many_files(self.disk)
        return None

    def too_many_files(self, limit: int) -> str | None:
        """Return what is wrong with its files: those in its folder, and those that are open and have no name."""
        used, entries = 0, 0
        waiting = [(str(self.folder), 0)]
        while waiting:
            folder, depth = waiting.pop()
            with suppress(OSError), os.scandir(folder) as found:
                for entry in found:
                    entries += 1
                    with suppress(OSError):
                        used += entry.stat(follow_symlinks=False).st_blocks * BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
                    if entries > MAX_ENTRIES or depth > MAX_DEPTH:
                        return f"it made more than {MAX_ENTRIES} files, or folders {MAX_DEPTH} deep"
        if used + self.unnamed_bytes() > limit:
            return f"it kept more than {limit >> 20} MiB in files"
        return None

    def unnamed_bytes(self) -> int:
        """Return the size of deleted files, and of memory in the form of a file, that the process holds open."""
        used = 0
        with suppress(OSError):
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                with suppress(OSError):
                    found = os.stat(f"/proc/{self.pid}/fd/{name}")
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        used += found.st_blocks * BLOCK
        return used


def parent_of(pid: int) -> int:
    """Return the process that started another; the other itself when it is gone."""
    import psutil  # a student's own run does not count the time of the processor

    with suppress(psutil.Error, OSError):
        return int(psutil.Process(pid).ppid())
    return pid


def tree_seconds(root: int) -> float:
    """Return the processor time of a process, of what it started and of what these started, ended ones included."""
    import psutil

    seconds = 0.0
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        with suppress(psutil.Error, OSError):
            seconds += sum(psutil.Process(pid).cpu_times()[:4])
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return seconds


def queued_seconds(pid: int) -> float:
    """Return how long a process was ready to run while others ran, 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
