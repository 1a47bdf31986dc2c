"""Metrics: one collector for Prometheus, which reads the status when it is asked; nothing is counted a message."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from indexd.serve.daemon_status import FIELDS, DaemonStatus, Figure

PREFIX = "indexd_"
NODE_TYPE = "indexer"
#: Fields of the status that are metrics.
FAMILIES = tuple(found for found in FIELDS if found.kind != "text")
#: Attribute of the status, and name -> help.
HISTOGRAMS = {
    "drain_seconds": "How long a drain took: from the queue into every output.",
    "flush_seconds": "How long a flush took: files synced, checkpoint and frontier.",
    "query_seconds": "How long a query took; each of those that one call answered, its share.",
}


def exposed(family: Figure) -> str:
    """The name that PromQL knows."""
    return PREFIX + family.name + {"counter": "_total", "info": "_info"}.get(family.kind, "")


class IndexerCollector(Collector):
    """Reads the status once a scrape; from any thread. All samples bear cluster, node_type and node_id."""

    def __init__(self, status: DaemonStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """The families that have a sample now."""
        row = self._status.row()
        labels = {"cluster": str(row.get("cluster", "")), "node_type": NODE_TYPE, "node_id": str(row.get("nodeId", ""))}
        for family in FAMILIES:
            metric = Metric(PREFIX + family.name, family.help, family.kind)
            for own, value in family.samples(row):
                metric.add_sample(exposed(family), labels | own, value)
            if metric.samples:
                yield metric
        for name, text in HISTOGRAMS.items():
            histogram = getattr(self._status, name)
            timed = HistogramMetricFamily(PREFIX + name, text, labels=tuple(labels), unit="seconds")
            timed.add_metric(list(labels.values()), histogram.cumulative(), histogram.total)
            yield timed


def render(status: DaemonStatus, accept: str | None) -> tuple[bytes, str]:
    """The body and its content type for a request's Accept header: Prometheus's text, or OpenMetrics where asked for.

    What the process takes (CPU, memory, descriptors) comes with it. The registry is this call's own, so nothing that
    another library registers gets in, and nothing here writes ``_created`` series.
    """
    registry = CollectorRegistry()
    registry.register(IndexerCollector(status))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type
