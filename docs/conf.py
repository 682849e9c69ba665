"""How Sphinx builds the site. Its pages are the repository's own files, read where they lie; ``build.py`` starts it."""

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRITON_INTERPRET", "1")  # a machine without a GPU imports the kernels too

from smoke.framework.manifest import load_manifest  # noqa: E402  it lies in ROOT

CACHE = ROOT / "docs" / ".site_cache"
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # "owner/name" where GitHub builds the site
SECTIONS = {  # in the top bar
    "lessons/README": "Lessons",
    "docs/api/index": "API",
    "docs/USAGE": "Usage",
    "docs/SERVER": "Server",
    "docs/LANG": "Programs",
    "docs/BENCHMARKS": "Benchmarks",
}
BEHIND = {"smoke/README": "Instructors", "CONTRIBUTING": "Contributing", "CHANGELOG": "Changelog"}  # in its last menu

project = author = html_title = "mini_engine"
project_copyright = "The mini_engine authors, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/api/*.rst", "smoke/README.md", "mini_engine/tiny/README.md"]
include_patterns += ["lessons/*.md", "lessons/L*/*.md", "notebooks/L*.ipynb"]

html_theme = "pydata_sphinx_theme"
html_favicon = "_static/icon.svg"
html_static_path = ["_static", str(CACHE / "static")]
html_css_files = ["site.css"]
html_js_files = [("diagrams.js", {"defer": ""}), ("predictions.js", {"defer": ""})]
html_search_scorer = str(ROOT / "docs" / "search_order.js")
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_use_index = html_domain_indices = False  # the search finds names
html_sidebars: dict[str, list[str]] = {page: [] for page in (root_doc, *list(SECTIONS)[2:], *BEHIND)}  # nothing below
html_context = {"default_mode": "auto"}
html_theme_options = {
    "header_links_before_dropdown": len(SECTIONS),
    "header_dropdown_text": "Teach and contribute",
    "navbar_align": "left",
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
if REPOSITORY:
    html_theme_options["github_url"] = f"https://github.com/{REPOSITORY}"

myst_enable_extensions = ["dollarmath", "attrs_inline"]
myst_dmath_allow_space = myst_dmath_allow_digits = False  # $5 is money
myst_heading_anchors = 6
mathjax_path = "vendor/mathjax.js"
copybutton_prompt_text = "$ "

engine = hashlib.sha256(b"".join(file.read_bytes() for file in sorted((ROOT / "mini_engine").rglob("*.py"))))
nb_execution_cache_path = str(CACHE / f"notebooks-{engine.hexdigest()[:12]}")  # another engine, other outputs
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # a slider needs a kernel

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_use_type_comments = False  # there are none, and to look for them takes a while
maximum_signature_line_length = 88
add_module_names = False


def add_toctree(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give the front page, the course and each lesson their pages, in the order of reading. Mutates ``source``."""
    lessons = load_manifest().written
    children = {
        "README": [f"{title} </{page}>" for page, title in (SECTIONS | BEHIND).items()],
        "docs/SERVER": ["PAGE"],
        "lessons/README": [f"/{each.text_folder}/README" for each in lessons]
        + ["beyond", "AGENTS", "/mini_engine/tiny/README"],
    }
    for each in lessons:
        *pages, reference = (f"/{page.relative_to(ROOT).with_suffix('')}" for page in each.pages()[1:])
        notebook = f"{each.id} · Notebook </notebooks/{each.slug}>"
        children[f"{each.text_folder}/README"] = [*pages, notebook, reference]
    if docname in children:
        source[0] += "\n".join(["", "", "```{toctree}", ":hidden:", "", *children[docname], "```", ""])


def add_phone_pictures(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put beside the picture of a lesson the one for phones, if there is one. Mutates ``source``."""
    if (ROOT / docname).with_name("picture-phone.png").exists():
        both = r"\1(picture.png){.wide} \1(picture-phone.png){.narrow}"
        source[0] = re.sub(r"(!\[[^\]]*\])\(picture\.png\)", both, source[0])


def link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Let links to files that are no pages lead to the API or to the repository. Mutates ``doctree``."""
    documented = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    for link in list(doctree.findall(addnodes.download_reference)):
        file = (ROOT / app.env.docname).parent.joinpath(link["reftarget"]).resolve().relative_to(ROOT)
        module = ".".join(file.with_suffix("").parts)
        if f"automodule:: {module}\n" in documented:
            names = {"refdomain": "py", "reftype": "mod", "reftarget": module, "refexplicit": True}
            link.replace_self(addnodes.pending_xref("", *link.children, refdoc=app.env.docname, **names))
        elif REPOSITORY:
            address = f"https://github.com/{REPOSITORY}/blob/main/{file}"
            link.replace_self(nodes.reference("", "", *link.children, refuri=address))


def as_restructured_text(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Turn what docstrings have of Markdown, indented blocks and a plural of ``code``s, around. Mutates ``lines``."""
    lines[:] = [re.sub(r"(``[^`]+``)", r"\1\\ ", line) for line in lines]
    for number in range(len(lines) - 1, 0, -1):
        above, line = lines[number - 1], lines[number]
        if line.startswith("    ") and not above and not lines[number - 2].startswith((" ", "-", "*")):
            lines[number:number] = ["::", ""]


def shorten(app: Sphinx, what: str, name: str, obj: object, options: Any, signature: str, returns: str) -> Any:
    """Leave only the last part of types where a ``<factory>`` keeps Sphinx from doing so."""
    return (re.sub(r"~[\w.]+\.", "", signature), returns) if signature and "<" in signature else None


def add_index(app: Sphinx, exception: Exception | None) -> None:
    """Let the front page be found under the folder's own address too."""
    if exception is None:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Register the hooks, and the fences that are not highlighted."""
    app.add_lexer("output", TextLexer)
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", add_toctree)
    app.connect("source-read", add_phone_pictures)
    app.connect("doctree-read", link_files)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("autodoc-process-signature", shorten)
    app.connect("build-finished", add_index)
