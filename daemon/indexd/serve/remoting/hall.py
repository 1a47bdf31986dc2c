"""Hall: what all connections of a server share."""

from __future__ import annotations

from dataclasses import dataclass

from indexd.serve.remoting.client import Processor
from indexd.serve.remoting.counts import RemotingCounts
from indexd.serve.remoting.room import Room
from indexd.serve.remoting.sparing import SparingLog


@dataclass(frozen=True, slots=True)
class Hall:
    """``frame_max``: bytes of a request, its length field not counted; ``idle_seconds`` without any sign of life.

    ``under_way_max``: requests that run at once for one connection, long polls among them.
    """

    processor: Processor
    room: Room
    counts: RemotingCounts
    log: SparingLog
    frame_max: int
    idle_seconds: float
    under_way_max: int
