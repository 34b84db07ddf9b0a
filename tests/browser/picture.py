"""A picture of a page as Chromium shows it.

    envs/browser/bin/python tests/browser/picture.py PAGE.html PICTURE.png [WIDTH [HEIGHT]]

Without HEIGHT: of the whole page.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(page: Path, picture: Path, width: int = 1300, height: int | None = None) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": width, "height": height or 900}, color_scheme="light")
        view.goto(page.resolve().as_uri())
        view.wait_for_selector("html[data-drawn]", state="attached")
        view.screenshot(path=picture, full_page=height is None)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
