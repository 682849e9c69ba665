"""The site: it builds without a warning, its links lead somewhere, and a browser shows it without a network."""

import http.server
import shutil
import subprocess
import sys
import threading
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from mini_engine.viz import paging
from smoke.framework.manifest import ROOT, load_manifest

pytestmark = pytest.mark.slow
LESSONS = load_manifest().written
STORIES = [f"{lesson.text_folder}/README" for lesson in LESSONS]
OTHERS = [
    "index",
    "lessons/L4_sampler/C_top_p_min_p_and_the_joint_order",
    "notebooks/L4_sampler",
    "docs/api/model",
    "docs/BENCHMARKS",
]
# Parts of the page that scroll sideways: the whole, and the theme's boxes. Code and tables may.
TOO_WIDE = """[document.documentElement, ...document.querySelectorAll("[class^=bd-]")]
    .filter((part) => part.scrollWidth > part.clientWidth && part.clientWidth).map((part) => part.className)"""
SCALE = "img.clientWidth / img.naturalWidth"
DIAGRAM_TEXT = """{
    const svg = document.querySelector(".highlight-mermaid svg");
    parseFloat(getComputedStyle(svg.querySelector("foreignObject span, text")).fontSize) * svg.getScreenCTM().a;
}"""
PHONE, LAPTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 800}


class Links(HTMLParser):
    """What a page names, what it links to, and what it loads by itself."""

    def __init__(self, text):
        super().__init__()
        self.ids = set()
        self.links = []
        self.loaded = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.update(value for name, value in attrs if name in ("id", "name"))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif values.get("src") or (tag == "link" and values.get("rel") != "canonical"):
            self.loaded.append(values.get("src") or values["href"])


@cache
def read(page):
    return Links(page.read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site built without executing notebooks."""
    if not shutil.which("npm") and not (ROOT / "docs" / ".site_cache" / "static" / "vendor" / "mermaid.js").exists():
        pytest.skip("npm, which fetches what draws diagrams, is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "docs/build.py", "--no-notebooks", "--output", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visit(browser, address):
    """Open a page; in the end, nothing may have gone wrong and no request may have left the machine."""
    faults = []
    context = browser.new_context(viewport=LAPTOP, color_scheme="dark")

    def open_page(name):
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(f"{name}: {error}"))
        page.on("console", lambda said: said.type == "error" and faults.append(f"{name}: {said.text}"))
        page.on("response", lambda got: got.status >= 400 and faults.append(f"{name}: {got.status} for {got.url}"))
        page.on("request", lambda sent: local(sent.url) or faults.append(f"{name}: asks for {sent.url}"))
        page.goto(f"{address}/{name}.html", wait_until="load")
        return page

    def local(url):
        return url.startswith((f"{address}/", "data:", "blob:"))

    yield open_page
    context.close()
    assert faults == []


def test_every_page_of_the_course_is_there(site):
    pages = [page.relative_to(ROOT) for lesson in LESSONS for page in lesson.pages()]
    pages += [Path("notebooks") / lesson.slug for lesson in LESSONS]
    pages += [
        Path(name) for name in ("README", "CONTRIBUTING", "CHANGELOG", "docs/USAGE", "docs/BENCHMARKS", "smoke/README")
    ]
    assert [page for page in pages if not (site / page.with_suffix(".html")).exists()] == []
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    lost = []
    for page in set(site.rglob("*.html")) - set(site.glob("_static/*.html")):  # the theme leaves a template there
        for link in read(page).links + read(page).loaded:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https") and link in read(page).links:
                continue
            if parts.scheme == "data":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if parts.scheme or not target.is_file():
                lost.append(f"{page.relative_to(site)}: {link}")
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).ids:
                lost.append(f"{page.relative_to(site)}: {link} has no such place")
    assert lost == []


def test_pages_fit_a_phone_and_a_laptop_and_a_lesson_begins_with_a_command_and_a_picture(visit):
    for name in STORIES + OTHERS:
        page = visit(name)
        assert page.locator("h1").first.is_visible()
        for size in (LAPTOP, PHONE):
            page.set_viewport_size(size)
            assert page.evaluate(TOO_WIDE) == [], f"{name} scrolls sideways at {size['width']} pixels"
            for what in ("div.highlight", "article img:visible") if name in STORIES else ():
                top = page.locator(what).first.bounding_box()["y"]
                assert top < size["height"] - 100, f"{what} of {name} begins at {top}"
        page.close()


def test_text_in_a_picture_is_large_enough_on_a_phone(visit):
    """Ten points at 144 an inch are 20 pixels of the file; nothing in a picture is smaller."""
    for name in [*STORIES, "index"]:
        page = visit(name)
        page.set_viewport_size(PHONE)
        for shown in page.locator("article img:visible").all():
            scale = shown.evaluate(f"async (img) => (await img.decode(), {SCALE})")
            assert 20 * scale >= 9, f"{name}: {20 * scale:.1f} pixels"
        page.close()


def test_diagrams_formulas_copy_buttons_and_neighbours(visit):
    page = visit("lessons/L3_driver/README")
    page.locator(".highlight-mermaid svg").wait_for()
    assert "append the new one" in page.locator(".highlight-mermaid").text_content()
    for size in (LAPTOP, PHONE):
        page.set_viewport_size(size)
        assert page.evaluate(DIAGRAM_TEXT) >= 9, f"the text of the diagram is too small at {size['width']} pixels"
    page.add_script_tag(url="../../_static/vendor/mathjax.js")
    page.wait_for_function("() => window.MathJax?.tex2svg !== undefined")
    drawn = page.evaluate(r"MathJax.tex2svg('\\mathcal{L} = \\sum_i \\sqrt{x_i} \\in \\mathbb{R}').outerHTML")
    assert "<path" in drawn
    assert page.locator("button.copybtn").count() == page.locator("div.highlight pre").count()
    assert page.locator("a.right-next").get_attribute("href") == "prefill_and_decode.html"
    assert page.locator("a.left-prev").count() == 1


def test_the_search_finds_a_page(visit):
    page = visit("search")
    page.goto(f"{page.url}?q=nucleus")
    page.get_by_text("Top-p, min-p and the joint order").first.wait_for()


@pytest.mark.parametrize("words", ["top_p", "PageAllocator", "apply_min_p"])
def test_the_search_finds_the_lesson_before_the_api(visit, words):
    page = visit("search")
    page.goto(f"{page.url}?q={words}")
    page.locator("ul.search li a[href*='docs/api/']").first.wait_for()
    found = page.locator("ul.search li > a").evaluate_all("all => all.map((link) => link.pathname)")
    kinds = [next((kind for kind in ("/lessons/", "/docs/api/") if kind in link), "") for link in found]
    assert kinds[0] == "/lessons/"
    assert "/lessons/" not in kinds[kinds.index("/docs/api/") :], "a lesson stands behind the API"


def test_pages_for_students_stand_in_the_top_bar_and_those_for_others_in_a_menu(visit):
    page = visit("index")
    bar = page.locator(".bd-header .bd-navbar-elements").first
    names = [name.strip() for name in bar.locator("> li.nav-item:not(.dropdown) > a").all_inner_texts()]
    assert names == ["Lessons", "API", "Usage", "Server", "Programs", "Benchmarks"]
    menu = bar.locator("> li.dropdown")
    assert not menu.get_by_text("Instructors").is_visible()
    menu.get_by_role("button").click()
    names = [name.strip() for name in menu.locator("ul a").all_inner_texts()]
    assert names == ["Instructors", "Contributing", "Changelog"]


def test_a_prediction_is_written_on_the_page_and_stays_there(visit):
    for name in STORIES:
        page = visit(name)
        answers = page.locator("section#predict details")
        fields = page.locator("textarea.prediction")
        assert fields.count() == answers.count() >= 3, name
    text = answers.last.locator("p").first
    assert not text.is_visible()
    fields.last.fill("42 pages")
    answers.last.locator("summary").click()
    assert text.is_visible()
    assert fields.last.bounding_box()["y"] < text.bounding_box()["y"]
    page.reload()
    assert fields.last.input_value() == "42 pages"
    assert fields.first.input_value() == ""


def test_a_figure_that_does_not_stack_is_moved_sideways_on_a_phone(browser):
    page = browser.new_page(viewport=PHONE)
    page.set_content(paging.page_map({"a": [0]}, {"a": 3}, 5, 4)._repr_html_())
    assert 20 * page.locator("img").evaluate(f"async (img) => (await img.decode(), {SCALE})") >= 9
    assert page.evaluate(TOO_WIDE) == []
    page.close()


def test_a_phone_shows_the_panels_of_a_figure_below_each_other(browser):
    figure = paging.mask_alignment(3, 8)
    for size, canvas in ((LAPTOP, figure.figure), (PHONE, figure.stacked())):
        page = browser.new_page(viewport=size)
        page.set_content(figure._repr_html_())
        shown = page.locator("img").evaluate(
            "async (img) => (await img.decode(), img.naturalWidth / img.naturalHeight)"
        )
        assert shown == pytest.approx(canvas.get_figwidth() / canvas.get_figheight(), rel=0.01)
        page.close()
