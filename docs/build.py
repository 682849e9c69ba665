"""Build the site: ``python docs/build.py --open``.

Its pages are the repository's own pages, notebooks and docstrings; ``conf.py`` says how they are put together. A
warning is an error. What is computed or fetched once, outputs of notebooks and two scripts, is kept in
``docs/.site_cache``.
"""

import argparse
import base64
import hashlib
import subprocess
import sys
import tarfile
import webbrowser
from pathlib import Path

from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "docs" / ".site_cache"
# What draws diagrams and formulas, from the npm registry: package -> file in it, name here, SHA-512 of the package
SCRIPTS = {
    "mermaid@12.3.0": (
        "package/dist/mermaid.min.js",
        "mermaid.js",
        "4113TdXeLAsMruJ79OpFL5O8+LTFXhQqZ260rF3tgUmiNAtRm4Uume04I+65PRN6yZ69J4f8rVYWW8zRk65UYw==",
    ),
    "mathjax@3.2.2": (  # the newest whose fonts are in the same file
        "package/es5/tex-svg.js",
        "mathjax.js",
        "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
    ),
}


def fetch_scripts() -> None:
    """Fetch ``SCRIPTS`` with npm, unless they are here. Raises ``RuntimeError`` for a package with other content."""
    folder = CACHE / "static" / "vendor"
    folder.mkdir(parents=True, exist_ok=True)
    for package, (file, name, digest) in SCRIPTS.items():
        if (folder / name).exists():
            continue
        command = ["npm", "pack", "--silent", package]
        packed = folder / subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
        found = base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
        if found != digest:
            raise RuntimeError(f"{package} has SHA-512 {found}, not {digest}; see SCRIPTS in {__file__}")
        with tarfile.open(packed) as archive:
            content = archive.extractfile(file)
            assert content, f"{package} has no file {file}"
            (folder / name).write_bytes(content.read())
        packed.unlink()


def main() -> None:
    """Build the site and say where it is."""
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument("--no-notebooks", action="store_true", help="show the notebooks without running them")
    parser.add_argument("--output", type=Path, default=ROOT / "site")
    options = parser.parse_args()
    output = options.output.resolve()
    fetch_scripts()
    arguments = ["-W", "--keep-going", "-q", "-c", str(ROOT / "docs"), "-d", str(output / "doctrees")]
    arguments += ["-D", f"nb_execution_mode={'off' if options.no_notebooks else 'cache'}"]
    if status := build_main([*arguments, str(ROOT), str(output / "html")]):
        sys.exit(status)
    front = output / "html" / "index.html"
    print(front)
    if options.open:
        webbrowser.open(front.as_uri())


if __name__ == "__main__":
    main()
