"""Submissions as they arrive: a folder or an archive per student, of which only the manifest's files are ever read.

Owns: names, sizes, paths inside archives. Must not know: Python, checks, scores. Nothing here runs or imports anything
of a submission, and nothing of an archive is unpacked to a path that the archive chose.
"""

import hashlib
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from smoke.framework.manifest import load_manifest

MAX_FILE_BYTES = 512 * 1024  # of one lesson file; the reference's largest has 10 KiB
MAX_ENTRIES = 5000  # of one submission; more are not even listed
MAX_DEPTH = 40  # folders within folders
MAX_ARCHIVE_BYTES = 256 * 2**20  # of a tar, unpacked: reaching a member means reading everything before it
TAR = re.compile(r"\.(tar|tar\.\w+|tgz|tbz2?|txz)$", re.IGNORECASE)
MANIFEST = "lessons/manifest.toml"  # what has it is a whole course
LESSON_FOLDER = re.compile(r"L(\d+)(?!\d)", re.IGNORECASE)  # such as L4, l4_sampler
UNREMARKABLE = {
    "__pycache__",
    "__MACOSX",
    ".git",
    ".venv",
    ".DS_Store",
    ".ipynb_checkpoints",
    ".pytest_cache",
    ".smoke.json",
    "AGENTS.md",
    ".vscode",
    ".idea",
    "Thumbs.db",
    "desktop.ini",
}
FAULTS = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,
    NotImplementedError,
    ValueError,
)


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


@cache
def files_by_name() -> dict[str, tuple[str, ...]]:
    """Return the lesson files that have each name, with all of their folders and without."""
    found: dict[str, tuple[str, ...]] = {}
    for file in lesson_files():
        parts = PurePosixPath(file).parts
        for start in range(len(parts)):
            name = "/".join(parts[start:])
            found[name] = (*found.get(name, ()), file)
    return found


def read_submissions(folder: Path) -> list[Submission]:
    """Read every submission of ``folder``, in the order of their names. Raises ``ValueError`` if there is none.

    Whatever lies in the folder counts as a submission. One that cannot be read has the reason among its faults.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; it has to hold one folder or archive per student")
    found: list[Submission] = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in UNREMARKABLE:
            continue
        stem = entry.name if entry.is_dir() else TAR.sub("", entry.name) if TAR.search(entry.name) else entry.stem
        name = free_name(stem, {submission.name for submission in found})
        try:
            found.append(read_entry(entry, name))
        except FAULTS as error:
            found.append(Submission(name, {}, (), (f"{one_line(entry.name)} cannot be read: {error}",)))
    if not any(entry.is_dir() or is_archive(entry) for entry in folder.iterdir()):
        raise ValueError(f"{folder} holds no submission; it has to hold one folder or archive per student")
    return found


def is_archive(entry: Path) -> bool:
    """Whether the name is that of a zip or a tar."""
    return entry.suffix.lower() == ".zip" or TAR.search(entry.name) is not None


def read_entry(entry: Path, name: str) -> Submission:
    """Read a student's folder or archive. Raises one of ``FAULTS`` for anything else."""
    if entry.is_symlink():
        raise ValueError("it is a link, and links are not followed")
    if entry.is_dir():
        return read_folder(entry, name)
    if not entry.is_file():
        raise ValueError("it is no regular file")
    if entry.suffix.lower() == ".zip":
        return read_zip(entry, name)
    if TAR.search(entry.name):
        return read_tar(entry, name)
    kind = "a notebook, which is not run" if is_notebook(entry.name) else "neither a folder nor a zip nor a tar"
    raise ValueError(f"it is {kind}; put the lesson's .py files into a folder or a zip")


def is_notebook(member: str) -> bool:
    """Whether the name is that of a notebook."""
    return member.lower().endswith(".ipynb")


def one_line(text: str) -> str:
    """Return a file's name without what would break a line or a document."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def free_name(wanted: str, taken: set[str]) -> str:
    """Turn a name into one that is safe as a file's name and that is not ``taken``."""
    base = re.sub(r"[^\w.@+-]+", "_", wanted).lstrip(".@+-")[:80] or "unnamed"
    name = base
    number = 1
    while name.lower() in {other.lower() for other in taken}:  # some file systems do not tell cases apart
        number += 1
        name = f"{base}-{number}"
    return name


def read_folder(folder: Path, name: str) -> Submission:
    """Read a student's folder. Links are never followed: they may lead anywhere."""
    left_out: list[str] = []
    members = {path.relative_to(folder).as_posix(): path for path in walk(folder, left_out)}

    def load(member: str) -> bytes:
        status = members[member].lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        refuse_large(status.st_size)
        with members[member].open("rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)

    return sort_members(name, list(members), load, left_out)


def walk(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """Yield what is beneath ``folder`` and no folder: the first ``MAX_ENTRIES``, links included, following none.

    What lies deeper than ``MAX_DEPTH`` is left out, and so is a folder that cannot be listed; ``left_out`` is told so.
    """
    waiting = [folder]
    seen = 0
    while waiting and seen < MAX_ENTRIES:
        own = waiting.pop()
        try:
            entries = sorted(own.iterdir())
        except OSError as error:
            left_out.append(f"the folder {shortened(own.relative_to(folder))} cannot be listed: {error.strerror}")
            continue
        for entry in entries:
            seen += 1
            if entry.name in UNREMARKABLE or seen > MAX_ENTRIES:
                continue
            if not entry.is_dir() or entry.is_symlink():
                yield entry
            elif len(entry.parts) - len(folder.parts) <= MAX_DEPTH:
                waiting.append(entry)
            else:
                where = shortened(entry.relative_to(folder))
                left_out.append(f"{where} lies more than {MAX_DEPTH} folders deep and was not looked into")
    if seen > MAX_ENTRIES:
        left_out.append(f"it has more than {MAX_ENTRIES} entries; those after them were not looked at")


def shortened(path: Path) -> str:
    """Return a path in one line, of a long one the beginning and the end."""
    text = one_line(path.as_posix())
    return text if len(text) <= 60 else f"{text[:20]}…{text[-20:]}"


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

        return sort_members(name, list(members), load)


def read_tar(file: Path, name: str) -> Submission:
    """Read a student's tar, compressed or not, into memory as ``read_zip`` does. Links in it are no files."""
    contents: dict[str, bytes | int] = {}  # the size of what is too large
    total = 0
    with tarfile.open(file, "r:*") as archive:
        for info in archive:
            total += info.size
            if total > MAX_ARCHIVE_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_ARCHIVE_BYTES >> 20} MiB")
            if len(contents) == MAX_ENTRIES:
                break
            stream = archive.extractfile(info) if info.isreg() else None
            if stream is not None:
                fits = info.size <= MAX_FILE_BYTES and info.name.endswith(".py")
                contents[info.name.removeprefix("./")] = stream.read(MAX_FILE_BYTES + 1) if fits else info.size

    def load(member: str) -> bytes:
        content = contents[member]
        if isinstance(content, int):
            refuse_large(content)
            raise ValueError("it is no Python file")
        return content

    return sort_members(name, list(contents), load)


def sort_members(
    name: str, members: list[str], load: Callable[[str], bytes], left_out: Sequence[str] = ()
) -> Submission:
    """Tell lesson files from the rest and read them with ``load``. ``left_out`` says what is not among ``members``."""
    listed = [m for m in members if not UNREMARKABLE & set(PurePosixPath(m).parts)]
    members = without_course(listed)
    files: dict[str, str] = {}
    faults = list(left_out)
    wanted: dict[str, str] = {}  # member -> lesson file
    for file, present in places(members).items():
        if len(present) > 1:
            faults.append(f"{file} was handed in {len(present)} times; {one_line(present[0])} counts")
        wanted[present[0]] = file
    for member, file in wanted.items():
        try:
            data = load(member)
            refuse_large(len(data))
            files[file] = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            faults.append(f"{one_line(member)} is not UTF-8 text")
        except FAULTS as error:
            faults.append(f"{one_line(member)} was not read: {error}")
    others = [member for member in members if member not in wanted]
    faults += [f"{one_line(m)} may be {' or '.join(meant(m))}; put it into its folder" for m in others if meant(m)]
    if not wanted:
        is_clone = len(members) < len(listed)
        faults.append("it is a clone of the course with no file of its own in work/" if is_clone else why_none(members))
    return Submission(name, files, tuple(map(one_line, others)), tuple(faults))


def without_course(members: Sequence[str]) -> list[str]:
    """Leave out the course's own files where a student handed in a clone of it: there ``work/`` alone is theirs."""
    clones = [m.removesuffix(MANIFEST) for m in members if f"/{m}".endswith(f"/{MANIFEST}")]
    return [m for m in members if not any(m.startswith(c) and not m.startswith(f"{c}work/") for c in clones)]


def meant(member: str) -> tuple[str, ...]:
    """Return the lesson files that a name alone may mean, if they are several and none lies in no folder."""
    named = files_by_name().get(PurePosixPath(member).name, ())
    return named if len(named) > 1 and PurePosixPath(member).name not in named else ()


def why_none(members: Sequence[str]) -> str:
    """Return why nothing of a submission can be graded."""
    if not members:
        return "it has no file"
    notebook = next((one_line(member) for member in members if is_notebook(member)), "")
    note = f"; {notebook} is a notebook, and notebooks are not run: hand in the .py files" if notebook else ""
    return (
        f"none of its {len(members)} files is a file of the course; these are named {lesson_files()[0]}, "
        f"{lesson_files()[1]} and so on, in any folder{note}"
    )


def places(members: list[str]) -> Mapping[str, list[str]]:
    """Return for each lesson file that was handed in the members that may be it, the likeliest first.

    A member is the lesson file with the longest path that its own path ends with, in whatever folder it lies:
    ``alice/work/sampler/driver.py`` is ``sampler/driver.py``. In a folder named after a lesson, its file of that name
    comes first: ``L4_sampler/driver.py`` is ``sampler/driver.py`` too. A name that the course has once is enough:
    ``allocator.py`` is ``attention/allocator.py``, unless that lies in its folder too. Few folders go before many.
    """
    found: dict[str, list[tuple[bool, int, str]]] = {}
    for member in members:
        parts = PurePosixPath(member).parts
        if {"..", "/"} & set(parts):
            continue  # only an archive that was made to harm has such a path
        file = file_of_lesson(parts) or next(
            (name for start in range(len(parts)) if (name := "/".join(parts[start:])) in lesson_files()), None
        )
        alone = files_by_name().get(parts[-1], ())
        if file is not None or len(alone) == 1:
            found.setdefault(file or alone[0], []).append((file is None, len(parts), member))
    order = [file for file in lesson_files() if file in found]
    return {file: [member for *_, member in sorted(found[file])] for file in order}


def file_of_lesson(parts: tuple[str, ...]) -> str | None:
    """Return the file of the lesson that a folder in the path is named after, if the rest of the path is its name."""
    for number, part in enumerate(parts[:-1]):
        match = LESSON_FOLDER.match(part)
        lessons = [lesson for lesson in load_manifest().written if match and lesson.id == f"L{match[1]}"]
        for start in range(number + 1, len(parts)):
            named = files_by_name().get("/".join(parts[start:]), ())
            own = [file for file in named if any(file in lesson.files for lesson in lessons)]
            if len(own) == 1:
                return own[0]
    return None


def refuse_large(size: int) -> None:
    """Raise ``ValueError`` for a file beyond the limit."""
    if size > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES >> 10} KiB, the limit of a lesson file")
