"""The page in a headless Chromium: it streams, branches, fits, and its script raises nothing."""

import math
import re
import shutil
from collections.abc import Iterator

import pytest

from mini_engine.cli.play import Small
from mini_engine.config import EngineConfig
from tests.server.conftest import Running, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt install chromium"),
]
WAIT = 30_000  # milliseconds, for a machine that does other things too
SIZES = {"phone": (390, 844), "desktop": (1400, 900)}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def app() -> Iterator[Running]:
    with serving(Small().config()) as running:
        yield running


@pytest.fixture
def page(request, browser, app):
    """A page that was just opened, as wide as the test says; its errors fail the test."""
    width, height = SIZES[getattr(request, "param", "desktop")]
    context = browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    errors = []
    outside = []
    page.set_default_timeout(WAIT)
    page.on("pageerror", lambda error: errors.append(str(error)))
    refused = "status of 400"  # what a test asks for wrongly
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" and refused not in m.text else None)
    page.on("request", lambda each: outside.append(each.url) if not each.url.startswith((app.url, "data:")) else None)
    try:
        page.goto(app.url)
        page.locator("#speed").fill("60")
        yield page
        assert errors == []
        assert outside == []
    finally:
        context.close()  # an open stream would keep the server from its end


def finish(page) -> None:
    """Wait until every answer has ended and every step is shown."""
    page.wait_for_function("document.querySelectorAll('.lane').length > 0")
    page.wait_for_function(
        "[...document.querySelectorAll('.lane small')].every((s) => s.textContent.includes('ended'))"
    )
    page.wait_for_function("document.getElementById('behind').textContent === ''")


def set_knob(page, name: str, value: float) -> None:
    page.evaluate("document.getElementById('knobs-box').open = true")
    page.locator(f"#{name}").fill(str(value))


def tokens(page, lane: int = 0) -> list[str]:
    return page.locator(".lane").nth(lane).locator(".token").all_text_contents()


def completion(app: Running, prompt, **knobs) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0.9, "top_k": 10, "top_p": 0.9, "seed": 7} | knobs
    with app.http() as http:
        return http.post("/v1/completions", json=body).json()["choices"][0]["text"]


def write(page, text: str) -> None:
    """Ask one prompt for 24 tokens."""
    page.locator("#both").uncheck()
    set_knob(page, "max_tokens", 24)
    page.locator("#prompt-a").fill(text)
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function("(text) => document.querySelector('.lane .prompt')?.textContent === text", arg=text)
    finish(page)


def test_without_a_key_two_prompts_share_their_beginning(page, app):
    page.wait_for_selector(".token")
    finish(page)
    assert page.locator(".lane").count() == 2
    second = page.locator(".lane").nth(1)
    assert "32 tokens from the cache" in second.text_content()
    assert len(app.tokenizer.encode(second.locator(".cached").text_content())) == 32
    assert page.locator(".lane").nth(0).locator(".cached").count() == 0
    page.wait_for_selector("#timeline .bars .point path", state="attached")
    nodes = page.locator("#tree .node .text").all_text_contents()
    cache = app.engine.scheduler.cache
    texts = [app.tokenizer.decode(node.tokens).replace("\n", "⏎") for node in cache.nodes.values()]
    assert sorted(nodes) == sorted(texts)
    assert page.locator("#pages .page").count() == app.engine.scheduler.allocator.num_pages
    assert page.locator("#pages .kept").count() == cache.num_pages
    assert page.locator("#pages .own").count() == 0


def test_what_is_typed_is_answered_and_a_knob_changes_it(page, app):
    write(page, "There was a bear named Ida")
    assert "".join(tokens(page)) == completion(app, "There was a bear named Ida")
    set_knob(page, "temperature", 0)
    greedy = completion(app, "There was a bear named Ida", temperature=0)
    page.wait_for_function(
        "(text) => [...document.querySelectorAll('.token')].map((t) => t.textContent).join('') === text", arg=greedy
    )
    assert page.locator("#stages thead th").all_text_contents()[1].startswith("model")
    assert page.locator("#stages thead th").count() == 2  # nothing is drawn, so there is no stage
    assert "Greedy" in page.locator("#stages-about").text_content()


@pytest.mark.parametrize("page", ["phone"], indirect=True)
def test_a_branch_goes_on_from_another_token_by_keyboard_alone(page, app):
    write(page, "There was a bear named Ida")
    before = tokens(page)
    page.locator(".token[tabindex='0']").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    chosen = page.locator("#menu button").first.locator("b").text_content().replace("␣", " ")
    assert page.evaluate("document.activeElement.closest('#menu') !== null")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.lane').length === 2")
    finish(page)
    after = tokens(page, 1)
    assert after[:4] == [*before[:3], chosen]
    ids = app.tokenizer.encode("There was a bear named Ida" + "".join(after[:4]))
    assert "".join(after[4:]) == completion(app, ids, max_tokens=20)
    yours = page.locator(".lane").nth(1).locator(".yours")
    assert yours.text_content() == chosen


def test_a_chosen_token_is_described_by_its_own_numbers(page):
    write(page, "There was a bear named Ida")
    page.locator(".token").nth(3).click()
    item = page.locator("#menu button").nth(2)
    model, last = (item.locator("span").nth(i).text_content().removeprefix("→ ") for i in (0, 1))
    last = "0 %" if last == "removed" else last
    item.click()
    page.wait_for_function("document.querySelectorAll('.lane').length === 2")
    finish(page)
    yours = page.locator(".yours")
    yours.focus()
    about = page.locator("#stages-about").text_content()
    assert "chosen by you" in about
    assert f", {last} after all stages" in about
    assert yours.get_attribute("aria-label").endswith(f"chosen by you, {model}")
    share = float(re.search(r"[\d.]+", model)[0]) / 100
    tint = float(yours.evaluate("(e) => e.style.getPropertyValue('--surprise')"))
    assert tint == pytest.approx(min(1, -math.log2(share) / 6), abs=0.02)


def test_branches_have_names_of_their_own_and_a_knob_does_not_close_them(page):
    write(page, "There was a bear named Ida")

    def branch(number: int) -> None:
        page.locator(".lane").first.locator(".token").nth(number).click()
        page.locator("#menu button").first.click()
        finish(page)

    branch(2)
    branch(3)
    page.locator(".lane .close").last.click()  # the older one
    branch(4)
    names = page.locator(".lane").evaluate_all("(lanes) => lanes.map((lane) => lane.ariaLabel)")
    assert names == ["A", "A.3", "A.2"]
    set_knob(page, "temperature", 0.3)
    page.wait_for_timeout(1000)  # a run would have begun after half a second
    assert page.locator(".lane").count() == 3
    assert "closes 2 branches" in page.locator("#note").text_content()
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.lane').length === 1")
    assert page.locator("#note").is_hidden()


def test_an_error_goes_with_the_next_good_run(page):
    page.evaluate("document.getElementById('knobs-box').open = true")
    page.locator("#grammar").select_option("regex")
    page.locator("#grammar-text").fill("(")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector("#alert:not([hidden])")
    page.locator("#grammar").select_option("")
    write(page, "She had a")
    assert page.locator("#alert").is_hidden()
    page.locator("#grammar").select_option("regex")
    page.locator("#auto").uncheck()
    page.locator(".token").nth(1).click()
    page.locator("#menu button").first.click()
    assert "A grammar begins with the answer" in page.locator("#alert").text_content()


def test_stop_stops_the_text_at_once_and_the_engine(page, app):
    finish(page)
    page.locator("#speed").fill("4")
    set_knob(page, "max_tokens", 200)
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.token').length > 3")
    page.get_by_role("button", name="Add six requests").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    shown = len(tokens(page)) + len(tokens(page, 1))
    assert page.locator(".lane small").first.text_content().endswith(", stopped")
    app.wait_until_idle(5)
    page.locator("#speed").fill("60")
    page.wait_for_timeout(1500)
    assert len(tokens(page)) + len(tokens(page, 1)) == shown


def test_a_grammar_is_kept_to_and_seen_as_a_stage(page):
    page.evaluate("document.getElementById('knobs-box').open = true")
    page.locator("#grammar").select_option("regex")
    write(page, "She had a")
    assert "".join(tokens(page)).replace("<|im_end|>", "") in [
        f" {c} {t}." for c in ("red", "blue") for t in ("ball", "boat")
    ]
    page.locator(".token").first.focus()
    assert "grammar" in [text[:7] for text in page.locator("#stages thead th").all_text_contents()]
    assert page.locator("#stages td.cut").count() > 0


def test_pause_stops_the_text_and_one_step_gives_one_token(page):
    page.wait_for_selector(".token")
    page.get_by_role("button", name="Pause").click()
    shown = len(tokens(page))
    page.wait_for_timeout(300)
    assert len(tokens(page)) == shown
    page.get_by_role("button", name="One step").click()
    assert len(tokens(page)) == shown + 1


def test_traffic_fills_the_batch(page, app):
    finish(page)
    set_knob(page, "max_tokens", 100)
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.token').length > 3")
    for _ in range(3):
        page.get_by_role("button", name="Add six requests").click()
    page.wait_for_function("/: [4-6] running/.test(document.getElementById('batch-about').textContent)")
    page.wait_for_function("document.querySelectorAll('#timeline .ytick text').length === 12")
    names = page.locator("#timeline .ytick text").all_text_contents()
    assert len(set(names)) == len(names)
    assert names[:2] == ["A", "B"]
    app.wait_until_idle(60)
    page.wait_for_function("document.getElementById('behind').textContent === ''")


@pytest.mark.parametrize("page", ["phone", "desktop"], indirect=True)
def test_the_last_stage_which_is_the_result_is_in_sight(page):
    write(page, "There was a bear named Ida")
    for name, value in (("min_p", 0.01), ("repetition_penalty", 1.1)):
        set_knob(page, name, value)
    page.wait_for_function("document.querySelectorAll('#stages thead th').length === 7")
    finish(page)
    box = page.locator("#stages thead th").last.bounding_box()
    around = page.locator("#stages").bounding_box()
    assert around["x"] + around["width"] <= page.viewport_size["width"]
    assert box["x"] + box["width"] <= around["x"] + around["width"] + 1
    assert page.locator("#stages thead th").last.text_content().startswith("min-p")


def test_many_pages_take_little_of_the_page(browser):
    with serving(EngineConfig.serving(num_pages=1024)) as running:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        try:
            page.goto(running.url)
            page.wait_for_function("document.querySelectorAll('#pages .page').length === 1024")
            assert page.locator("#pages").bounding_box()["height"] < 350
        finally:
            page.close()


def test_a_server_with_a_key_asks_for_it(browser):
    with serving(Small().config(), api_key="secret") as running:
        page = browser.new_page()
        page.set_default_timeout(WAIT)
        page.goto(running.url)
        page.locator("#key").fill("secret")
        page.locator("#key").press("Tab")
        page.wait_for_selector(".token")
        page.close()


def test_nothing_overflows_and_every_control_has_a_name(page):
    finish(page)
    for width, height in SIZES.values():
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    unnamed = "[...document.querySelectorAll('button, input, select, textarea')].filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).length"  # noqa: E501
    assert page.evaluate(unnamed) == 0
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for ink in ("--ink", "--soft", "--accent"):
            assert contrast(page, ink, "--card") >= (3 if ink == "--accent" else 4.5)
        assert contrast(page, "--on-accent", "--accent") >= 4.5


def contrast(page, front: str, back: str) -> float:
    """The contrast of two colours of the page, as WCAG 2 defines it."""
    read = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    lights = []
    for name in (front, back):
        channels = [int(page.evaluate(read, name)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)
