"""A notebook in a real JupyterLab, up to its sliders: cells run in a browser, and a slider changes the picture."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import nbformat
import pytest

from smoke.framework.manifest import ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("jupyterlab", reason='jupyterlab is not installed; pip install -e ".[notebooks]"')

NAME, CELL, HEADING = "L4_sampler", "sliders", "0. softmax of the logits"  # of the picture below the sliders
WAIT_SECONDS, RUN_SECONDS = 180, 600
NOTEBOOK = "window.jupyterapp?.shell.currentWidget"
RUN_ALL = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => (window.haveRun = true)) }"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Where a JupyterLab serves the notebook, cut after its sliders, without the settings of this machine's user."""
    home = tmp_path_factory.mktemp("lab")
    (home / "notebooks").mkdir()
    notebook = nbformat.read(ROOT / "notebooks" / f"{NAME}.ipynb", as_version=4)
    notebook.cells = notebook.cells[: [own.id for own in notebook.cells].index(CELL) + 1]
    nbformat.write(notebook, home / "notebooks" / f"{NAME}.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={home / 'notebooks'}"]
    command += ["--expose-app-in-browser", "--LabApp.extension_manager=readonly"]
    folders = {name: str(home / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JUPYTERLAB_SETTINGS_DIR": str(home / "settings")}
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | folders | settings, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/api/status", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(WAIT_SECONDS)


def wait_for(address, server):
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, "JupyterLab has ended"
        try:
            urllib.request.urlopen(address).close()
        except urllib.error.URLError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"JupyterLab does not answer within {WAIT_SECONDS} s")


def test_a_notebook_runs_and_its_slider_changes_the_picture(lab, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1000 * WAIT_SECONDS)
    page.goto(f"{lab}/lab/tree/{NAME}.ipynb")
    session = f"{NOTEBOOK}?.context?.sessionContext?.session"
    page.wait_for_function(f"() => {session}?.path === '{NAME}.ipynb' && {session}.kernel?.status === 'idle'")
    page.evaluate(RUN_ALL)
    page.wait_for_function("() => window.haveRun", timeout=1000 * RUN_SECONDS)
    cells = page.evaluate(f"() => {NOTEBOOK}.content.model.toJSON().cells")
    outputs = [output for own in cells for output in own.get("outputs", [])]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert outputs, "nothing has run"

    page.evaluate(f"(index) => {NOTEBOOK}.content.scrollToItem(index, 'start')", [c["id"] for c in cells].index(CELL))
    picture = page.locator(".widget-html-content", has_text=HEADING)
    picture.wait_for()
    labels = page.locator(".widget-slider .widget-label")
    assert labels.count() == 5
    assert labels.evaluate_all("all => all.filter(label => label.scrollWidth > label.clientWidth)") == []
    right_edge = "(all) => Math.max(...all.map((part) => part.getBoundingClientRect().right))"
    columns = picture.locator("div[style*=grid-template-columns]")
    assert columns.count() == 6, "a column for each stage"
    assert columns.evaluate_all(right_edge) <= page.locator(".jp-NotebookPanel").evaluate_all(right_edge), "one is cut"
    before = picture.inner_html()
    handle = page.locator(".widget-slider .noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")
    page.wait_for_function(
        "([heading, before]) => [...document.querySelectorAll('.widget-html-content')]"
        ".some((own) => own.textContent.includes(heading) && own.innerHTML !== before)",
        arg=[HEADING, before],
    )
