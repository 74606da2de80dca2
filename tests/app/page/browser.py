"""A page in Debian's Chromium, and what it must never do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
POLLS_MS = 1000  # between two of the page's polls (figures.js)
# Runs before the page's own scripts: it then polls each so many milliseconds.
OFTEN = """{
  const later = setTimeout;
  setTimeout = (what, ms, ...rest) => later(what, ms === %d ? %d : ms, ...rest);
}"""


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    # Its sandbox does not run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield chromium
        finally:
            chromium.close()


class Page:
    """A tab on a gateway. `problems` are what its console said, and what broke in it; the browser
    itself writes down each refused request, and those in `expected` are meant to be refused."""

    def __init__(self, context: Any, url: str, polls_ms: int = POLLS_MS) -> None:
        self.tab = context.new_page()
        if polls_ms != POLLS_MS:
            self.tab.add_init_script(OFTEN % (POLLS_MS, polls_ms))
        self.url = url
        self.expected: tuple[int, ...] = ()
        self._said: list[str] = []
        self.tab.on("console", self._note)
        self.tab.on("pageerror", lambda error: self._said.append(f"broken: {error}"))
        self.tab.on("dialog", lambda dialog: self._said.append(f"dialog: {dialog.message}"))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self._said.append(message.text)

    @property
    def problems(self) -> list[str]:
        refused = [f"the server responded with a status of {status}" for status in self.expected]
        if 0 in self.expected:
            refused.append("net::ERR_")
        return [said for said in self._said if not any(part in said for part in refused)]

    def open(self, view: str = "") -> Page:
        """Load the page and wait until it has met the gateway."""
        self.tab.goto(f"{self.url}/{view and '#' + view}")
        self.tab.locator(".status .words", has_text="Ready").wait_for()
        return self

    def ask(self, question: str) -> Page:
        """Send a message."""
        self.tab.fill("#question", question)
        self.tab.press("#question", "Enter")
        return self

    def answered(self) -> Any:
        """The newest answer, once it is complete. An earlier one may be long before."""
        answer = self.tab.locator(".turn:last-child .answer.done")
        answer.wait_for()
        return answer

    def figure(self, name: str) -> float:
        """A figure of the newest answer's legend."""
        text = self.tab.locator(f".answer >> nth=-1 >> [data-figure={name}]").inner_text()
        return float(text.replace(",", ""))


def axe_findings(tab: Any) -> list[str]:
    """What axe-core calls serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    results = Axe().run(tab).response
    return [
        f"{found['id']}: {node['target']} {node.get('failureSummary', '')}"
        for found in results["violations"]
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
    ]
