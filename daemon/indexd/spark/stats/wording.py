"""What only the statistics say in words, for the terminal and the page alike; ``config.wording`` has the rest."""

from __future__ import annotations

from typing import Any

from indexd.pages.wording import show_number

#: The ranges of queries, in words.
RANGE_WORDS = {"all": "all of time", "hour": "its hour", "minute": "its minute", "second": "its second"}


def show_repeated(seen: dict[str, Any], hot: dict[str, Any]) -> str:
    """How many keys occur more than once: the number, an estimate, or where a sample is too coarse, the known ones."""
    if seen["isExact"]:
        return show_number(seen["repeated"])
    if hot["repeatedAtLeast"] > seen["repeated"]:
        return f"at least {show_number(hot['repeatedAtLeast'])}"
    return f"about {show_number(seen['repeated'])}"


def show_range(first: int, last: int | None) -> str:
    """A range of counts, both ends included."""
    if last is None:
        return f"{first:,} and more"
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
