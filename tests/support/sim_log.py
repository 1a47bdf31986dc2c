"""The broker of a simulation: a real commitlog that grows, expires and is cut, and every message that was in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.naive import NaiveMessage, naive_frames
from support.small_log import BASE_TIME, messages

_MILLIS_PER_MESSAGE = 400


class _Writer(CommitLogWriter):
    """A writer that does not sync: what a crash leaves of the log itself is not asked here."""

    def flush(self) -> None:
        return


class SimLog:
    """``history`` holds what an index of the whole log covers: expired messages too, but none that were cut off."""

    def __init__(self, directory: Path, segment_size: int, seed: int, *, rewrites: bool = False) -> None:
        self.directory = directory
        self.segment_size = segment_size
        self.history: list[NaiveMessage] = []
        #: Counted up with each rewrite: what was known of the old log holds no more.
        self.edition = 0
        self._specs = _rising(messages(seed)) if rewrites else messages(seed)
        self._writer = _Writer(directory, segment_size)
        self._parsed = 0

    def __repr__(self) -> str:
        return f"SimLog([{self.begin}, {self.end}), {len(self.history)} messages, edition {self.edition})"

    @property
    def begin(self) -> int:
        """The first physical offset that is still there."""
        return min(int(path.name) for path in self.directory.iterdir())

    @property
    def end(self) -> int:
        """The offset behind the last message."""
        return self._writer.max_offset

    def append(self, count: int) -> None:
        """Write so many messages, or a few more.

        What follows the end must not be a frame of an older and longer log, or nobody could tell where this one ends.
        """
        begin = self.end
        for _ in range(count):
            self._writer.append(next(self._specs))
        while self.edition and self._is_followed(begin):
            self._writer.append(next(self._specs))
        self._read_history()

    def roll(self) -> None:
        """Write until the next segment has begun."""
        base = self.end - self.end % self.segment_size
        while self.end < base + self.segment_size:
            self._writer.append(next(self._specs))
        self._read_history()

    def expire(self, before: int) -> int:
        """Delete the segments that end at or before ``before``, never the one being written; how many."""
        last = self.end - self.end % self.segment_size
        old = [path for path in sorted(self.directory.iterdir()) if int(path.name) + self.segment_size <= before]
        old = [path for path in old if int(path.name) < last]
        for path in old:
            path.unlink()
        return len(old)

    def rewrite(self, rand: random.Random, most: int) -> int | None:
        """Cut at most ``most`` messages off the end, as a broker that lost them, and write others; where it was cut.

        None when there is nothing to cut.
        """
        kept = [message for message in self.history if message.phy_offset >= self.begin]
        if len(kept) < 2:
            return None
        cut = kept[-rand.randint(1, min(most, len(kept) - 1))].phy_offset
        self.cut(cut)
        self.append(1)
        return cut

    def _is_followed(self, begin: int) -> bool:
        *_, last = naive_frames(self._segments(), self.segment_size, start=begin)
        return last.phy_offset + last.size > self.end

    def cut(self, offset: int) -> None:
        """Go on writing at ``offset``, a message's: the bytes behind it stay in its segment, later segments go."""
        self._writer.close(clean=False)
        for path in self.directory.iterdir():
            if int(path.name) > offset:
                path.unlink()
        self.history = [message for message in self.history if message.phy_offset < offset]
        self._writer = _Writer(self.directory, self.segment_size, start_offset=offset)
        self._parsed = offset
        self.edition += 1

    def write(self, *specs: FrameSpec) -> None:
        """Write just these messages."""
        for spec in specs:
            self._writer.append(spec)
        self._read_history()

    def close(self) -> None:
        """Close the segment, as a broker that was killed."""
        self._writer.close(clean=False)

    def _segments(self) -> list[Path]:
        return sorted(self.directory.iterdir())

    def _read_history(self) -> None:
        # From the bytes, by the naive decoder: the oracle shares nothing with the writer either.
        for message in naive_frames(self._segments(), self.segment_size, start=self._parsed):
            if message.phy_offset >= self.end:
                break
            self.history.append(message)
            self._parsed = message.phy_offset + message.size


def _rising(specs: Iterator[FrameSpec]) -> Iterator[FrameSpec]:
    # A broker's clock: after a cut the new messages are younger than those that they overwrite.
    for number, spec in enumerate(specs):
        yield replace(spec, store_timestamp=BASE_TIME + _MILLIS_PER_MESSAGE * number)
