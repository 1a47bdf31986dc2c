"""What is published: topics and JSON, made of the board's row and of events. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from indexd.serve.events import Event

ONLINE, OFFLINE = b"online", b"offline"
_LEVEL_BYTES_MAX = 200
_PLACES = frozenset({"begin", "end"})


def topic_level(name: str) -> str:
    """``name`` as one level of a topic: what MQTT or its wildcards forbid there becomes ``_``; at most 200 bytes."""
    clean = "".join("_" if char in "/+#" or not char.isprintable() else char for char in name)
    return clean.encode()[:_LEVEL_BYTES_MAX].decode(errors="ignore") or "_"


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one node, ``PREFIX/CLUSTER/NODE/...``, and the name it connects with."""

    prefix: str
    cluster: str
    node_id: str

    @property
    def _root(self) -> str:
        return f"{self.prefix}/{topic_level(self.cluster)}/{topic_level(self.node_id)}"

    @property
    def status(self) -> str:
        """Retained: ``online``, or ``offline``."""
        return f"{self._root}/status"

    @property
    def state(self) -> str:
        """Retained: the newest state."""
        return f"{self._root}/state"

    def event(self, kind: str) -> str:
        """Not retained: the events of one kind."""
        return f"{self._root}/event/{topic_level(kind)}"

    @property
    def client_id(self) -> str:
        """The same for every connection of a node.

        So the broker ends a connection that was left half open, and publishes its will, before it takes the next one;
        otherwise that ``offline`` would come minutes later, on top of ``online``.
        """
        return f"indexd-{topic_level(self.cluster)}-{topic_level(self.node_id)}"


def state_payload(row: Mapping[str, Any]) -> bytes:
    """The board's row; 64-bit offsets are strings, as they are over HTTP: a double holds 53 bits."""
    return _json(_texts(row))


def event_payload(event: Event, board: Mapping[str, Any]) -> bytes:
    """One event. Within one ``bootId`` the ``seq`` of the events of all kinds grows by one: a gap is what was lost.

    The same event may come twice, after a connection that broke before the broker had answered.
    """
    about = {
        "seq": event.number,
        "bootId": board["bootId"],
        "cluster": board["cluster"],
        "nodeId": board["nodeId"],
        "at": event.at,
        "kind": event.kind,
        "event": event.name,
        "fields": event.fields,
    }
    return _json(_texts(about))


def condition(row: Mapping[str, Any]) -> str:
    """What is worth a state at once when it changes: phase, problems, corruption, and what is known of the broker."""
    broker = row.get("broker") or {}
    seen = [row.get(key) for key in ("phase", "problems", "corrupt")]
    return json.dumps([*seen, *(broker.get(key) for key in ("alive", "indexing", "unsafe"))], default=str)


def _json(value: object) -> bytes:
    # ASCII: a path that is no UTF-8 would have none otherwise.
    return json.dumps(value, separators=(",", ":"), default=str).encode()


def _texts(value: object, key: str = "") -> object:
    if isinstance(value, Mapping):
        return {name: _texts(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        # A list of offsets, or of stretches [begin, end, reason], is called for what it holds.
        inner_key = "offset" if key == "uncovered" else key
        return [_texts(inner, inner_key) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool) and _is_offset(key):
        return str(value)
    return value


def _is_offset(key: str) -> bool:
    return key in _PLACES or key.lower().endswith("offset")
