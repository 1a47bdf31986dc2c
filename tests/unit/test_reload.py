"""Which keys a HUP changes in a running daemon, and which are said to need a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexd.config import load
from indexd.service.instance import RELOADABLE, changed_keys, merge_reloadable
from support.inside import config_of

if TYPE_CHECKING:
    from pathlib import Path


def test_what_a_hup_changes_and_what_it_does_not(tmp_path: Path) -> None:
    old = config_of(tmp_path, tmp_path / "data")
    new = load(
        {
            "store": str(tmp_path), "data": str(tmp_path / "data"), "disk_used_max": "0.5", "read_rate_max": "1MiB",
            "memory_max": "1GiB", "drop_cache": "false", "broker_check_interval": "1", "http": "127.0.0.1:1",
            "mqtt_host": "localhost", "cluster": "other", "queues_max": "5", "drain_interval": "9",
        },
        None,
        {"HOME": "/nowhere"},
    )  # fmt: skip
    changed = changed_keys(old, new)
    assert {
        "disk_used_max",
        "read_rate_max",
        "memory_max",
        "drop_cache",
        "broker_check_interval",
    } <= changed & RELOADABLE
    assert {"http", "mqtt_host", "cluster", "queues_max"} <= changed - RELOADABLE
    merged = merge_reloadable(old, new)
    assert merged.limits == new.limits
    assert merged.node.broker_check_interval == 1
    assert merged.queue.drain_interval == 9
    assert (merged.http, merged.mqtt, merged.outputs) == (old.http, old.mqtt, old.outputs)
    assert merged.node.cluster is None
    assert changed_keys(merged, new) == changed - RELOADABLE
    assert all(merge_reloadable(old, old).model_dump()[key] == value for key, value in old.model_dump().items())
