"""Submissions as they arrive: a folder or a zip per student, of which only the manifest's files are ever read.

Owns: names, sizes, paths inside archives. Must not know: Python, checks, scores. Nothing here runs or imports anything
of a submission, and nothing of an archive is unpacked to a path that the archive chose.
"""

import hashlib
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from smoke.manifest import load_manifest

MAX_FILE_BYTES = 512 * 1024  # of one lesson file; the reference's largest has 10 KiB
MAX_ENTRIES = 5000  # of one submission; more are not even listed
PREFIXES = ("", "work/", "mini_engine/", "work/mini_engine/")  # where a lesson file may lie
UNREMARKABLE = {
    "__pycache__", "__MACOSX", ".git", ".DS_Store", ".ipynb_checkpoints", ".pytest_cache", ".smoke.json", "AGENTS.md",
}  # fmt: skip


@dataclass(frozen=True)
class Submission:
    """One student's files by their name in the manifest.

    ``ignored`` names what else was handed in, which is never read. ``faults`` says what could not be read and why.
    """

    name: str
    files: dict[str, str]
    ignored: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    def digest(self, files: tuple[str, ...]) -> str:
        """Return a hash of those of ``files`` that were handed in."""
        whole = hashlib.sha256()
        for file in files:
            whole.update(f"{file}\0{len(self.files.get(file, ''))}\0{self.files.get(file, 'missing')}\0".encode())
        return whole.hexdigest()


def lesson_files() -> tuple[str, ...]:
    """Return every file that a student may hand in."""
    return tuple(file for lesson in load_manifest().written for file in lesson.files)


def read_submissions(folder: Path) -> list[Submission]:
    """Read every submission of ``folder``, in the order of their names. Raises ``ValueError`` if there is none.

    A submission that cannot be read is still one, with the reason among its faults.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; it has to hold one folder or zip file per student")
    found: list[Submission] = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in UNREMARKABLE or entry.is_symlink():
            continue
        if not entry.is_dir() and entry.suffix.lower() != ".zip":
            continue
        name = free_name(entry.name if entry.is_dir() else entry.stem, {submission.name for submission in found})
        try:
            found.append(read_folder(entry, name) if entry.is_dir() else read_zip(entry, name))
        except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, ValueError) as error:
            found.append(Submission(name, {}, (), (f"{entry.name} cannot be read: {error}",)))
    if not found:
        raise ValueError(f"{folder} holds no submission; it has to hold one folder or zip file per student")
    return found


def free_name(wanted: str, taken: set[str]) -> str:
    """Turn a name into one that is safe as a file's name and that nobody else has."""
    base = re.sub(r"[^\w.@+-]+", "_", wanted).lstrip(".@+-")[:80] or "unnamed"
    name, number = base, 1
    while name.lower() in {other.lower() for other in taken}:  # some file systems do not tell cases apart
        number += 1
        name = f"{base}-{number}"
    return name


def read_folder(folder: Path, name: str) -> Submission:
    """Read a student's folder. Links are never followed: they may lead anywhere."""
    members: dict[str, Path] = {}
    for path in walk(folder):
        if len(members) == MAX_ENTRIES:
            break
        members[path.relative_to(folder).as_posix()] = path

    def load(member: str) -> bytes:
        status = members[member].lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        refuse_large(status.st_size)
        with members[member].open("rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)

    return sort_members(name, list(members), load)


def walk(folder: Path) -> Iterator[Path]:
    """Yield everything beneath ``folder`` that is no folder, links included, following none."""
    for entry in sorted(folder.iterdir()):
        if entry.name in UNREMARKABLE:
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from walk(entry)
        else:
            yield entry


def read_zip(file: Path, name: str) -> Submission:
    """Read a student's zip.

    Members are read into memory under a limit and written nowhere, so a path that climbs out of the archive, or a bomb,
    has nothing to act on.
    """
    with zipfile.ZipFile(file) as archive:
        infos = [info for info in archive.infolist()[:MAX_ENTRIES] if not info.is_dir()]
        members = {info.filename.replace("\\", "/"): info for info in infos}

        def load(member: str) -> bytes:
            mode = members[member].external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise ValueError("it is no regular file")
            refuse_large(members[member].file_size)
            with archive.open(members[member]) as stream:
                return stream.read(MAX_FILE_BYTES + 1)  # the size that the archive states may be a lie

        listed = [member for member in members if not UNREMARKABLE & set(PurePosixPath(member).parts)]
        return sort_members(name, listed, load)


def sort_members(name: str, members: list[str], load: Callable[[str], bytes]) -> Submission:
    """Tell lesson files from the rest and read them with ``load``."""
    files: dict[str, str] = {}
    faults: list[str] = []
    root = common_folder(members)
    wanted: dict[str, str] = {}  # member -> lesson file
    for file in lesson_files():
        present = [root + prefix + file for prefix in PREFIXES if root + prefix + file in members]
        if len(present) > 1:
            faults.append(f"{file} was handed in {len(present)} times; {present[0]} counts")
        if present:
            wanted[present[0]] = file
    for member, file in wanted.items():
        try:
            data = load(member)
            refuse_large(len(data))
            files[file] = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            faults.append(f"{member} is not UTF-8 text")
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
            faults.append(f"{member} was not read: {error}")
    return Submission(name, files, tuple(m for m in members if m not in wanted), tuple(faults))


def common_folder(members: list[str]) -> str:
    """Return ``name/`` if everything lies in one folder that is none of ours: zips are often made that way."""
    tops = {member.partition("/")[0] for member in members}
    ours = {prefix.rstrip("/") for prefix in PREFIXES} | {file.partition("/")[0] for file in lesson_files()}
    if len(tops) != 1 or tops & ours or not all("/" in member for member in members):
        return ""
    return f"{tops.pop()}/"


def refuse_large(size: int) -> None:
    """Raise ``ValueError`` for a file beyond the limit."""
    if size > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES >> 10} KiB, the limit of a lesson file")
