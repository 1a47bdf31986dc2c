"""The page of an audit in a real browser: it fetches and runs nothing, and fits a phone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from indexd.audit.causes import make_cause
from indexd.audit.page import audit_page
from indexd.audit.report import AuditReport
from indexd.audit.result import Gap
from indexd.storage.lock import BrokerLock
from support.audit_reports import GIB, made_report
from support.browser import CHROMIUM, Browser

pytestmark = CHROMIUM

PWN = "document.documentElement.dataset.pwned=1"
HOSTILE = f"</title></svg><script>{PWN}</script><img/src=http://elsewhere.invalid/x onerror={PWN}>"


def wrong_store() -> AuditReport:
    report = made_report(
        640,
        30,
        [
            (361 * GIB, 21 * GIB, make_cause("unclean-stop", "it begins behind a full file", HOSTILE)),
            (440 * GIB, 1 << 20, make_cause("index-off")),
            (637 * GIB, 3 * GIB, make_cause("not-dispatched-yet", "the broker runs")),
        ],
        [(f"index/{HOSTILE}", "chain-previous", HOSTILE * 5, 1200)],
        [Gap(500 * GIB, 520 * GIB, HOSTILE)],
    )
    first, *files = report.audit.files
    state = replace(report.state, lock=BrokerLock(True, 4711, "lock"))
    audit = replace(report.audit, files=(replace(first, name=HOSTILE, unreachable=31_234), *files))
    return replace(report, audit=audit, state=state)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
def test_it_runs_nothing_fetches_nothing_and_fits(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "audit.html"
    path.write_text(audit_page(wrong_store()), "utf-8")
    tab = browser.page(path.as_uri(), width=width, dark=dark)
    assert tab.eval("document.documentElement.dataset.pwned ?? ''") == ""
    assert [url for url in tab.requests if not url.startswith("file:")] == []
    assert tab.complaints == []
    assert tab.eval("document.scripts.length") == 0
    assert tab.eval("document.documentElement.scrollWidth") <= width
    assert tab.text("h1").startswith("9")
