"""The documents: current where the program makes them, short where that is promised; every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.docs import METRICS, PAGE, QUERY_PAGE, configuration, metrics, questions

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_page_of_settings_is_current() -> None:
    assert PAGE.read_text("utf-8") == configuration(), "run scripts/docs"
    page = QUERY_PAGE.read_text("utf-8")
    assert "| `query-key` | `-k`, `--key` | `key` |" in page
    assert page == questions(page), "run scripts/docs"


def test_the_tables_of_figures_are_current() -> None:
    page = METRICS.read_text("utf-8")
    assert page == metrics(page), "run scripts/docs"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_what_is_read_first_stays_short(name: str) -> None:
    assert (ROOT / name).stat().st_size <= 12 * 1024


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in DOCUMENTS:
        for path, anchor in LINK.findall(page.read_text("utf-8")):
            target = page.parent / path if path else page
            is_page = target.suffix == ".md"
            if not target.exists() or (anchor and is_page and anchor not in anchors(target)):
                broken.append(f"{page.name}: {path}#{anchor}")
    assert broken == []


def test_every_page_stands_in_the_readme() -> None:
    words = (ROOT / "README.md").read_text("utf-8") + (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in words] == []
