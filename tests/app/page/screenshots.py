"""Pictures of the page, of a gateway that runs: python -m tests.app.page.screenshots URL

Writes docs/images/page-light.png, page-dark.png and page-phone.png: a chat with its marks beside
the live figures, the race, and the chat again on a phone. The gateway is a real one, so that the
figures in the pictures are figures of the default model.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from PIL import Image

from .browser import Page, browser

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "images"
QUESTION = "Write a Python function that checks whether a text is a palindrome."
DESK = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}


def main() -> None:
    """Parse the command line and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of a gateway that is ready, such as http://127.0.0.1:8000")
    parser.add_argument("--into", type=Path, default=FOLDER, help="folder for the pictures")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        for name, view, size, scheme in (
            ("light", "chat", DESK, "light"),
            ("dark", "race", DESK, "dark"),
            ("phone", "chat", PHONE, "light"),
        ):
            context = chromium.new_context(
                viewport=size, color_scheme=scheme, device_scale_factor=2
            )
            context.set_default_timeout(60_000)
            page = Page(context, options.url).open(view)
            if view == "race":
                page.tab.get_by_role("button", name="Start the race").click()
                page.tab.locator("[data-figure=ratio]").wait_for()
            else:
                page.ask(QUESTION).answered()
                marked = page.tab.locator(".answer .t.draft").filter(has_text=re.compile(r"\w"))
                marked.nth(4).hover()
            path = options.into / f"page-{name}.png"
            page.tab.screenshot(path=str(path))
            Image.open(path).quantize(256).save(path, optimize=True)  # 0.4 of the bytes
            print(path)
            context.close()


if __name__ == "__main__":
    main()
