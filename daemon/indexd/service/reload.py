"""HUP: which keys a running daemon takes over at once."""

from __future__ import annotations

from indexd.config import Config
from indexd.errors import IndexdError
from indexd.service.instance import Instance
from indexd.service.log import configure_log

# Keys that a HUP changes at once; any other needs a restart. Who a node is and where it listens, connects and
# publishes is settled for the life of a process.
RELOADABLE = frozenset(
    {
        "log_level", "log_format", "drain_interval", "flush_interval", "poll_min_ms", "poll_max_ms",
        "retry_max_seconds", "settle_ms", "corrupt_after_ms", "on_corrupt", "verify_crc",
        "broker_address", "broker_check_interval",
        "disk_used_max", "read_rate_max", "memory_max", "drop_cache",
    }
)  # fmt: skip
_SECTIONS = (
    "store", "reader", "queue", "index", "outputs", "flush", "recovery", "query", "log",
    "node", "http", "mqtt", "limits",
)  # fmt: skip


def reload(instance: Instance) -> bool:
    """Read the configuration anew and take over what can be; False, and said so, if it does not hold."""
    instance.is_reload_due = False
    before = instance.config
    try:
        fresh = instance.reload_config()
    except IndexdError as error:
        instance.log.error("reload_refused", problem=error.line())  # noqa: TRY400 - a line, no trace
        return False
    changed = changed_keys(before, fresh)
    instance.config = merge_reloadable(before, fresh)
    instance.log = configure_log(instance.config.log, instance.board.events.tap)
    instance.log.info("reloaded", changed=sorted(changed & RELOADABLE), needs_restart=sorted(changed - RELOADABLE))
    return True


def changed_keys(old: Config, new: Config) -> set[str]:
    """Keys of a daemon whose values differ between two configurations."""
    return {
        key
        for section in _SECTIONS
        for key, value in getattr(new, section).model_dump().items()
        if getattr(getattr(old, section), key) != value
    }


def merge_reloadable(old: Config, new: Config) -> Config:
    """``old`` with the reloadable keys of ``new``; a section in which none of them differs stays the same object."""
    merged = {}
    for section in _SECTIONS:
        before, fresh = getattr(old, section), getattr(new, section)
        names = {key: getattr(fresh, key) for key in type(fresh).model_fields if key in RELOADABLE}
        if any(getattr(before, key) != value for key, value in names.items()):
            merged[section] = before.model_copy(update=names)
    return old.model_copy(update=merged)
