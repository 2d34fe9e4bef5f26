"""A real Chromium for tests of web pages."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


@contextmanager
def launch_chromium() -> Iterator[Any]:
    """A test that needs it is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    paths = [path for name in CHROMES if (path := shutil.which(name))] + ([str(MAC)] if MAC.exists() else [])
    with playwright.sync_playwright() as play:
        if not paths and not Path(play.chromium.executable_path).exists():
            pytest.skip("no Chromium here: apt-get install chromium, or playwright install chromium")
        browser = play.chromium.launch(executable_path=paths[0] if paths else None, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """An open page, and every error and foreign request of it."""

    def __init__(self, chromium, address, width=1300, height=900, slow_path=None, **options):
        self.page = chromium.new_page(viewport={"width": width, "height": height}, **options)
        self.page.set_default_timeout(120_000)
        self.errors: list[str] = []
        self.held = []
        if slow_path:  # requests are held until release()
            self.page.route(slow_path, lambda route: self.held.append(route))
        self.page.on("console", lambda log: self.errors.append(log.text) if log.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.check_host(request.url, address))
        self.page.goto(address, wait_until="commit")

    def check_host(self, url, address):
        if not url.startswith((re.split("[?#]", address)[0], "data:", "blob:")):
            self.errors.append(f"requested {url}")

    def wait_until(self, condition):
        for _ in range(1200):
            if condition():
                return
            self.page.wait_for_timeout(100)
        raise AssertionError("the condition did not become true")

    def release(self):
        for route in self.held:
            route.continue_()
        self.page.unroute_all()
