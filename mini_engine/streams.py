"""Standard input, output and error as the commands need them: in any encoding, full, closed or missing.

What the encoding of standard output lacks is escaped as Python writes it, so no answer is lost. A byte that
the encoding of standard input lacks becomes half a surrogate pair, which ``encode_text`` refuses. A full disk ends the
command with one line, a reader that has seen enough ends it without a word. Imports no torch.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

FAULTY = 2  # the exit status of a command whose output cannot be written
UNREAD = 128 + 13  # after SIGPIPE, as a shell reports it
FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)


@contextmanager
def check_streams() -> Iterator[None]:
    """Make the streams ready for a command, and end with one line if one fails meanwhile. Mutates sys.

    Raises ``SystemExit`` for standard output that is not there, cannot be written, or is read no more.
    """
    make_ready()
    streams = sys.stdout, sys.stderr  # typer changes them
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # at the exit of Python it would be too late for a line
    except (OSError, SystemExit) as error:
        fault = error.__context__ if isinstance(error, SystemExit) else error  # typer ends where a pipe is closed
        if not isinstance(fault, OSError) or fault.filename is not None or fault.errno not in FAULTS:
            raise
        silence(streams[0])
        if fault.errno != errno.EPIPE:
            say(f"input or output fails ({fault.strerror}); make room, or give another file, terminal or pipe")
        silence(streams[1])
        sys.exit(UNREAD if fault.errno == errno.EPIPE else FAULTY)


def make_ready() -> None:
    """Let every stream take any text. Closed standard input is empty, closed standard error is lost. Mutates sys.

    Raises ``SystemExit`` where standard output is closed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  it is for the whole process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        say("standard output is closed; give it a terminal, a file or a pipe")
        sys.exit(FAULTY)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # a notebook and pytest have others
            stream.reconfigure(errors=errors)


def say(message: str) -> None:
    """Print an error, if anything can be printed."""
    with suppress(OSError):
        print(f"error: {message}", file=sys.stderr)


def silence(stream: Any) -> None:
    """Let what is left in the buffer of ``stream`` go nowhere, or Python would complain of it at exit."""
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
