"""Status: what a daemon knows of itself, a field a figure: its key in the JSON, its metric, its line in the documents.

``DaemonStatus.row()`` has these keys, which /api/v1/status, DATA/state, ``indexd status``, MQTT and the page show. A
new figure is one field here, and the one place where its value comes from. Times in metrics are in seconds, the base
unit that promtool asks for; an offset is a position in the commitlog, in bytes.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from indexd.pages.wording import show_duration, show_size

Row = dict[str, Any]
Samples = Iterator[tuple[dict[str, str], float]]
STATES = ("opening", "recovering", "running", "stopping")
STAGES = ("read", "build", "flush")
_MILLI = 0.001


@dataclass(frozen=True, slots=True)
class Figure:
    """What a field is: ``kind`` is gauge, counter, info or text, which is no metric.

    ``name`` is the metric's, if not the field's own. Its value is the field's, of a list its length, of a mapping the
    values with the keys as ``labels``; else ``find`` makes the samples of a field's value and its row. ``path`` are the
    keys that lead to it in a status; ``of_output``: the last one, in each output.
    """

    kind: str
    unit: str = ""
    name: str = ""
    scale: float = 1
    labels: tuple[str, ...] = ()
    find: Callable[[Any, Mapping[str, Any]], Samples] | None = field(default=None, repr=False)
    path: tuple[str, ...] = ()
    help: str = ""
    of_output: bool = False

    def samples(self, row: Mapping[str, Any]) -> Samples:
        """Those of a status; what is not there or not known has none."""
        if not self.of_output:
            yield from self._samples(row, self.path)
            return
        for output in row.get(self.path[0]) or ():
            for labels, value in self._samples(output, self.path[1:]):
                yield {"output": str(output.get("output"))} | labels, value

    def _samples(self, row: Mapping[str, Any], path: tuple[str, ...]) -> Samples:
        value: Any = row
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                return
            value = value[key]
        if self.find is not None and (value is not None or self.find is _at_corrupt):
            yield from self.find(value, row)
        elif self.labels and isinstance(value, Mapping):
            yield from _labelled(self.labels, value)
        elif isinstance(value, list):
            yield {}, len(value)
        elif isinstance(value, int | float):
            yield {}, value * self.scale


def _labelled(names: tuple[str, ...], value: Mapping[str, Any]) -> Samples:
    for key, inner in value.items():
        if len(names) == 1:
            yield {names[0]: str(key)}, float(inner)
        else:
            yield from (({names[0]: str(key)} | labels, number) for labels, number in _labelled(names[1:], inner))


def text(help_: str) -> Any:
    """A field that is no metric."""
    return _field(help_, Figure("text"))


def gauge(help_: str, unit: str = "", name: str = "", **more: Any) -> Any:
    """A field that goes up and down."""
    return _field(help_, Figure("gauge", unit, name, **more))


def counter(help_: str, unit: str = "", name: str = "", **more: Any) -> Any:
    """A field that begins anew with the process, and when ``recoveries`` grows; ``name`` is without ``_total``."""
    return _field(help_, Figure("counter", unit, name, **more))


def _field(help_: str, figure: Figure) -> Any:
    made: Any = Field(None, description=help_)
    made.metadata.append(figure)
    return made


def _states(phase: str, _: Mapping[str, Any]) -> Samples:
    yield from (({"state": state}, float(state == phase)) for state in STATES)


def _done(progress: Mapping[str, Any], _: Mapping[str, Any]) -> Samples:
    if progress.get("total"):
        yield {"step": str(progress.get("step"))}, min(max(progress["done"] / progress["total"], 0.0), 1.0)


def _degraded(problems: Mapping[str, str], _: Mapping[str, Any]) -> Samples:
    yield from (({"stage": stage}, float(stage in problems)) for stage in sorted({*STAGES, *problems}))


def _stalled(stalled: Mapping[str, float], _: Mapping[str, Any]) -> Samples:
    yield from (({"stage": stage}, stalled.get(stage) or 0.0) for stage in sorted({*STAGES, *stalled}))


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
    kept_entries: int = text("Index entries that were kept.")
    dropped_entries: int = gauge("Index entries it cut off, to be read from the log again.", "entries")
    deleted_files: int = text("Files that were removed.")
    rewritten_files: int = text("Files that were written anew.")
    refilled_bytes: int = text("Log that queues and sparse indexes read again.")
    reasons: list[str] = text("Why it was not just opened.")
    steps: list[Row] = text("As those of recovering.")


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

    version: str = _field("The program.", Figure("info", "1", "build", labels=("version", "python"), find=_build))
    pid: int = text("The process.")
    boot_id: str = text("Another one for each process.")
    started_at: int = text("When it started, ms.")
    cluster: str = text("The broker's cluster, a label of every metric.")
    node_id: str = text("Which of its nodes, a label of every metric.")
    mode: str = _field("How it runs.", Figure("info", "1", "node", labels=("mode", "flavour"), find=_node))
    flavour: str = text("Whose index files.")
    store: str = text("The broker's store.")
    data: str = text("The data directory.")
    hash_slot_num: int = text("Slots of an index file.")
    index_num: int = text("Entries of a full index file.")
    phase: str = gauge(
        "1 for the state it is in, 0 for the others.", "0 or 1", "recovery_state", labels=("state",), find=_states
    )
    compiling: bool = text("The first start of a version compiles its kernels.")
    http: str | None = text("Where HTTP is served, once it is.")
    summary: dict[str, str] = text("How it stands in one sentence (words), and whether that is good or bad (kind).")
    findings: list[str] = text("What needs an operator; empty when nothing does.")
    problems: dict[str, str] = gauge(
        "1 while this stage waits for what is in its way; status says for what.", "0 or 1", "degraded",
        labels=("stage",), find=_degraded,
    )  # fmt: skip
    stalled: dict[str, float] = gauge(
        "How long this stage should have moved and has not; else 0.", "seconds", "stalled_seconds", labels=("stage",),
        find=_stalled,
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
    caught_up: bool = gauge("1 when the reader stands at the end of the log.", "0 or 1")
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
    row_problem: str = text("A defect: why the figures of the running daemon could not be made.")


def _fields(model: type[BaseModel], path: tuple[str, ...], prefix: str, *, of_output: bool = False) -> Iterator[Figure]:
    for name, info in model.model_fields.items():
        own = next(part for part in info.metadata if isinstance(part, Figure))
        where, words = (*path, to_camel(name)), info.description or ""
        labels = ("output", *own.labels) if of_output else own.labels
        named = own.name or prefix + name
        yield replace(own, name=named, labels=labels, path=where, help=words, of_output=of_output)
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                is_list = kind is OutputStatus
                inner = "output_" if is_list else f"{prefix}{name}_"
                yield from _fields(kind, where, inner, of_output=is_list)


#: Every field of a status, those of its parts behind the part.
FIELDS = tuple(_fields(Status, (), ""))


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
