"""Standard streams in every encoding, full, closed or missing: each case in a process of its own."""

import subprocess
import sys

import pytest

DRAW = "print('Ida … 🐱')"
READ = "print(ascii(sys.stdin.read()))"
ECHO = "import typer; typer.echo('Ida … 🐱'); print('Ida')"
FULL = "error: input or output fails (No space left on device); make room, or give another file, terminal or pipe\n"
COMMAND = "import typer; app = typer.Typer(); app.command()(lambda: print('x' * 99_999)); app()"


def shell(line: str, code: str = DRAW, encoding: str = "", given: bytes = b"") -> tuple[int, bytes, str]:
    """Run ``code`` between ready streams, as the word python of a shell's line -> exit status, output, errors."""
    lines = ["import sys", "from mini_engine.streams import check_streams", "with check_streams():", f"    {code}"]
    started = f'python() {{ {sys.executable} -c "$CODE"; }}; set -o pipefail; {line}'
    done = subprocess.run(
        ["bash", "-c", started],
        input=given,
        env={"CODE": "\n".join(lines), "PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1", "cp1252", "utf-8", "utf-16", "shift_jis"])
@pytest.mark.parametrize("code", [DRAW, ECHO], ids=["print", "echo"])
def test_no_answer_is_lost_for_an_encoding(encoding: str, code: str) -> None:
    if code is ECHO and encoding.startswith("ascii"):
        encoding = "cp437"  # typer takes ascii for a mistake and writes UTF-8
    status, output, errors = shell("python", code, encoding)
    shown = output.decode(encoding.partition(":")[0]).splitlines()
    assert (status, errors) == (0, "")
    assert shown[0].encode("ascii", "backslashreplace") == b"Ida \\u2026 \\U0001f431"
    assert shown[1:] == ([] if code is DRAW else ["Ida"])


def test_a_byte_that_the_encoding_lacks_is_half_a_pair_and_the_rest_is_read() -> None:
    for encoding in ("cp1252", "ascii", "utf-8"):
        assert shell("python", READ, encoding, b"hi \x90\nyes") == (0, b"'hi \\udc90\\nyes'\n", "")


@pytest.mark.parametrize("code", [DRAW, "print('x' * 99_999)", COMMAND, "print('x'); sys.exit(0)"])
@pytest.mark.parametrize(
    ("line", "status", "errors"),
    [
        ("python > /dev/full", 2, FULL),
        ("python >&-", 2, "error: standard output is closed; give it a terminal, a file or a pipe\n"),
        ("python > /dev/full 2>&1", 2, ""),
        ("python > /dev/full 2>&-", 2, ""),
        ("python >&- 2>&-", 2, ""),
        ("python | true", 141, ""),
        ("python 2>&- | cat > /dev/null", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_line(line: str, status: int, errors: str, code: str) -> None:
    if line.endswith("true"):
        code = f"import time; time.sleep(0.2); {code}"
    assert shell(line, code) == (status, b"", errors)


def test_closed_input_is_empty() -> None:
    assert shell("python <&-", READ) == (0, b"''\n", "")


def test_an_error_that_is_not_of_a_stream_is_raised() -> None:
    for code, words in (("open('/')", "IsADirectoryError"), ("raise OSError(28, 'full', '/a')", "OSError: [Errno 28]")):
        status, _, errors = shell("python", code)
        assert status == 1
        assert words in errors.splitlines()[-1]
    assert shell("python", "sys.exit(3)") == (3, b"", "")
