"""Telling: what happens to a running daemon is logged, which makes it an event of the board, and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from indexd.commitlog.format import Corrupt
from indexd.commitlog.reading import Skipped
from indexd.consumequeue.progress import QueueCounters
from indexd.errors import IndexdError
from indexd.service.log import Logger

# Names in one line of the log.
_NAMES_MAX = 20


@dataclass(slots=True)
class Tally:
    """What the stages came to; plain, written by one thread each. ``problems`` is replaced whole."""

    #: Stage -> what keeps it waiting.
    problems: Mapping[str, IndexdError] = field(default_factory=dict)
    #: Times that the reader came to stand at bytes that are no frame.
    corrupt_found: int = 0
    #: Drains with something to build, and how long the last one took.
    drains: int = 0
    drain_seconds: float | None = None


class Telling:
    """``log`` says which logger: a HUP makes another."""

    def __init__(self, log: Callable[[], Logger], tally: Tally) -> None:
        self._log = log
        self._tally = tally
        self._rolls = 0
        self._left_out: set[str] = set()
        self._is_state_written = True
        self._stalled: frozenset[str] = frozenset()

    def problem(self, stage: str, error: IndexdError | None, retry_seconds: float = 0.0) -> None:
        """A stage has to wait, or (None) goes on; on the event loop."""
        others = {name: known for name, known in self._tally.problems.items() if name != stage}
        if error is not None:
            self._tally.problems = {**others, stage: error}
            self._log().error("degraded", stage=stage, problem=error.line(), retry_seconds=retry_seconds)
        elif stage in self._tally.problems:
            self._tally.problems = others
            self._log().info("healed", stage=stage)

    def log_event(self, event: Corrupt | Skipped | None, position: int) -> None:
        """The reader met this, or (None) has left what it stood at, and is at ``position`` now."""
        if event is None:
            self._log().info("corrupt_left", offset=position)
        elif isinstance(event, Corrupt):
            self._tally.corrupt_found += 1
            self._log().error(
                "corrupt",
                offset=event.offset,
                file=str(event.path),
                reason=event.reason,
                hint="indexing waits here and reads again; --on-corrupt skip goes on at the next proven frame",
            )
        else:
            size = event.end - event.begin
            self._log().warning("skipped", begin=event.begin, end=event.end, bytes=size, reason=event.reason)

    def has_rolled(self, rolls: int, phy_offset: int) -> bool:
        """Whether index files became full since the last call; ``rolls`` is how many ever did."""
        files, self._rolls = rolls - self._rolls, rolls
        if files:
            self._log().info("rolled", files=files, phy_offset=phy_offset)
        return bool(files)

    def expired(self, names: list[str]) -> None:
        """Files that only point before the log's begin are no longer used."""
        if names:
            self._log().info("expired_files", files=len(names), names=names[:_NAMES_MAX])

    def left_out(self, counters: QueueCounters) -> None:
        """Once a reason, when the first such message comes; how many there are stands in the state."""
        for reason, count in (
            ("its topic is no folder's name", counters.nameless),
            ("queues_max is reached, or its queue offset is none that a file can hold", counters.left_out),
            ("its topic has batch consume queues, which are not built", counters.batch_messages),
        ):
            if count and reason not in self._left_out:
                self._left_out.add(reason)
                self._log().warning("left_out", reason=reason, hint="it is found by key, and in no consume queue")

    def state_written(self, error: IndexdError | None) -> None:
        """DATA/state was written, or not: queries then go by the frontier. Said once, not at every drain."""
        if error is not None and self._is_state_written:
            self._log().error("state_not_written", problem=error.line())
        self._is_state_written = error is None

    def stalled(self, stages: Mapping[str, float]) -> None:
        """These do not move, since so many seconds; said when others do than before."""
        names = frozenset(stages)
        if names - self._stalled:
            self._log().error("stalled", stages=sorted(names), seconds=max(stages.values()))
        elif self._stalled and not names:
            self._log().info("moves_again", stages=sorted(self._stalled))
        self._stalled = names
