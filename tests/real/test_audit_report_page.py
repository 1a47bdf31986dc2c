"""The page of an audit in a real browser: it fetches and runs nothing, fits a phone, and the keyboard reaches holes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.audit.causes import make_cause
from indexd.audit.page import audit_page
from indexd.audit.result import Gap
from support.audit_reports import GIB, Made, with_pid
from support.browser import CHROMIUM, Browser, Tab

pytestmark = CHROMIUM

PWN = "document.documentElement.dataset.pwned=1"
HOSTILE = f"</title></svg><script>{PWN}</script><img/src=http://elsewhere.invalid/x onerror={PWN}>"
_BOX = """(() => {{ const box = document.querySelector({0}).getBoundingClientRect();
  return [box.left, box.top, box.width, box.height]; }})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def wrong_store() -> Made:
    made = Made(640, 30, 0)
    made.files[3] = replace(made.files[3], name=HOSTILE, unreachable=31_234)
    made.files.pop(17)
    made.add_hole(
        made.files[16].end + 1024, 21 * GIB, make_cause("unclean-stop", "it begins behind a full file", HOSTILE)
    )
    made.add_hole(240 * GIB, 1 << 20, make_cause("index-off"))
    made.add_hole(637 * GIB, 3 * GIB, make_cause("not-dispatched-yet", "the broker runs"))
    made.gaps.append(Gap(500 * GIB, 520 * GIB, HOSTILE))
    made.add_finding(f"index/{HOSTILE}", "chain-previous", HOSTILE * 5, 1200)
    with_pid(made, 4711)
    return made


def opened(browser: Browser, folder: Path, page: str, *, width: int, dark: bool = False) -> Tab:
    path = folder / "audit.html"
    path.write_text(page, "utf-8")
    tab = browser.page(width=width, dark=dark)
    tab.open(path.as_uri())
    return tab


def colour(tab: Tab, x: float, y: float) -> tuple[int, int, int]:
    """What is really painted at a point of the page."""
    clip = {"x": x, "y": y, "width": 1, "height": 1, "scale": 1}
    shot = tab.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
    assert base64.b64decode(shot).startswith(b"\x89PNG")
    script = f"""(async () => {{
      const bytes = Uint8Array.from(atob("{shot}"), (one) => one.charCodeAt(0));
      const image = await createImageBitmap(new Blob([bytes], {{type: "image/png"}}));
      const canvas = new OffscreenCanvas(1, 1), pen = canvas.getContext("2d");
      pen.drawImage(image, 0, 0);
      return Array.from(pen.getImageData(0, 0, 1, 1).data).slice(0, 3);
    }})()"""
    red, green, blue = tab.eval(script)
    return red, green, blue


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
def test_it_runs_nothing_fetches_nothing_and_fits(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    tab = opened(browser, tmp_path, audit_page(wrong_store().report()), width=width, dark=dark)
    assert tab.eval("document.documentElement.dataset.pwned ?? ''") == ""
    assert [url for url in tab.requests if not url.startswith("file:")] == []
    assert tab.complaints == []
    assert tab.eval("document.scripts.length") == 0
    assert tab.eval("document.documentElement.scrollWidth") <= width
    assert tab.text("h1").startswith("9")


@pytest.mark.parametrize("dark", [False, True])
def test_the_hole_is_really_painted(browser: Browser, tmp_path: Path, dark: bool) -> None:
    tab = opened(browser, tmp_path, audit_page(wrong_store().report()), width=1280, dark=dark)
    left, top, width, height = tab.eval(_BOX.format("'.strip .hole'"))
    red, green, _ = colour(tab, left, top + height / 2)
    assert red > green + 40
    left, top, width, height = tab.eval(_BOX.format("'.strip .log'"))
    red, green, _ = colour(tab, left + width * 0.1, top + height / 2)
    assert green > red + 15


def test_the_keyboard_reaches_a_hole_and_from_there_its_row(browser: Browser, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path, audit_page(wrong_store().report()), width=1280)
    tab.press("Tab")
    assert tab.eval("document.activeElement.getAttribute('aria-label')").startswith("Hole 1")
    stroke = "getComputedStyle(document.activeElement.querySelector('rect')).strokeWidth"
    assert tab.eval(stroke) == "4px"
    tab.press("Enter")
    tab.wait("location.hash === '#hole-1'")
    row = "document.querySelector('#hole-1 td')"
    other = "document.querySelector('#hole-2 td')"
    assert tab.eval(f"getComputedStyle({row}).backgroundColor !== getComputedStyle({other}).backgroundColor")


def test_paper_is_light_and_has_everything(browser: Browser, tmp_path: Path) -> None:
    made = wrong_store()
    for number in range(20):
        made.add_finding(f"index/{made.files[0].name}", "slot-wiped", f"finding number {number}")
    tab = opened(browser, tmp_path, audit_page(made.report()), width=1280, dark=True)
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.eval("getComputedStyle(document.querySelector('#log')).backgroundColor") == "rgb(255, 255, 255)"
    assert "finding number 19" in tab.text("#findings")
    assert len(base64.b64decode(tab.call("Page.printToPDF", printBackground=False)["data"])) > 20_000
