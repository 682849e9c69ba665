"""Take the picture of the page for the README: ``python docs/take_picture.py URL`` while ``mini-engine play`` runs."""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

with sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1280, "height": 1230})
    page.goto(sys.argv[1])
    page.locator("#speed").fill("30")
    page.wait_for_selector(".lane:nth-child(2) .token:nth-of-type(20)")
    page.get_by_role("button", name="Add six requests").click()
    page.wait_for_function("/: [4-6] running/.test(document.getElementById('batch-about').textContent)")
    page.wait_for_timeout(5500)
    page.get_by_role("button", name="Pause").click()
    page.locator(".lane:nth-child(2) .unlikely").nth(1).focus()
    page.wait_for_timeout(800)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(256)
    picture.save(Path(__file__).parent / "pictures" / "page.png", optimize=True)
    browser.close()
