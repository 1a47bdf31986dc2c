"""HUP: which keys a running daemon takes over at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

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
        "broker_address", "broker_check_interval", "scrub_interval",
        "disk_used_max", "read_rate_max", "memory_max", "drop_cache",
    }
)  # fmt: skip
_SECTIONS = (
    "store", "reader", "queue", "index", "outputs", "flush", "recovery", "query", "log",
    "node", "http", "remoting", "mqtt", "limits",
)  # fmt: skip


class Reloading:
    """Follows HUPs one after the other, on the event loop; ``on_end`` hears whether something was taken over.

    The files are read in a thread that nobody waits for: one on a file system that hangs holds up neither the index
    nor a stop.
    """

    def __init__(self, instance: Instance, on_end: Callable[[bool], None]) -> None:
        self._instance = instance
        self._on_end = on_end
        self._is_reading = self._is_due_again = False

    def begin(self) -> None:
        """A HUP came."""
        if self._is_reading:
            self._is_due_again = True
            return
        # Due until it is followed, in another opening if need be.
        self._instance.is_reload_due = self._is_reading = True
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="reload", daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        found: Config | Exception
        try:
            found = self._instance.reload_config()
        except Exception as error:  # noqa: BLE001 - said on the loop; the configuration stays
            found = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._end, found)

    def _end(self, found: Config | Exception) -> None:
        self._instance.is_reload_due = self._is_reading = False
        self._on_end(take_over(self._instance, found))
        if self._is_due_again:
            self._is_due_again = False
            self.begin()


def take_over(instance: Instance, found: Config | Exception) -> bool:
    """What can be of a configuration that was read anew; False, and said so, if there is none."""
    if isinstance(found, Exception):
        problem = found.line() if isinstance(found, IndexdError) else repr(found)
        instance.log.error("reload_refused", problem=problem)
        return False
    before = instance.config
    changed = changed_keys(before, found)
    instance.config = merge_reloadable(before, found)
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
