"""Family: one metric, and how its samples come out of ``Board.row()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric

from indexd.serve.board import Row

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
