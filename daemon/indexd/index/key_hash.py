"""From topic and key to the number that an index entry stores (spec rocketmq-store 3.3, 4.5)."""

from __future__ import annotations

from indexd.commitlog.properties import key_hash

INDEX_TYPES = ("K", "U", "T")


def index_key_hash(topic: str, key: str, index_type: str | None = None) -> int:
    """The key hash; a tag (index type T) is hashed under ``topic#T#tag``, all else under ``topic#key``."""
    return key_hash(f"{topic}#T#{key}" if index_type == "T" else f"{topic}#{key}")
