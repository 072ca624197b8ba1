"""The picture in README.md: the book's first timeline as `make site` drew it, photographed by a Chromium.

make site && python site/picture.py        # docs/v0-v1.png, after `make traces` recorded its runs again
"""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "build" / "site" / "chapters" / "index.html"
OUT = ROOT / "docs" / "v0-v1.png"
ALONE = "mv-timeline { padding: 16px; background: #fff; } .mv-controls { display: none !important; }"


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"viewport": {"width": 1280, "height": 900}, "device_scale_factor": 2}
        page = browser.new_page(**size, color_scheme="light", reduced_motion="reduce")
        page.goto(PAGE.as_uri())
        page.add_style_tag(content=ALONE)
        page.evaluate("document.fonts.ready.then(() => 0)")
        page.locator("mv-timeline").screenshot(path=OUT)
        browser.close()
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
