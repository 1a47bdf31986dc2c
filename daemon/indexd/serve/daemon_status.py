"""DaemonStatus: all that a daemon shows of itself; Status: each figure of it, a field with its metric and its words.

``DaemonStatus.row()`` has the keys of Status, which /api/v1/status, DATA/state, ``indexd status``, MQTT, the page, the
metrics and the docs show. A new figure is one field here, and the one place where its value comes from. Times in
metrics are in seconds, the base unit that promtool asks for; an offset is a position in the commitlog, in bytes. The
daemon's threads write plain figures; whoever serves them reads.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from indexd import __version__
from indexd.config import Config
from indexd.dispatch.reput import resident_bytes
from indexd.findings import findings_of
from indexd.index.format import IndexLayout
from indexd.pages.wording import show_duration, show_size
from indexd.serve.events import Events

Row = dict[str, Any]
Samples = Iterator[tuple[dict[str, str], float]]
STATES = ("opening", "recovering", "running", "stopping")
STAGES = ("read", "build", "flush")
_MILLI = 0.001


@dataclass(frozen=True, slots=True)
class Figure:
    """What a field is: ``kind`` is gauge, counter, info or text, which is no metric.

    ``name`` is the metric's, if not the field's own. Its value is the field's, of a list its length, of a mapping the
    values with the keys as ``labels``, of a text 1 under that label; those of ``every`` are 0 where they are not there.
    Else ``find`` makes the samples of a field's value and its row. ``path`` are the keys that lead to it in a status.
    """

    kind: str
    unit: str = ""
    name: str = ""
    scale: float = 1
    labels: tuple[str, ...] = ()
    every: tuple[str, ...] = ()
    find: Callable[[Any, Mapping[str, Any]], Samples] | None = field(default=None, repr=False)
    path: tuple[str, ...] = ()
    help: str = ""

    def samples(self, row: Mapping[str, Any]) -> Samples:
        """Those of a status; what is not there or not known has none."""
        *way, name = self.path
        found: Any = row
        for key in way:
            found = found.get(key) or {}
        outputs = found if isinstance(found, list) else []
        for part in outputs or [found]:
            label = {"output": str(part["output"])} if outputs else {}
            for own, number in self._values(part[name], row) if name in part else ():
                yield label | own, number

    def _values(self, value: Any, row: Mapping[str, Any]) -> Samples:
        if self.find is not None and (value is not None or self.find is _at_corrupt):
            yield from self.find(value, row)
        elif self.every and isinstance(value, str):
            yield from _labelled(self.labels, {value: 1}, self.every)
        elif self.labels and isinstance(value, Mapping):
            yield from _labelled(self.labels, value, self.every)
        elif isinstance(value, list):
            yield {}, len(value)
        elif isinstance(value, int | float):
            yield {}, value * self.scale


def _labelled(names: tuple[str, ...], value: Mapping[str, Any], every: tuple[str, ...] = ()) -> Samples:
    for key in dict.fromkeys((*every, *value)):
        inner = value.get(key, 0)
        if isinstance(inner, Mapping):
            yield from (({names[0]: str(key)} | labels, number) for labels, number in _labelled(names[1:], inner))
        else:
            yield {names[0]: str(key)}, float(inner) if isinstance(inner, int | float) else 1.0


def _field(kind: str, help_: str, unit: str = "", name: str = "", **more: Any) -> Any:
    made: Any = Field(None, description=help_)
    made.metadata.append(Figure(kind, unit, name, **more))
    return made


#: A field that is no metric; one that goes up and down; one that begins anew with the process, and when ``recoveries``
#: grows (its name is without ``_total``); one whose labels say it.
text, gauge, counter, info = (partial(_field, kind) for kind in ("text", "gauge", "counter", "info"))


def _done(progress: Mapping[str, Any], _: Mapping[str, Any]) -> Samples:
    if progress.get("total"):
        yield {"step": str(progress.get("step"))}, min(max(progress["done"] / progress["total"], 0.0), 1.0)


def _at_corrupt(corrupt: object, _: Mapping[str, Any]) -> Samples:
    yield {}, float(corrupt is not None)


def _build(version: str, _: Mapping[str, Any]) -> Samples:
    yield {"version": version, "python": platform.python_version()}, 1


def _node(mode: str, row: Mapping[str, Any]) -> Samples:
    yield {"mode": mode, "flavour": str(row.get("flavour", ""))}, 1


class _Figures(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")


class OutputStatus(_Figures):
    """One output: ``key``, ``cq`` or ``sparse``, its label."""

    output: str = text("key, cq or sparse.")
    phy_offset: int = gauge("How far the log is in this output.", "bytes of log", "output_built_offset")
    durable_offset: int = gauge("How far this output is on the disk.", "bytes of log")
    behind_bytes: int = gauge("Log that is there and not in this output yet.", "bytes")
    behind_milliseconds: int = gauge(
        "How long the oldest message that is not in this output yet has waited.", "seconds", "output_behind_seconds",
        scale=_MILLI,
    )  # fmt: skip
    behind_messages: int = gauge("Messages not in this output yet; of unread log an estimate.", "messages")
    files: int = gauge("Files of this output.", "files")
    entries: int = gauge("Entries in the files of this output.", "entries")
    bytes: int = gauge("Size of the files of this output.", "bytes")
    fill_ratio: float | None = gauge("How full the newest file of this output is, 0 to 1.", "ratio")


class LastRecovery(_Figures):
    """How the last opening ended."""

    event: str = text("created, opened or recovered.")
    ended_at: int = text("When it ended, ms.")
    seconds: float = gauge("How long the last opening took.", "seconds")
    phy_offset: int = text("How far the index went.")
    index_files: int = text("Index files that were kept.")
    kept_entries: int = text("Index entries that were kept.")
    dropped_entries: int = gauge("Index entries it cut off, to be read from the log again.", "entries")
    deleted_files: int = text("Files that were removed.")
    rewritten_files: int = text("Files that were written anew.")
    refilled_bytes: int = text("Log that queues and sparse indexes read again.")
    reasons: list[str] = text("Why it was not just opened.")


class BrokerStatus(_Figures):
    """What is known of the broker; nothing while it was not looked at."""

    alive: bool | None = gauge("1 while the broker runs.", "0 or 1")
    pid: int | None = text("Its process.")
    how: str = text("How that is known.")
    why: str | None = text("Why it is thought so.")
    indexing: bool | None = gauge("1 while the broker writes an index of its own.", "0 or 1")
    indexing_why: str | None = text("Why that is thought so.")
    address: str | None = text("Where it is asked.")
    answers: bool | None = text("Whether it answered.")
    silence: str | None = text("Why it did not.")
    max_offset: int | None = gauge("Where the log ends, as the broker says.", "bytes of log")
    checked_at: int = gauge(
        "When the broker was looked at last, seconds since 1970.", "seconds", "broker_checked_timestamp_seconds",
        scale=_MILLI,
    )  # fmt: skip
    unsafe: list[str] = gauge("Things about broker and mode that are unsafe; status says which.", "findings")


class ScrubStatus(_Figures):
    """What scrubs came to since the start."""

    began_at: int | None = text("When the last one began, ms.")
    ended_at: int | None = gauge(
        "When the last scrub ended, seconds since 1970.", "seconds", "scrub_ended_timestamp_seconds", scale=_MILLI
    )
    bytes: int = counter("What was built and read again by scrubs since the start.", "bytes", "scrubbed_bytes")
    damaged: int = counter("Scrubs since the start that found something damaged.", "scrubs")
    broken_off: int = text("Scrubs in a row that were not finished.")


class MqttStatus(_Figures):
    """How publishing goes; not there without MQTT."""

    connected: bool = gauge("1 while the MQTT broker is connected.", "0 or 1")
    dropped: int = counter("Events that were dropped since the start, unpublished.", "events")
    published: int = counter("Events that were published since the start.", "events")
    waiting: int = gauge("Events that wait to be published.", "events")
    last_error: str | None = text("Why it is not connected, or was not.")


class UpstreamStatus(_Figures):
    """What is passed through to name servers and the broker."""

    name_server: str | None = text("The name servers.")
    broker: str | None = text("The broker.")
    links: int = gauge("Connections to name servers and the broker.", "connections")
    forwarded: int = counter(
        "Requests that a name server or the broker has answered.", "requests", "remoting_upstream_forwarded_requests"
    )
    failed: int = counter("Requests that none of them has answered.", "requests", "remoting_upstream_failed_requests")
    dropped: int = counter(
        "One-way requests of these, of which nobody is told.", "requests", "remoting_upstream_dropped_requests"
    )


class RemotingStatus(_Figures):
    """RocketMQ's protocol; null where it is not spoken."""

    address: str = text("Where it is spoken.")
    connections: int = gauge("Connections of clients.", "connections", "remoting_open_connections")
    connections_total: int = counter(
        "Connections that were taken since the start.", "connections", "remoting_accepted_connections"
    )
    refused: dict[str, int] = counter(
        "Closed at once: allow (no network of ours), full, tls.", "connections", "remoting_refused_connections",
        labels=("reason",),
    )  # fmt: skip
    closed: dict[str, int] = counter(
        "Closed by us: bytes (no protocol), slow, idle, untaken (answers), memory.", "connections",
        "remoting_closed_connections", labels=("reason",),
    )  # fmt: skip
    requests: dict[str, dict[str, int]] = counter(
        "Requests by RocketMQ's name of their code, or other: ok, empty, refused or error.", "requests",
        labels=("code", "result"),
    )  # fmt: skip
    received_bytes: int = counter("Requests since the start.", "bytes")
    sent_bytes: int = counter("Answers since the start.", "bytes")
    upstream: UpstreamStatus | None = text("What is passed through, null without a name server.")


class Status(_Figures):
    """All of it. What only a running daemon knows is not there while it opens and recovers: no zero is made up."""

    version: str = info("The program.", "1", "build", labels=("version", "python"), find=_build)
    pid: int = text("The process.")
    boot_id: str = text("Another one for each process.")
    started_at: int = text("When it started, ms.")
    cluster: str = text("The broker's cluster, a label of every metric.")
    node_id: str = text("Which of its nodes, a label of every metric.")
    mode: str = info("How it runs.", "1", "node", labels=("mode", "flavour"), find=_node)
    flavour: str = text("Whose index files.")
    store: str = text("The broker's store.")
    data: str = text("The data directory.")
    hash_slot_num: int = text("Slots of an index file.")
    index_num: int = text("Entries of a full index file.")
    phase: str = gauge(
        "1 for the state it is in, 0 for the others.", "0 or 1", "recovery_state", labels=("state",), every=STATES
    )
    compiling: bool = text("The first start of a version compiles its kernels.")
    http: str | None = text("Where HTTP is served, once it is.")
    summary: dict[str, str] = text("How it stands in one sentence (words), and whether that is good or bad (kind).")
    findings: list[str] = text("What needs an operator; empty when nothing does.")
    problems: dict[str, str] = gauge(
        "1 while this stage waits for what is in its way; status says for what.", "0 or 1", "degraded",
        labels=("stage",), every=STAGES,
    )  # fmt: skip
    stalled: dict[str, float] = gauge(
        "How long this stage should have moved and has not; else 0.", "seconds", "stalled_seconds", labels=("stage",),
        every=STAGES,
    )  # fmt: skip
    last_event: int = counter(
        "Events since the start: rolls, flushes, recoveries, holes and so on.", "events", "events"
    )
    queries: dict[str, int] = counter(
        "Queries: found, empty_covered, empty_uncovered or error.", "queries", labels=("result",)
    )
    memory_bytes: int = text("Resident memory of the process, bytes.")
    disk_used_ratio: float | None = gauge("How full the data's file system is, 0 to 1.", "ratio")
    disk_used_max: float = gauge("How full it may get before indexing waits, 0 to 1.", "ratio", "disk_used_max_ratio")
    last_shutdown_clean: bool | None = gauge("1 when the last run was stopped, 0 when it died.", "0 or 1")
    recoveries: int = counter("Openings since the start: one, and one for each disturbance.", "openings")
    last_recovery: LastRecovery | None = text("How the last opening ended; null before.")
    recovery_remaining_bytes: int | None = gauge("What the step has yet to go through.", "bytes")
    recovery_remaining_files: int | None = gauge("The same, where it goes by files.", "files")
    recovering: Row = gauge(
        "How far the present step of the recovery is, 0 to 1.", "ratio", "recovery_done_ratio", labels=("step",),
        find=_done,
    )  # fmt: skip
    broker: BrokerStatus = text("What is known of the broker.")
    scrub: ScrubStatus = text("What scrubs came to.")
    mqtt: MqttStatus = text("How publishing goes.")
    remoting: RemotingStatus | None = text("RocketMQ's protocol.")
    written_at: int = text("When these figures of the running daemon were made, ms.")
    outputs: list[OutputStatus] = text("Each output.")
    dispatch_behind_bytes: int = gauge("Log that is there and in no output yet.", "bytes")
    dispatch_behind_milliseconds: int = gauge(
        "How long the oldest message that is in no output yet has waited.", "seconds", "dispatch_behind_seconds",
        scale=_MILLI,
    )  # fmt: skip
    dispatch_behind_messages: int = gauge("Messages in no output yet; of unread log an estimate.", "messages")
    caught_up: bool = gauge(
        "1 when the last look at the log found nothing more to read; it changes all the time under writes.",
        "0 or 1",
    )
    commit_log_min_offset: int = gauge(
        "Where the oldest segment of the log begins.", "bytes of log", "commitlog_min_offset"
    )
    commit_log_max_offset: int = gauge("How far the log is known to go.", "bytes of log", "commitlog_max_offset")
    read_offset: int = gauge("How far the log was read.", "bytes of log")
    begin_offset: int = text("Where the index begins.")
    phy_offset: int = gauge("How far the log is in every output, and found by queries.", "bytes of log", "built_offset")
    filled_offset: int = text("How far queues and sparse indexes go.")
    store_timestamp: int = gauge(
        "Store time of the newest message that is built, since 1970.", "seconds", "built_store_timestamp_seconds",
        scale=_MILLI,
    )  # fmt: skip
    durable_offset: int = gauge("The frontier: how far a crash loses nothing.", "bytes of log")
    read_bytes_total: int = counter("Log that was read since the start.", "bytes", "read_bytes")
    messages: int = gauge("Messages that the outputs were built from; less after the log was cut.", "messages")
    read_messages: int = counter("Messages that were read since the start.", "messages")
    index_entries: int = counter("Entries put into the key index since the start.", "entries")
    index_files: int = text("Index files now.")
    drains: int = counter("Drains since the start that had something to build.", "drains")
    last_drain_milliseconds: float | None = text("How long the last one took; null before the first.")
    flushes: int = counter("Flushes since the start: files synced, checkpoint and frontier.", "flushes")
    last_flush_milliseconds: float | None = text("How long the last one took; null before the first.")
    roll_overs: int = counter("Index files that became full since the start.", "files")
    expired_files: int = counter("Files dropped since the start because the log expired.", "files")
    queue_rows: int = gauge("Messages that wait for the next drain.", "messages")
    queue_bytes: int = gauge("Memory that the waiting messages take.", "bytes")
    queue_oldest_milliseconds: int = gauge(
        "How long the oldest of the waiting has waited.", "seconds", "queue_oldest_seconds", scale=_MILLI
    )
    consume_queues: int = gauge("Consume queues that are kept.", "queues")
    consume_queue_units: int = text("Units written since the start.")
    consume_queue_gaps: int = text("Queue offsets that were skipped since the start.")
    consume_queues_moved: list[tuple[str, int, int]] = gauge(
        "Consume queues that lack messages, or have them at other offsets; the status says which, and from which "
        "physical offset on.", "queues",
    )  # fmt: skip
    consume_queue_repeats: int = text("Units that were there already, since the start.")
    batch_messages: int = text("Messages of batch queues, which are not built, since the start.")
    left_out_messages: int = gauge("Messages that got no place in a consume queue.", "messages")
    sparse_entries: int = text("Offset and time entries put since the start.")
    uncovered: list[tuple[int, int, str]] = text("Log in no output that may still be there: begin, end, reason.")
    stale_head: str | None = text(
        "How the bytes at phyOffset begin, in hex, that the broker does not know: while they stand, the log ends there."
    )
    uncovered_bytes: int = gauge("Log whose messages no query finds: skipped, or damaged.", "bytes")
    skipped_bytes: int = counter("Log that was passed over since the start.", "bytes")
    corrupt_records: int = counter("Places of the log that are no frame, since the start.", "places")
    corrupt_bytes: int = counter("Corrupt log that was passed over since the start.", "bytes")
    expired_bytes: int = counter("Log that expired before it was read, since the start.", "bytes")
    corrupt: Row | None = gauge(
        "1 while the reader stands at bytes that are no frame.", "0 or 1", "stopped_at_corrupt", find=_at_corrupt
    )


def _fields(
    model: type[BaseModel], path: tuple[str, ...] = (), prefix: str = "", labels: tuple[str, ...] = ()
) -> Iterator[Figure]:
    for name, field_info in model.model_fields.items():
        own = next(part for part in field_info.metadata if isinstance(part, Figure))
        where, words = (*path, to_camel(name)), field_info.description or ""
        yield replace(own, name=own.name or prefix + name, labels=(*labels, *own.labels), path=where, help=words)
        for kind in (field_info.annotation, *get_args(field_info.annotation)):
            if kind is OutputStatus:
                yield from _fields(kind, where, "output_", ("output",))
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _fields(kind, where, f"{prefix}{name}_")


#: Every field of a status, those of its parts behind the part.
FIELDS = tuple(_fields(Status))


_BEHIND_MILLIS_MAX, _CURRENT_MILLIS_MAX = 60_000, 10_000


def summary_of(row: Mapping[str, Any]) -> dict[str, str]:
    """How a daemon stands, in one sentence; ``kind`` is good, bad or neither."""
    phase = row["phase"]
    if phase == "recovering":
        done, total = row["recovering"]["done"], row["recovering"]["total"]
        percent = 100 * done / total if total else 0
        return {"kind": "", "words": f"Recovering, {row['recovering']['step']}: {percent:.0f} %"}
    if row.get("compiling"):
        return {"kind": "", "words": "Opening: compiling, once; later starts load what is compiled now"}
    if phase != "running":
        return {"kind": "", "words": phase.capitalize()}
    if row.get("problems"):
        stages = ", ".join(row["problems"])
        return {"kind": "bad", "words": f"Indexing waits ({stages}); what is indexed already can be found"}
    if row.get("corrupt"):
        return {"kind": "bad", "words": "Standing at bytes that are no frame; what is before them can be found"}
    millis = row.get("dispatchBehindMilliseconds", 0)
    if millis < _CURRENT_MILLIS_MAX:
        return {"kind": "good", "words": f"Up to date: {row.get('messages', 0):,} messages can be found"}
    words = f"{show_size(row.get('dispatchBehindBytes', 0))}, {show_duration(millis)} behind the log"
    return {"kind": "bad" if millis >= _BEHIND_MILLIS_MAX else "", "words": f"Catching up: {words}"}


# Seconds. Drains take milliseconds, a flush on a busy disk seconds.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts by upper bound, the last of all that is longer; ``total`` is their sum in seconds. For any thread.

    ``last`` is what was observed last.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.total = self.last = 0.0
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(self._counts)

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count one, or so many that took as long; what is exactly a bound belongs to it."""
        with self._lock:
            self._counts[bisect_left(BOUNDS, seconds)] += times
            self.total += seconds * times
            self.last = seconds

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as Prometheus writes it, how many took no longer); the last is ``+Inf``."""
        return list(zip((*map(str, BOUNDS), "+Inf"), accumulate(self._counts), strict=True))


#: How a query ended, the label ``result`` of its metric.
RESULTS = ("found", "empty_covered", "empty_uncovered", "error")
# Before the first step nobody knows what there is to do.
_NOT_KNOWN: Row = {"recoveryRemainingBytes": None, "recoveryRemainingFiles": None}
_NOTHING_LEFT: Row = {"recoveryRemainingBytes": 0, "recoveryRemainingFiles": 0}


class DaemonStatus:
    """One for a process, made before recovery begins; ``row()`` may be called from any thread at any time.

    Mappings that are handed to it are replaced by their writers, never changed.
    """

    def __init__(self, config: Config) -> None:
        self.boot_id = str(uuid.uuid4())
        self.events = Events()
        self.drain_seconds = Histogram()
        self.flush_seconds = Histogram()
        self.query_seconds = Histogram()
        self.queries = dict.fromkeys(RESULTS, 0)
        #: Where HTTP is served, once it is: ``127.0.0.1:9577``.
        self.http: str | None = None
        #: Where the remoting protocol is spoken, the same way.
        self.remoting: str | None = None
        #: What is known of the broker, see service.broker.
        self.broker: Mapping[str, Any] = {}
        #: By name, what makes the row of an outlet in any thread: of "mqtt", and of "remoting" with its "address".
        self.outlets: dict[str, Callable[[], Row]] = {}
        #: How the run before this one ended; None until it is known.
        self.last_shutdown_clean: bool | None = None
        #: The kernels are being compiled, at the first start of a version.
        self.is_compiling = False
        #: How full the file system of DATA is, and how full it may get.
        self.disk_used_ratio: float | None = None
        self.disk_used_max = config.limits.disk_used_max
        #: What scrubs came to since the start: bytes read, how many found damage (those that found something to mend),
        #: how many in a row ended before they were through; when the last one began and ended, ms.
        self.scrub: Mapping[str, Any] = {"beganAt": None, "endedAt": None, "bytes": 0, "damaged": 0, "brokenOff": 0}
        self._index_file_size = IndexLayout(config.index.hash_slot_num, config.index.index_num).file_size
        self._identity = {
            "version": __version__,
            "pid": os.getpid(),
            "cluster": config.node.cluster or "DefaultCluster",
            "nodeId": config.node.node_id or socket.gethostname(),
            "mode": config.store.run_mode,
            "flavour": config.index.flavour,
            "store": str(config.store.store or next((path.parent for path in config.store.commit_log_directories), "")),
            "data": str(config.store.data),
            "hashSlotNum": config.index.hash_slot_num,
            "indexNum": config.index.index_num,
            "bootId": self.boot_id,
            "startedAt": int(time.time() * 1000),
        }
        # The phase, and what makes its figures; replaced whole, so that nobody sees a phase with another one's.
        self._standing: tuple[str, Callable[[], Row]] = "opening", _NOT_KNOWN.copy
        # The step of a recovery, and when it began, monotonic.
        self._step = "", 0.0
        self._recoveries = 0
        self._last_recovery: Row | None = None

    @property
    def phase(self) -> str:
        """opening, recovering, running or stopping."""
        return self._standing[0]

    def recovering(self, step: str, done: int, total: int) -> None:
        """How far the recovery is; ``done`` and ``total`` are files of ``replay``, else bytes of the log."""
        now, left, is_files = time.monotonic(), max(total - done, 0), step == "replay"
        if self._step[0] != step:
            self._step = step, now
        found = {"step": step, "unit": "files" if is_files else "bytes", "done": done, "total": total}
        row = {
            "recoveryRemainingBytes": left * self._index_file_size if is_files else left,
            "recoveryRemainingFiles": left if is_files else 0,
            "recovering": found | {"seconds": round(now - self._step[1], 3)},
        }
        self._standing = "recovering", row.copy

    def recovered(self, event: str, facts: Row) -> None:
        """An opening is over and came to ``facts``; ``event``: created, opened or recovered."""
        self._last_recovery = {"event": event, "endedAt": int(time.time() * 1000), **facts}
        self._recoveries += 1
        self._step = "", 0.0

    def running(self, source: Callable[[], Row]) -> None:
        """The daemon tails; ``source`` makes its row whenever one is asked for, in any thread."""
        self._standing = "running", lambda: _NOTHING_LEFT | source()

    def stopping(self) -> None:
        """A signal said stop; what is shown goes on to be true until the end."""
        self._standing = "stopping", self._standing[1]

    def leaving(self, phase: str = "stopping") -> None:
        """It has stopped, or (``opening``) is opened again: no row of its own from now on."""
        self._standing = phase, (_NOT_KNOWN if phase == "opening" else _NOTHING_LEFT).copy

    def row(self) -> Row:
        """Everything, as one flat object with camelCase keys; ARCHITECTURE.md lists them. Offsets are ints."""
        phase, figures = self._standing
        row = {
            **self._identity,
            "phase": phase,
            "compiling": self.is_compiling,
            "http": self.http,
            "remoting": None if self.remoting is None else {"address": self.remoting},
            "broker": dict(self.broker),
            "lastEvent": self.events.last,
            "queries": dict(self.queries),
            "memoryBytes": resident_bytes(),
            "diskUsedRatio": self.disk_used_ratio,
            "diskUsedMax": self.disk_used_max,
            "lastShutdownClean": self.last_shutdown_clean,
            "recoveries": self._recoveries,
            "lastRecovery": self._last_recovery,
            "scrub": dict(self.scrub),
            "stalled": {},
            "problems": {},
            **{name: outlet() for name, outlet in tuple(self.outlets.items())},
            **figures(),
        }
        return row | {"summary": summary_of(row), "findings": findings_of(row)}
