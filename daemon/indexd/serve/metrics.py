"""Family: one metric, and how its samples come out of ``Board.row()``.

Metrics: one collector for Prometheus, which reads the board's figures when it is asked.

Every family stands in one of the tables below with its key in ``Board.row()``; nothing is counted a message. A key that
is not there (while it opens and recovers) is a sample that is not there: no zero is made up. Times are in seconds, the
base unit that promtool asks for; an offset is a position in the commitlog, in bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from indexd.serve.board import Board, Row

PREFIX = "indexd_"

Samples = Iterator[tuple[dict[str, str], float]]
_UNITS = ("bytes", "seconds", "ratio")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name without prefix (a counter's without ``_total``), and how its samples come out of a row."""

    kind: str
    name: str
    help: str
    samples: Callable[[Row], Samples] = field(repr=False)

    @property
    def exposed(self) -> str:
        """The name that PromQL knows."""
        return PREFIX + self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")

    def empty(self) -> Metric:
        """The family without samples."""
        unit = self.name.rpartition("_")[2]
        return Metric(PREFIX + self.name, self.help, self.kind, unit if unit in _UNITS else "")


def number_of(value: object) -> float | None:
    """None for what is no number: unknown, or not there."""
    return value if isinstance(value, int | float) else None


def mapping_of(value: object) -> Mapping[str, Any]:
    """Empty for what is no mapping: off, or not there."""
    return value if isinstance(value, Mapping) else {}


def figure(kind: str, name: str, text: str, *path: str, scale: float = 1) -> Family:
    """One number of a row; ``path`` are the keys that lead to it."""

    def samples(row: Row) -> Samples:
        value: object = row
        for key in path:
            value = mapping_of(value).get(key)
        number = number_of(value)
        if number is not None:
            yield {}, number * scale

    return Family(kind, name, text, samples)


def of_outputs(kind: str, name: str, text: str, key: str, scale: float = 1) -> Family:
    """One number of each output, labelled ``output``."""

    def samples(row: Row) -> Samples:
        for output in row.get("outputs") or ():
            number = number_of(mapping_of(output).get(key))
            if number is not None:
                yield {"output": str(output.get("output"))}, number * scale

    return Family(kind, name, text, samples)


NODE_TYPE = "indexer"
STATES = ("opening", "recovering", "running", "stopping")
STAGES = ("read", "build", "flush")

_MILLI = 0.001


def _states(row: Row) -> Samples:
    phase = row.get("phase")
    if phase is not None:
        yield from (({"state": state}, float(state == phase)) for state in STATES)


def _done(row: Row) -> Samples:
    progress = mapping_of(row.get("recovering"))
    done, total = number_of(progress.get("done")), number_of(progress.get("total"))
    if done is not None and total:
        yield {"step": str(progress.get("step"))}, min(max(done / total, 0.0), 1.0)


def _degraded(row: Row) -> Samples:
    problems = row.get("problems")
    if isinstance(problems, Mapping):
        yield from (({"stage": stage}, float(stage in problems)) for stage in sorted({*STAGES, *problems}))


def _stalled(row: Row) -> Samples:
    stalled = row.get("stalled")
    if isinstance(stalled, Mapping):
        for stage in sorted({*STAGES, *stalled}):
            yield {"stage": stage}, number_of(stalled.get(stage)) or 0.0


def _queries(row: Row) -> Samples:
    for result, count in mapping_of(row.get("queries")).items():
        yield {"result": str(result)}, float(count)


def _by_reason(key: str) -> Callable[[Row], Samples]:
    # The counts of remoting that are kept by reason.
    def samples(row: Row) -> Samples:
        for reason, count in mapping_of(mapping_of(row.get("remoting")).get(key)).items():
            yield {"reason": str(reason)}, float(count)

    return samples


def _upstream(kind: str, name: str, text: str, key: str) -> Family:
    return figure(kind, f"remoting_upstream_{name}", text, "remoting", "upstream", key)


def _remoting_requests(row: Row) -> Samples:
    for code, results in mapping_of(mapping_of(row.get("remoting")).get("requests")).items():
        for result, count in mapping_of(results).items():
            yield {"code": str(code), "result": str(result)}, float(count)


def _at_corrupt(row: Row) -> Samples:
    if "corrupt" in row:
        yield {}, float(row["corrupt"] is not None)


def _unsafe(row: Row) -> Samples:
    unsafe = mapping_of(row.get("broker")).get("unsafe")
    if isinstance(unsafe, list | tuple):
        yield {}, len(unsafe)


def _build(row: Row) -> Samples:
    if "version" in row:
        yield {"version": str(row["version"]), "python": platform.python_version()}, 1


def _node(row: Row) -> Samples:
    if "mode" in row:
        yield {"mode": str(row["mode"]), "flavour": str(row.get("flavour", ""))}, 1


_LAG = (
    figure("gauge", "dispatch_behind_bytes", "Log that is there and in no output yet.", "dispatchBehindBytes"),
    figure(
        "gauge", "dispatch_behind_seconds", "How long the oldest message that is in no output yet has waited.",
        "dispatchBehindMilliseconds", scale=_MILLI,
    ),
    figure(
        "gauge", "dispatch_behind_messages", "Messages in no output yet; of unread log an estimate.",
        "dispatchBehindMessages",
    ),
    of_outputs("gauge", "output_behind_bytes", "Log that is there and not in this output yet.", "behindBytes"),
    of_outputs(
        "gauge", "output_behind_seconds", "How long the oldest message that is not in this output yet has waited.",
        "behindMilliseconds", _MILLI,
    ),
    of_outputs(
        "gauge", "output_behind_messages", "Messages not in this output yet; of unread log an estimate.",
        "behindMessages",
    ),
    figure("gauge", "caught_up", "1 when the reader stands at the end of the log.", "caughtUp"),
)  # fmt: skip
_OFFSETS = (
    figure("gauge", "commitlog_min_offset", "Where the oldest segment of the log begins.", "commitLogMinOffset"),
    figure("gauge", "commitlog_max_offset", "How far the log is known to go.", "commitLogMaxOffset"),
    figure("gauge", "read_offset", "How far the log was read.", "readOffset"),
    figure("gauge", "built_offset", "How far the log is in every output, and found by queries.", "phyOffset"),
    figure(
        "gauge", "built_store_timestamp_seconds", "Store time of the newest message that is built, since 1970.",
        "storeTimestamp", scale=_MILLI,
    ),
    figure("gauge", "durable_offset", "The frontier: how far a crash loses nothing.", "durableOffset"),
    of_outputs("gauge", "output_built_offset", "How far the log is in this output.", "phyOffset"),
    of_outputs("gauge", "output_durable_offset", "How far this output is on the disk.", "durableOffset"),
)  # fmt: skip
_WORK = (
    figure("counter", "read_bytes", "Log that was read since the start.", "readBytesTotal"),
    figure("gauge", "messages", "Messages that the outputs were built from; less after the log was cut.", "messages"),
    figure("counter", "read_messages", "Messages that were read since the start.", "readMessages"),
    figure("counter", "index_entries", "Entries put into the key index since the start.", "indexEntries"),
    figure("counter", "drains", "Drains since the start that had something to build.", "drains"),
    figure("counter", "flushes", "Flushes since the start: files synced, checkpoint and frontier.", "flushes"),
    figure("counter", "roll_overs", "Index files that became full since the start.", "rollOvers"),
    figure("counter", "events", "Events since the start: rolls, flushes, recoveries, holes and so on.", "lastEvent"),
    figure("counter", "expired_files", "Files dropped since the start because the log expired.", "expiredFiles"),
    figure("gauge", "queue_rows", "Messages that wait for the next drain.", "queueRows"),
    figure("gauge", "queue_bytes", "Memory that the waiting messages take.", "queueBytes"),
    figure(
        "gauge", "queue_oldest_seconds", "How long the oldest of the waiting has waited.",
        "queueOldestMilliseconds", scale=_MILLI,
    ),
    Family("gauge", "degraded", "1 while this stage waits for what is in its way; status says for what.", _degraded),
    Family("gauge", "stalled_seconds", "How long this stage should have moved and has not; else 0.", _stalled),
    Family("counter", "queries", "Queries: found, empty_covered, empty_uncovered or error.", _queries),
)  # fmt: skip
_FILES = (
    of_outputs("gauge", "output_files", "Files of this output.", "files"),
    of_outputs("gauge", "output_entries", "Entries in the files of this output.", "entries"),
    of_outputs("gauge", "output_bytes", "Size of the files of this output.", "bytes"),
    of_outputs("gauge", "output_fill_ratio", "How full the newest file of this output is, 0 to 1.", "fillRatio"),
    figure("gauge", "consume_queues", "Consume queues that are kept.", "consumeQueues"),
    figure("gauge", "left_out_messages", "Messages that got no place in a consume queue.", "leftOutMessages"),
    figure("gauge", "disk_used_ratio", "How full the data's file system is, 0 to 1.", "diskUsedRatio"),
    figure("gauge", "disk_used_max_ratio", "How full it may get before indexing waits, 0 to 1.", "diskUsedMax"),
)
_HOLES = (
    figure("gauge", "uncovered_bytes", "Log whose messages no query finds: skipped, or damaged.", "uncoveredBytes"),
    figure("counter", "skipped_bytes", "Log that was passed over since the start.", "skippedBytes"),
    figure("counter", "corrupt_records", "Places of the log that are no frame, since the start.", "corruptRecords"),
    figure("counter", "corrupt_bytes", "Corrupt log that was passed over since the start.", "corruptBytes"),
    figure("counter", "expired_bytes", "Log that expired before it was read, since the start.", "expiredBytes"),
    Family("gauge", "stopped_at_corrupt", "1 while the reader stands at bytes that are no frame.", _at_corrupt),
)
_RECOVERY = (
    Family("gauge", "recovery_state", "1 for the state it is in, 0 for the others.", _states),
    Family("gauge", "recovery_done_ratio", "How far the present step of the recovery is, 0 to 1.", _done),
    figure("gauge", "recovery_remaining_bytes", "What the step has yet to go through.", "recoveryRemainingBytes"),
    figure("gauge", "recovery_remaining_files", "The same, where it goes by files.", "recoveryRemainingFiles"),
    figure("counter", "recoveries", "Openings since the start: one, and one for each disturbance.", "recoveries"),
    figure("gauge", "last_recovery_seconds", "How long the last opening took.", "lastRecovery", "seconds"),
    figure(
        "gauge", "last_recovery_dropped_entries", "Index entries it cut off, to be read from the log again.",
        "lastRecovery", "droppedEntries",
    ),
    figure("counter", "scrubbed_bytes", "What was built and read again by scrubs since the start.", "scrub", "bytes"),
    figure("counter", "scrub_damaged", "Scrubs since the start that found something damaged.", "scrub", "damaged"),
    figure(
        "gauge", "scrub_ended_timestamp_seconds", "When the last scrub ended, seconds since 1970.",
        "scrub", "endedAt", scale=_MILLI,
    ),
    figure("gauge", "last_shutdown_clean", "1 when the last run was stopped, 0 when it died.", "lastShutdownClean"),
)  # fmt: skip
_AROUND = (
    figure("gauge", "broker_alive", "1 while the broker runs.", "broker", "alive"),
    figure("gauge", "broker_indexing", "1 while the broker writes an index of its own.", "broker", "indexing"),
    figure("gauge", "broker_max_offset", "Where the log ends, as the broker says.", "broker", "maxOffset"),
    figure(
        "gauge", "broker_checked_timestamp_seconds", "When the broker was looked at last, seconds since 1970.",
        "broker", "checkedAt", scale=_MILLI,
    ),
    Family("gauge", "broker_unsafe", "Things about broker and mode that are unsafe; status says which.", _unsafe),
    figure("gauge", "mqtt_connected", "1 while the MQTT broker is connected.", "mqtt", "connected"),
    figure("counter", "mqtt_dropped", "Events that were dropped since the start, unpublished.", "mqtt", "dropped"),
    figure("counter", "mqtt_published", "Events that were published since the start.", "mqtt", "published"),
    figure("gauge", "mqtt_waiting", "Events that wait to be published.", "mqtt", "waiting"),
    Family("info", "build", "The program.", _build),
    Family("info", "node", "How it runs.", _node),
)  # fmt: skip
_REMOTING = (
    figure("gauge", "remoting_open_connections", "Connections of clients.", "remoting", "connections"),
    figure(
        "counter", "remoting_accepted_connections", "Connections that were taken since the start.",
        "remoting", "connectionsTotal",
    ),
    Family(
        "counter", "remoting_refused_connections", "Closed at once: allow (no network of ours), full, tls.",
        _by_reason("refused"),
    ),
    Family(
        "counter", "remoting_closed_connections",
        "Closed by us: bytes (no protocol), slow, idle, untaken (answers), memory.", _by_reason("closed"),
    ),
    Family("counter", "remoting_requests", "Requests by code: ok, empty, refused or error.", _remoting_requests),
    figure("counter", "remoting_received_bytes", "Requests since the start.", "remoting", "receivedBytes"),
    figure("counter", "remoting_sent_bytes", "Answers since the start.", "remoting", "sentBytes"),
    _upstream("gauge", "links", "Connections to name servers and the broker.", "links"),
    _upstream("counter", "forwarded_requests", "Requests that a name server or the broker has answered.", "forwarded"),
    _upstream("counter", "failed_requests", "Requests that none of them has answered.", "failed"),
    _upstream("counter", "dropped_requests", "One-way requests of these, of which nobody is told.", "dropped"),
)  # fmt: skip
#: All but the histograms, which the board holds apart from its row.
FAMILIES = (*_LAG, *_OFFSETS, *_WORK, *_FILES, *_HOLES, *_RECOVERY, *_AROUND, *_REMOTING)
#: Attribute of the board, and name -> help.
HISTOGRAMS = {
    "drain_seconds": "How long a drain took: from the queue into every output.",
    "flush_seconds": "How long a flush took: files synced, checkpoint and frontier.",
    "query_seconds": "How long a query took.",
}


class IndexerCollector(Collector):
    """Reads ``board.row()`` once a scrape; from any thread. All samples bear cluster, node_type and node_id."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def describe(self) -> Iterable[Metric]:
        """Every family there can be, without samples: what is registered and documented."""
        yield from (family.empty() for family in FAMILIES)
        yield from (HistogramMetricFamily(PREFIX + name, text, unit="seconds") for name, text in HISTOGRAMS.items())

    def collect(self) -> Iterable[Metric]:
        """The families that have a sample now."""
        row = self._board.row()
        labels = {"cluster": str(row.get("cluster", "")), "node_type": NODE_TYPE, "node_id": str(row.get("nodeId", ""))}
        for family in FAMILIES:
            metric = family.empty()
            for own, value in family.samples(row):
                metric.add_sample(family.exposed, labels | own, value)
            if metric.samples:
                yield metric
        for name, text in HISTOGRAMS.items():
            histogram = getattr(self._board, name)
            timed = HistogramMetricFamily(PREFIX + name, text, labels=tuple(labels), unit="seconds")
            timed.add_metric(list(labels.values()), histogram.cumulative(), histogram.total)
            yield timed


def render(board: Board, accept: str | None) -> tuple[bytes, str]:
    """The body and its content type for a request's Accept header: Prometheus's text, or OpenMetrics where asked for.

    What the process takes (CPU, memory, descriptors) comes with it. The registry is this call's own, so nothing that
    another library registers gets in, and nothing here writes ``_created`` series.
    """
    registry = CollectorRegistry()
    registry.register(IndexerCollector(board))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type
