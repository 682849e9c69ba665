"""Landlock: which files a process may still read and write, kept by the kernel (Linux 5.13 and newer).

Owns: the system calls, and which folders an interpreter needs. Must not know: checks, submissions. The rules are those
of https://docs.kernel.org/userspace-api/landlock.html.
"""

import ctypes
import importlib.util
import os
import struct
import sys
import sysconfig
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from smoke.framework.manifest import ENGINE, ROOT, SUITE

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
FILE_RIGHTS = 1 << 1 | READ_FILE | 1 << 14  # write, read, truncate: all that a rule about a single file may name
# What libraries ask of the system: its libraries, its clock, its processors, random numbers. No list of other users.
SYSTEM = (
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/lib",
    "/lib64",
    "/sys/devices",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys",
    "/proc/version",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    "/dev/random",
)
# Oracles of the lessons inside of a library that is needed for tokenizers.
ORACLES = ("transformers/generation", "transformers/integrations", "transformers/models")
TOKENIZERS = ("auto", "qwen2", "qwen3", "__init__.py")  # what a tokenizer is loaded with, of transformers/models
MODELS = ("modeling_", "modular_")
PACKAGES = ("torch", "numpy", "transformers", "psutil")  # they may lie in folders of several kinds


def libc() -> ctypes.CDLL:
    """Return the C library."""
    return ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Readable:
    """What a process may read: everything beneath ``trees``, and the names alone of what lies beneath ``listed``."""

    trees: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()

    def covers(self, path: str) -> bool:
        """Whether a path lies in what may be read or listed."""
        where = Path(os.path.realpath(path))
        return any(where.is_relative_to(folder) for folder in (*self.trees, *self.listed))

    def plus(self, *trees: str) -> "Readable":
        """Return the same with more trees."""
        return Readable((*self.trees, *trees), self.listed)


def restrict_files(folder: Path, readable: Readable) -> bool:
    """Refuse writing outside ``folder``, reading outside it and ``readable``, programs, signals and TCP to the outside.

    Returns whether the kernel knows Landlock.
    """
    version = libc().syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = sum(1 << bit for bit in range(13))  # execute, write, read, list, remove and make anything
    rights |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)  # move across folders, truncate
    parts = [rights, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0]  # files, TCP, signals and sockets
    attributes = struct.pack("=3Q", *parts)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc().syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    add_rule(rules, str(folder), rights & ~1)
    add_rule(rules, os.devnull, rights & FILE_RIGHTS)
    for path in readable.trees:
        add_rule(rules, path, READ_FILE | READ_FOLDER)
    for path in readable.listed:
        add_rule(rules, path, READ_FOLDER)
    failed = libc().syscall(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)
    return bool(failed == 0)


def add_rule(rules: int, path: str, allowed: int) -> None:
    """Allow something beneath ``path``; what does not exist needs no rule."""
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    allowed = allowed if os.path.isdir(path) else allowed & FILE_RIGHTS
    libc().syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, target), 0)
    os.close(target)


def interpreter_paths(without: Sequence[Path] = ()) -> Readable:
    """Return what Python, its packages and the system's libraries lie in, apart from ``without`` and the oracles.

    The course is one of these, wherever it is installed. A folder that is needed and lies inside of something closed,
    such as ``.venv`` in a checkout, is readable.
    """
    packages = package_folders()
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), *SYSTEM}
    folders |= {*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)), *map(str, packages)}
    oracles = [folder / name for folder in packages for name in ORACLES]
    course = course_folders([*packages, *(site for folder in sorted(folders) for site in sites_in(Path(folder)))])
    closed = [Path(os.path.realpath(path)) for path in (*without, *course, *oracles)]
    models = [folder / "transformers" / "models" for folder in packages]
    trees = dict.fromkeys(file for folder in models for file in tokenizer_files(folder))
    listed = dict.fromkeys(folder for folder in models if folder.is_dir())
    for name in sorted(folders - {"/"}):
        folder = Path(os.path.realpath(name))
        divide(Path(name), {path for path in closed if path not in folder.parents}, trees, listed)
    return Readable(tuple(map(str, trees)), tuple(map(str, listed)))


def package_folders() -> list[Path]:
    """Return the folders that packages are imported from: Python's own, a user's, or any other on ``sys.path``."""
    specs = filter(None, map(importlib.util.find_spec, PACKAGES))  # found, not imported
    others = [str(Path(spec.origin).parent.parent) for spec in specs if spec.origin]
    paths = sysconfig.get_paths()
    return [Path(os.path.realpath(path)) for path in dict.fromkeys((paths["purelib"], paths["platlib"], *others))]


def sites_in(folder: Path) -> Iterator[Path]:
    """Yield the folders of packages that belong to any Python beneath ``folder``."""
    for pattern in ("python3*/*-packages", "lib*/python3*/*-packages"):
        yield from folder.glob(pattern)


def course_folders(sites: Sequence[Path]) -> list[Path]:
    """Return where the course lies: the whole checkout, and its packages among others, also of another installation."""
    root = Path(os.path.realpath(ROOT))
    copies = [folder / name for folder in (root, *sites) for name in (ENGINE.name, SUITE.name)]
    return copies if root in sites else [root, *copies]


def divide(folder: Path, closed: Set[Path], trees: dict[Path, None], listed: dict[Path, None]) -> None:
    """Add ``folder`` to ``trees``, or to ``listed`` if something closed lies in it, and then its parts to either.

    The two are sets that keep an order: there are thousands of paths, and each is looked up.
    """
    if not folder.is_relative_to("/proc"):  # /proc/self leads elsewhere in another process
        folder = Path(os.path.realpath(folder))
    if not folder.exists() or folder in listed or any(p in closed or p in trees for p in (folder, *folder.parents)):
        return
    if not any(folder in path.parents for path in closed):
        trees[folder] = None
        return
    listed[folder] = None
    for path in sorted(folder.iterdir()):
        divide(path, closed, trees, listed)


def tokenizer_files(models: Path) -> Iterator[Path]:
    """Yield the files of transformers' models that tokenizers are loaded with, and no model."""
    for name in TOKENIZERS:
        path = models / name
        files = [*path.glob("*.py"), *path.glob("__pycache__/*.pyc")] if path.is_dir() else [path]
        yield from (file for file in files if not file.name.startswith(MODELS))
