"""What is asked and what comes back; times in ms since the epoch, offsets in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from indexd.commitlog.decoder import Message
from indexd.query.coverage import Coverage
from indexd.query.message import show_host

H = TypeVar("H")
TIME_MIN = -(1 << 63)
TIME_MAX = 2**63 - 1


class HasHits(Generic[H]):
    """An answer as the sequence of its hits: ``len(answer)``, ``for hit in answer``."""

    __slots__ = ()
    hits: Sequence[H]

    def __len__(self) -> int:
        return len(self.hits)

    def __iter__(self) -> Iterator[H]:
        return iter(self.hits)

    def to_json(self) -> dict[str, Any]:
        """One object with only what JSON has."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The same: a dict, with each hit whole in ``hits``."""
        return self.to_json()


class KeyQuery(NamedTuple):
    """Times inclusive. ``index_type``: K a piece of KEYS, U the UNIQ_KEY, T the whole TAGS, None K or U.

    ``before``: only messages before this physical offset, such as an earlier answer's ``cursor``.
    """

    topic: str
    key: str
    max_num: int = 64
    begin: int = 0
    end: int = TIME_MAX
    index_type: str | None = None
    before: int | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """One message of an answer without its body; None where it could not be read, which only rocketmq mode answers."""

    phy_offset: int
    store_timestamp: int | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    size: int | None = None
    keys: str | None = None
    uniq_key: str | None = None
    tags: str | None = None
    topic: str | None = None
    born_timestamp: int | None = None
    sys_flag: int | None = None
    born_host: tuple[str, int] | None = None
    store_host: tuple[str, int] | None = None

    @classmethod
    def of(cls, message: Message) -> Hit:
        """The hit that stands for ``message``."""
        return cls(
            message.phy_offset,
            message.store_timestamp,
            message.queue_id,
            message.queue_offset,
            message.size,
            message.properties.get("KEYS"),
            message.uniq_key,
            message.tags,
            message.topic,
            message.born_timestamp,
            message.sys_flag,
            message.born_host,
            message.store_host,
        )

    def to_dict(self) -> dict[str, Any]:
        """Under RocketMQ's names, as every outlet shows it; ``keys`` is the property KEYS as the producer wrote it."""
        return {
            "phyOffset": self.phy_offset,
            "topic": self.topic,
            "queueId": self.queue_id,
            "queueOffset": self.queue_offset,
            "storeTimestamp": self.store_timestamp,
            "bornTimestamp": self.born_timestamp,
            "tags": self.tags,
            "keys": self.keys,
            "uniqKey": self.uniq_key,
            "size": self.size,
            "sysFlag": self.sys_flag,
            "bornHost": None if self.born_host is None else show_host(self.born_host),
            "storeHost": None if self.store_host is None else show_host(self.store_host),
        }


class LastUpdate(NamedTuple):
    """The end of the newest index file, which the broker sends with every answer; zeros without a file."""

    timestamp: int = 0
    phy_offset: int = 0


@dataclass(frozen=True, slots=True)
class Answer(HasHits[Hit]):
    """``hits`` newest first. ``truncated`` says what cut the answer off, None if nothing did.

    ``expired`` and ``unreadable`` count entries of the asked hash, and perhaps of the asked time, whose message is gone
    or is no message: they may or may not have been hits. ``why`` is there when an exact answer is empty.

    ``cursor``: the ``before`` of the query that goes on where this exact answer was cut off. New messages do not move
    it, so the pages together are the whole and hold nothing twice.
    """

    query: KeyQuery
    hits: tuple[Hit, ...]
    coverage: Coverage
    truncated: str | None = None
    expired: int = 0
    unreadable: int = 0
    why: str | None = None
    last_update: LastUpdate | None = None
    cursor: int | None = None

    def to_json(self) -> dict[str, Any]:
        """One object; members that do not apply are left out."""
        row: dict[str, Any] = {"topic": self.query.topic, "key": self.query.key}
        if self.query.index_type is not None:
            row["indexType"] = self.query.index_type
        row["phyOffsets"] = [hit.phy_offset for hit in self.hits]
        row["storeTimestamps"] = [hit.store_timestamp for hit in self.hits]
        row["hits"] = [hit.to_dict() for hit in self.hits]
        row["truncated"] = self.truncated is not None
        if self.truncated is not None:
            row["truncatedBy"] = self.truncated
        if self.cursor is not None:
            row["cursor"] = str(self.cursor)
        if self.expired:
            row["expired"] = self.expired
        if self.unreadable:
            row["unreadable"] = self.unreadable
        if self.why is not None:
            row["why"] = self.why
        row["coverage"] = self.coverage.to_json()
        if self.last_update is not None:
            row["indexLastUpdateTimestamp"] = self.last_update.timestamp
            row["indexLastUpdatePhyoffset"] = self.last_update.phy_offset
        return row
