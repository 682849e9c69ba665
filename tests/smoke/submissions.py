"""What example submissions are made of. It comes from the reference, so no solution is kept here."""

import io
import zipfile

from smoke.course.starter import starter_files
from smoke.framework.manifest import ENGINE, load_manifest


def reference(*lessons: str) -> dict[str, str]:
    """Return the reference's files of some lessons."""
    return {file: (ENGINE / file).read_text() for lesson in lessons for file in load_manifest().lesson(lesson).files}


def starters(*lessons: str) -> dict[str, str]:
    """Return the starters of some lessons."""
    return {file: text for lesson in lessons for file, text in starter_files(load_manifest().lesson(lesson)).items()}


def coded(files: dict[str, str], prefix: str = "") -> dict[str, bytes]:
    """Return files as bytes beneath a folder."""
    return {prefix + file: text.encode() for file, text in files.items()}


def zipped(files: dict[str, bytes]) -> bytes:
    """Return a zip of files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()
