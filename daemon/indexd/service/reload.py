"""HUP: which keys a running daemon takes over at once."""

from __future__ import annotations

from indexd.config import Config

# Keys that a HUP changes at once; any other needs a restart.
RELOADABLE = frozenset(
    {
        "log_level", "log_format", "drain_interval", "flush_interval", "poll_min_ms", "poll_max_ms",
        "retry_max_seconds", "settle_ms", "corrupt_after_ms", "on_corrupt", "verify_crc",
    }
)  # fmt: skip


def changed_keys(old: Config, new: Config) -> set[str]:
    """Keys whose values differ between two configurations."""
    return {
        key
        for section in ("store", "reader", "queue", "index", "flush", "recovery", "query", "log")
        for key, value in getattr(new, section).model_dump().items()
        if getattr(getattr(old, section), key) != value
    }


def merge_reloadable(old: Config, new: Config) -> Config:
    """``old`` with the reloadable keys of ``new``."""
    merged = {}
    for section in ("reader", "queue", "flush", "log"):
        fresh = getattr(new, section)
        names = {key: getattr(fresh, key) for key in type(fresh).model_fields if key in RELOADABLE}
        merged[section] = getattr(old, section).model_copy(update=names)
    return old.model_copy(update=merged)
