"""Take the screenshots of the documentation with Chromium: ``python scripts/make_screenshots.py [name ...]``.

The runs are those of ``workbench demo``, so the bundled model must be installed. Times in the pictures are those of the
machine that takes them.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from browsers import CHROMIUM_PROGRAM, missing, wait_for_port
from playwright.sync_api import Browser, Locator, sync_playwright

from workbench import Engine
from workbench.apps.demo import CONFIG, Arrivals
from workbench.viz import app
from workbench.viz.export_html import to_html

FOLDER = Path(__file__).parent.parent / "docs" / "images"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
SMALL_SCREEN = (1280, 800)
WIDTHS = ((390, 844), (1100, 800), (1440, 900), (2560, 1300))
"""Screens on which the first view is looked at."""


@contextmanager
def opened(browser: Browser, address: str, size: tuple[int, int]) -> Iterator[Locator]:
    """Open the view on a new page."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme="light")
    page = context.new_page()
    page.goto(address)
    root = page.locator(".wb-root").first
    root.wait_for()
    page.wait_for_timeout(1500)
    yield root
    context.close()


def save(root: Locator, name: str, *, dark: bool = False) -> None:
    """Save a picture of the window once everything is drawn, and one of it in the dark theme if asked."""
    for scheme, suffix in (("dark", "-dark"), ("light", "")) if dark else (("light", ""),):
        root.page.emulate_media(color_scheme=scheme)
        root.page.wait_for_timeout(800)
        root.page.screenshot(path=FOLDER / f"{name}{suffix}.png")
    print(name, flush=True)


def look_at(root: Locator, step: int) -> None:
    """Move the cursor to a step."""
    root.evaluate("(root, step) => root.workbench.cursor.seek(step)", step)


def take(browser: Browser, wanted: set[str]) -> None:
    """Take the named screenshots, or all of them if none is named."""

    def asked(name: str) -> bool:
        return not wanted or name in wanted

    with Engine("smollm2", CONFIG, wait_for_compiled=True) as engine, tempfile.TemporaryDirectory() as folder:
        Arrivals(engine).begin()
        engine.run(progress=False)
        one, two = Path(folder) / "one.html", Path(folder) / "two.html"
        to_html(engine.trace, one)
        if asked("dashboard-compare"):
            with Engine(engine.model, replace(CONFIG, max_num_batched_tokens=128)) as slower:
                Arrivals(slower).begin()
                slower.run(progress=False)
                to_html(engine.trace, two, other=slower.trace)
        if asked("dashboard-compare"):
            with opened(browser, f"file://{two}#all", (1280, 1190)) as root:
                look_at(root, 7)
                save(root, "dashboard-compare", dark=True)
        for width, height in WIDTHS:
            if asked(name := f"dashboard-story-{width}"):
                with opened(browser, f"file://{one}#story", (width, height)) as root:
                    look_at(root, 7)
                    save(root, name)
    if asked("dashboard-live") or asked("dashboard-step-into"):
        take_live(browser)


def take_live(browser: Browser) -> None:
    """Take the screenshots of a live engine in the middle of its run, and in the middle of a step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Engine("smollm2", CONFIG, wait_for_compiled=True) as engine:
        Arrivals(engine).begin()
        for _ in range(14):
            engine.step()
        server = app.serve(engine, port=port, threaded=True)
        wait_for_port(port)
        with opened(browser, f"http://127.0.0.1:{port}/", SMALL_SCREEN) as root:
            look_at(root, 7)
            save(root, "dashboard-live", dark=True)
            root.evaluate("(root) => root.workbench.stepInto()")
            for _ in range(12):
                root.page.wait_for_timeout(500)
                root.get_by_role("button", name="Next phase").click()
            root.page.wait_for_timeout(500)
            root.evaluate("(root) => root.workbench.cursor.toLive()")
            save(root, "dashboard-step-into", dark=True)
        server.stop()


def main() -> None:
    """Take the screenshots named on the command line, or all of them."""
    if absent := missing("chromium"):
        raise SystemExit(absent)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which(CHROMIUM_PROGRAM), args=ARGUMENTS)
        take(browser, set(sys.argv[1:]))
        browser.close()


if __name__ == "__main__":
    main()
