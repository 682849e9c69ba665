"""The page in a headless Chromium: it streams, branches, fits, and its script raises nothing."""

import math
import re
import shutil
from collections.abc import Iterator

import pytest

from mini_engine.cli.play import Small
from mini_engine.server import attention
from tests.server.conftest import Running, serving
from tests.server.test_attention import peer_weights

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
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda each: outside.append(each.url) if not each.url.startswith((app.url, "data:")) else None)
    try:
        page.goto(app.url)
        page.locator("#speed").fill("60")
        yield page
    finally:
        context.close()
    assert errors == []
    assert outside == []


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
    assert "32 tokens from the cache" in page.locator(".lane").nth(1).text_content()
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
    heads = page.locator("#stages thead th").all_text_contents()
    assert [head[:5] for head in heads] == ["token", "model", "greed"]
    assert "greedy" in page.locator("#stages-about").text_content()
    assert page.locator("#stages .chosen td").last.text_content() == "100 %"


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
    assert page.locator(".lane").nth(1).locator(".yours").text_content() == chosen


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


def test_guessed_tokens_are_marked_and_refused_ones_struck_through(browser):
    """As many as the engine counts; the text is that without drafts."""
    prompt = "One day a cat named Ida. One day a cat named Ida. One day a cat"
    with serving(Small(drafts="ngram").config()) as running:
        page = browser.new_page()
        try:
            page.set_default_timeout(WAIT)
            page.goto(running.url)
            page.locator("#speed").fill("60")
            set_knob(page, "temperature", 0)
            write(page, prompt)
            about = page.locator(".lane small").text_content()
            came, drafted = map(int, re.search(r"(\d+) of (\d+) guesses came", about).groups())
            assert 0 < came < drafted
            assert page.locator(".lane .guessed").count() == came
            assert page.locator(".lane .refused").count() == drafted - came
            text = completion(running, prompt, temperature=0)
            assert "".join(tokens(page)) == text
        finally:
            page.close()


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
    page.get_by_role("button", name="Add six requests").click()
    page.wait_for_function("/: [4-6] running/.test(document.getElementById('batch-about').textContent)")
    page.wait_for_function("document.querySelectorAll('#timeline .ytick').length >= 8")  # old rows leave in the end
    names = page.locator("#timeline .ytick text").all_text_contents()
    assert len(set(names)) == len(names) == 8
    app.wait_until_idle(60)


def test_a_server_with_a_key_asks_for_it(browser):
    with serving(Small().config(), api_key="secret") as running:
        page = browser.new_page()
        try:
            page.set_default_timeout(WAIT)
            page.goto(running.url)
            page.locator("#key").fill("secret")
            page.locator("#key").press("Tab")
            page.wait_for_selector(".token")
        finally:
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


PROMPT = "There was a bear named Ida"
NAMES = "[...document.querySelectorAll('.lane')].map((lane) => lane.getAttribute('aria-label'))"


def branch(page, lane: int, token: int) -> dict[str, str]:
    """Go on from another token; returns its text and its shares of the model and after all stages, as written."""
    page.locator(".lane").nth(lane).locator(".token").nth(token).click()
    button = page.locator("#menu button").first
    shares = button.locator("span").all_text_contents()
    chosen = {
        "text": button.locator("b").text_content().replace("␣", " "),
        "before": shares[0],
        "after": shares[1].removeprefix("→ "),
    }
    count = page.locator(".lane").count()
    button.click()
    page.wait_for_function("(count) => document.querySelectorAll('.lane').length === count", arg=count + 1)
    return chosen


def test_the_banner_goes_with_the_next_run(page):
    page.locator("#auto").uncheck()
    write(page, PROMPT)
    page.evaluate("document.getElementById('knobs-box').open = true")
    page.locator("#grammar").select_option("regex")
    page.locator(".token").nth(2).click()
    page.locator("#menu button").first.click()
    assert "cannot begin in the middle" in page.locator("#alert").text_content()
    page.locator("#grammar").select_option("")
    write(page, PROMPT)
    assert page.locator("#alert").is_hidden()


def test_stop_stops_at_once_and_asks_nothing_more(page, app):
    finish(page)
    set_knob(page, "max_tokens", 300)
    page.locator("#speed").fill("4")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.token').length === 2")
    asked = []
    page.on("request", lambda each: asked.append(each.url))
    page.get_by_role("button", name="Stop").click()
    page.wait_for_function("document.getElementById('behind').textContent === ''")
    shown = page.locator(".token").count()
    page.wait_for_timeout(1500)
    assert page.locator(".token").count() == shown <= 3
    assert [about.split(",")[-1].strip() for about in page.locator(".lane small").all_text_contents()] == [
        "stopped"
    ] * 2
    assert asked == []
    app.wait_until_idle()
    cache = app.engine.scheduler.cache
    assert page.locator("#pages .kept").count() <= cache.num_pages
    assert page.locator("#tree .node").count() >= 1


def test_what_was_stopped_lets_its_pages_go_even_while_the_page_is_paused(page, app):
    finish(page)
    set_knob(page, "max_tokens", 300)
    page.locator("#speed").fill("1")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function("document.querySelectorAll('#pages .own').length > 0")
    page.get_by_role("button", name="Pause").click()
    page.locator("#stop").click()
    page.wait_for_function("document.querySelectorAll('#pages .own').length === 0")
    app.wait_until_idle()
    cache = app.engine.scheduler.cache
    page.wait_for_function("(n) => document.querySelectorAll('#pages .kept').length === n", arg=cache.num_pages)
    assert page.locator("#pages-about").text_content().startswith(f"{cache.num_pages} of ")
    page.get_by_role("button", name="Go on").click()
    page.locator("#speed").fill("60")
    set_knob(page, "max_tokens", 5)
    page.get_by_role("button", name="Run", exact=True).click()
    finish(page)


def test_a_token_that_the_reader_chose_is_described_with_its_own_numbers(page):
    write(page, PROMPT)
    surprises = page.locator(".token").evaluate_all("(all) => all.map((t) => +t.style.getPropertyValue('--surprise'))")
    chosen = branch(page, 0, surprises.index(max(surprises)))
    page.wait_for_function("document.querySelector('.yours') === document.activeElement")
    about = page.locator("#stages-about").text_content()
    assert about.endswith(f"{chosen['before']} of the model, {chosen['after']} after all stages, chosen by you.")
    shown = page.locator("#stages .chosen td").all_text_contents()
    assert [shown[0], shown[-1]] == [chosen["before"], chosen["after"]]
    yours = page.locator(".yours")
    share = float(chosen["before"].split()[0]) / 100
    surprise = float(yours.evaluate("(token) => token.style.getPropertyValue('--surprise')"))
    assert surprise == pytest.approx(min(1, -math.log2(share) / 6), abs=0.02)
    assert f"{chosen['before']}, chosen by you" in yours.get_attribute("aria-label")


def test_no_two_lanes_ever_have_one_name(page):
    write(page, PROMPT)
    for token in (2, 4):
        branch(page, 0, token)
    page.get_by_role("button", name="Close A2").click()
    branch(page, 0, 3)
    branch(page, 1, 4)
    names = page.evaluate(NAMES)
    assert len(set(names)) == len(names) == 4
    assert "A2" not in names


def test_a_knob_keeps_branches_and_a_new_prompt_says_which_it_closes(page, app):
    write(page, PROMPT)
    before = tokens(page)
    chosen = branch(page, 0, 3)
    finish(page)
    start = [*before[:3], chosen["text"]]
    ids = app.tokenizer.encode(PROMPT + "".join(start))
    set_knob(page, "temperature", 0)
    rest = completion(app, ids, max_tokens=20, temperature=0)
    page.wait_for_function(
        "(text) => document.querySelectorAll('.lane')[1]?.querySelector('.text').textContent === text",
        arg=PROMPT + "".join(start) + rest,
    )
    assert page.evaluate(NAMES) == ["A", "A2"]
    assert tokens(page, 1)[:4] == start
    assert page.locator("#note").is_hidden()
    write(page, "She had a")
    assert page.evaluate(NAMES) == ["A"]
    assert page.locator("#note").text_content() == "A2 was closed, because its prompt is no longer asked."


def test_the_readers_own_rows_stay_in_the_batch(page):
    finish(page)
    set_knob(page, "max_tokens", 300)
    page.locator("#speed").fill("12")
    page.get_by_role("button", name="Run", exact=True).click()
    for _ in range(3):
        page.get_by_role("button", name="Add six requests").click()
    page.wait_for_function("document.querySelectorAll('#timeline .ytick').length >= 12")
    page.wait_for_function(
        "/[1-9][0-9]* of [0-9]* requests drawn/.test(document.getElementById('batch-about').textContent)"
    )
    page.wait_for_timeout(600)
    names = page.locator("#timeline .ytick text").all_text_contents()
    assert len(names) == 12
    assert [name for name in names if name in "AB"] == ["A", "B"]


@pytest.mark.parametrize("page", list(SIZES), indirect=True)
def test_the_result_is_never_cut_off(page):
    write(page, PROMPT)
    page.locator(".token").nth(3).focus()
    assert visible_heads(page) == ["model", "temperature", "top-k", "top-p"]
    set_knob(page, "min_p", 0.05)
    set_knob(page, "repetition_penalty", 1.2)
    write(page, PROMPT)
    page.locator(".token").nth(3).focus()
    assert visible_heads(page)[-1] == "min-p"


def visible_heads(page) -> list[str]:
    """Names of the stages whose column is whole and is covered by no other."""
    return page.evaluate("""() => {
      const frame = document.getElementById('stages').getBoundingClientRect();
      document.getElementById('stages').scrollIntoView({ block: 'center' });
      return [...document.querySelectorAll('#stages thead th')].slice(1).filter((head) => {
        const box = head.querySelector('b').getBoundingClientRect();
        const hit = (x) => head.contains(document.elementFromPoint(x, box.top + box.height / 2));
        return box.left >= frame.left && box.right <= frame.right && hit(box.left + 2) && hit(box.right - 2);
      }).map((head) => head.querySelector('b').textContent.replaceAll('\u00ad', ''));
    }""")


def test_a_large_pool_takes_little_of_the_page(browser):
    with serving(Small(pages=4000).config()) as running:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        try:
            page.set_default_timeout(WAIT)
            page.goto(running.url)
            finish(page)
            assert page.locator("#pages .page").count() == 1024
            assert page.locator("#pages .kept").count() == running.engine.scheduler.cache.num_pages
            assert page.locator("#pages").bounding_box()["height"] <= 200
        finally:
            page.close()


def test_tokens_from_the_cache_are_shaded(page, app):
    finish(page)
    second = page.locator(".lane").nth(1)
    prompt = page.locator("#prompt-b").input_value()
    cached = app.tokenizer.decode(app.tokenizer.encode(prompt)[:32])
    assert "".join(second.locator(".cached").all_text_contents()) == cached
    assert second.locator(".prompt").text_content() == prompt
    write(page, "Ida 🦊 möchte née 日本 one")
    assert page.locator(".lane .prompt").text_content() == "Ida 🦊 möchte née 日本 one"


def test_the_page_and_the_node_of_a_token_light_up(page, app):
    finish(page)
    second = page.locator(".lane").nth(1)
    ids = app.tokenizer.encode(page.locator("#prompt-b").input_value())
    cache = app.engine.scheduler.cache
    for position in (3, 20, len(ids) - 1):
        second.locator(".prompt span").nth(position).hover()
        node, place = held_by(cache, ids, position)
        assert page.locator("#tree .lit").get_attribute("data-node") == str(node.number)
        lit = (
            "[...document.querySelectorAll('#pages .page')].flatMap((p, i) => (p.classList.contains('lit') ? [i] : []))"
        )
        assert page.evaluate(lit) == [node.pages[place]]
    page.locator("h1").hover()
    assert page.locator(".lit").count() == 0


def held_by(cache, ids: list[int], position: int):
    """The node of the tree that holds the token at ``position``, and the place of the token's page in it."""
    at = 0
    parent = None
    while True:
        (node,) = [
            each
            for each in cache.nodes.values()
            if (each.parent.number if each.parent.parent else None) == parent
            and list(each.tokens)[: len(ids) - at] == ids[at : at + len(each.tokens)]
        ]
        if position < at + len(node.tokens):
            return node, (position - at) // cache.page_size
        at += len(node.tokens)
        parent = node.number


def test_a_page_of_a_running_request_lights_up(page):
    finish(page)
    page.locator("#both").uncheck()
    set_knob(page, "max_tokens", 300)
    page.locator("#speed").fill("12")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function("document.querySelectorAll('.lane').length === 1 && document.querySelector('.token')")
    page.get_by_role("button", name="Pause").click()
    while page.locator(".token").count() < 4:
        page.get_by_role("button", name="One step").click()
        page.wait_for_timeout(50)
    page.locator(".token").nth(2).hover()
    assert page.locator("#pages .lit").text_content() == "A"
    assert page.locator("#tree .lit").count() == 0


def test_a_link_carries_prompts_and_knobs(page, app):
    page.locator("#grammar").evaluate("() => { document.getElementById('knobs-box').open = true; }")
    page.locator("#grammar").select_option("regex")
    page.locator("#grammar-text").fill(" (a & b|c=d)#?")
    set_knob(page, "temperature", 0.35)
    set_knob(page, "seed", 11)
    write(page, "Ida & Tom = 100 % friends")
    link = page.url
    answer = tokens(page)
    other = page.context.new_page()
    try:
        other.goto(link)
        finish(other)
        assert tokens(other) == answer
        fields = ("#prompt-a", "#temperature", "#seed", "#grammar-text")
        assert [other.locator(f).input_value() for f in fields] == [page.locator(f).input_value() for f in fields]
        assert other.locator(".lane").count() == 1
        assert other.url == link
    finally:
        other.close()


def test_what_is_typed_before_the_engine_answers_stays(browser, app):
    page = browser.new_page()
    held = []

    def hold(route) -> None:
        held.append(route)

    try:
        page.set_default_timeout(WAIT)
        page.route("**/v1/steps", hold)
        with page.expect_request("**/v1/steps"):
            page.goto(app.url + "#prompt-a=One&top=3")
        assert page.locator("#prompt-a").input_value() == "One"
        page.locator("#prompt-a").fill("There was a bear named Ida")
        held[0].continue_()
        finish(page)
        assert "there is no top;" in page.locator("#alert").text_content()
        assert page.locator("#prompt-a").input_value() == "There was a bear named Ida"
        assert page.locator(".lane .prompt").first.text_content() == "There was a bear named Ida"
    finally:
        page.close()


def test_a_wrong_link_says_so_and_the_rest_is_used(page):
    finish(page)
    page.evaluate("location.hash = 'temperature=9&both=false&top=3&prompt-a=Ida'")
    page.wait_for_function("document.querySelector('.lane .prompt')?.textContent === 'Ida'")
    said = page.locator("#alert").text_content()
    assert "temperature is 9, and it must be a number from 0 to 2" in said
    assert "there is no top;" in said
    assert page.locator("#temperature").input_value() == "0.9"
    finish(page)
    assert page.locator(".lane").count() == 1
    assert page.url.endswith("#prompt-a=Ida&both=false")


def test_a_kept_answer_is_compared_to_the_next_one(page):
    write(page, PROMPT)
    before = tokens(page)
    page.get_by_role("button", name="Keep A").click()
    set_knob(page, "temperature", 2)
    page.wait_for_function("document.querySelectorAll('.lane').length === 2")
    finish(page)
    assert page.evaluate(NAMES) == ["A", "A2"]
    after = tokens(page)
    assert tokens(page, 1) == before
    first = next(i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1])
    marked = "(all) => all.flatMap((token, i) => token.classList.contains('differs') ? [i] : [])"
    assert [page.locator(".lane").nth(i).locator(".token").evaluate_all(marked) for i in (0, 1)] == [[first], [first]]
    assert f"differs from A2 at token {first + 1}" in page.locator(".lane small").first.text_content()
    assert page.locator(".lane .kept-at").nth(1).text_content() == "kept, at temperature 0.9"
    set_knob(page, "temperature", 0.9)
    page.wait_for_function("document.querySelector('.lane small').textContent.endsWith('the same as A2')")
    assert page.locator(".differs").count() == 0
    page.get_by_role("button", name="Close A2").click()
    assert page.evaluate(NAMES) == ["A"]


@pytest.mark.parametrize("page", list(SIZES), indirect=True)
def test_a_token_shows_what_it_looked_at(page, app):
    write(page, PROMPT)
    ids = app.tokenizer.encode(PROMPT + "".join(tokens(page)))
    prompt = len(app.tokenizer.encode(PROMPT))
    peer = peer_weights(ids)
    looked = (
        "(lane) => [...lane.querySelectorAll('.prompt span, .token')].map((t) => +t.style.getPropertyValue('--looked'))"
    )
    about = page.locator("#looked")
    assert about.is_hidden()
    for layer, token in ((2, 9), (2, 3), (4, 3)):
        page.locator("#layer").select_option(str(layer))
        page.locator(".token").nth(token).focus()
        page.wait_for_function(
            "(words) => document.getElementById('looked').textContent.includes(words)",
            arg=f"“{tokens(page)[token].replace(' ', '␣')}” looked in layer {layer}",
        )
        position = prompt + token
        weights = page.locator(".lane").evaluate(looked)
        assert weights[: position + 1] == pytest.approx(peer[layer][position, : position + 1].tolist(), abs=1e-5)
        assert sum(weights) == pytest.approx(1, abs=1e-5)
        tinted = "(all) => all.map((token) => getComputedStyle(token).backgroundColor)"
        colors = page.locator(".lane .prompt span, .lane .token").evaluate_all(tinted)
        alphas = [float(color.rsplit("/" if "/" in color else ",", 1)[1].strip(" )")) for color in colors]
        assert alphas == pytest.approx([0.9 * (weight / max(weights)) ** 0.5 for weight in weights], abs=0.01)
        likeliest = max(range(position + 1), key=weights.__getitem__)
        assert f"{100 * weights[likeliest]:.1f} %" in about.text_content()
    page.get_by_role("button", name="Follow the newest token").click()
    assert page.locator(".looks").count() == 0
    page.locator("#layer").select_option("")
    assert about.is_hidden()


def test_a_refusal_stands_where_the_weights_would(browser, app, monkeypatch):
    page = browser.new_page()  # its console reports the refusal as an error
    try:
        page.set_default_timeout(WAIT)
        page.goto(app.url)
        write(page, PROMPT)
        page.locator("#layer").select_option("0")
        monkeypatch.setattr(attention, "MOST_TOKENS", 8)
        page.locator(".token").nth(12).focus()
        page.wait_for_function("document.getElementById('looked').textContent.endsWith('choose one of 0 to 7')")
        assert page.locator(".looks").count() == 0
    finally:
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", list(SIZES), indirect=True)
def test_the_tour_points_at_five_things_and_leaves_nothing_behind(page, scheme):
    page.emulate_media(color_scheme=scheme)
    finish(page)
    start = page.get_by_role("button", name="Tour of one minute")
    start.focus()
    page.keyboard.press("Enter")
    seen = []
    for step in range(1, 6):
        assert page.locator("#tour-title").text_content().startswith(f"{step} of 5")
        assert page.evaluate("document.activeElement.id") == "tour-next"
        assert page.locator(".toured").count() == 1
        seen.append(page.locator(".toured").get_attribute("id"))
        assert page.locator(".toured").evaluate(
            "(e) => { const b = e.getBoundingClientRect(); return b.top < innerHeight && b.bottom > 0; }"
        )
        box = page.locator("#tour").bounding_box()
        size = page.viewport_size
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size["width"]
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= size["height"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert size["width"] < 1000 or not overlaps(box, page.locator(".toured").bounding_box())
        page.keyboard.press("Enter")
    assert len(set(seen)) == 5
    assert page.locator("#tour").is_hidden()
    playwright.expect(page.locator(".toured")).to_have_count(0)  # the dialog says a moment later that it is closed
    assert start.evaluate("(button) => button === document.activeElement")
    start.click()
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Back").click()
    assert page.locator("#tour-title").text_content().startswith("1 of 5")
    assert page.locator("#tour-back").is_disabled()
    for _ in range(5):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || document.activeElement.closest('#tour')")
    page.keyboard.press("Escape")
    assert page.locator("#tour").is_hidden()
    playwright.expect(page.locator(".toured")).to_have_count(0)  # the dialog says a moment later that it is closed
    assert start.evaluate("(button) => button === document.activeElement")


def overlaps(one: dict[str, float], two: dict[str, float]) -> bool:
    """Whether two boxes of a page have a point in common."""
    sides = (("x", "width"), ("y", "height"))
    return all(one[at] < two[at] + two[size] and two[at] < one[at] + one[size] for at, size in sides)
