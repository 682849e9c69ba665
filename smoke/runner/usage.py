"""What a child has used since it began to wait for one answer: processor time, and files.

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


class Use:
    """Compares the use of the process ``pid``, which keeps its files in ``folder``, with its limits."""

    def __init__(self, pid: int, folder: Path, seconds: float, disk: int | None) -> None:
        """Begin to count the time; ``disk`` are the bytes that it may keep, ``None`` for any number."""
        self.pid = pid
        self.folder = folder
        self.seconds = seconds
        self.disk = disk
        self.began = self.processor_seconds()
        self.time_look = self.disk_look = time.monotonic()

    def excess(self) -> str | None:
        """Return what is used beyond its limit, in words; the empty text for time, ``None`` for nothing."""
        now = time.monotonic()
        if now - self.time_look > TIME_SECONDS:
            self.time_look = now
            if self.processor_seconds() - self.began > self.seconds:
                return ""
        if self.disk is not None and now - self.disk_look > DISK_SECONDS:
            self.disk_look = now
            return self.too_many_files(self.disk)
        return None

    def processor_seconds(self) -> float:
        """Return the processor time that the process and its ended children have used, 0 when it is gone."""
        import psutil  # a student's own run does not count it

        with suppress(psutil.Error, OSError):
            return float(sum(psutil.Process(self.pid).cpu_times()[:4]))
        return 0.0

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
