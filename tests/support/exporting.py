"""What the tests of exports share: the rows that a log holds by the plain decoder, and what a target holds."""

from __future__ import annotations

from pathlib import Path

from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.commitlog.format import EndOfFile, NotYetWritten
from indexd.config import Config, load
from support.small_log import SEGMENT_SIZE


def config_of(store: Path | str, data: Path, segment_size: int = SEGMENT_SIZE) -> Config:
    """Of a store with such segments."""
    flags = {"store": str(store), "data": str(data), "segment_size": str(segment_size)}
    return load(flags, None, {"HOME": "/home/op"})


def logged(store: Path, segment_size: int = SEGMENT_SIZE) -> list[Message]:
    """Every message of the log, by the plain decoder."""
    found = []
    options = DecoderOptions(load({}, None, {"HOME": "/home/op"}).store.delay_levels_ms)
    for path in sorted((store / "commitlog").iterdir()):
        base, data, at = int(path.name), path.read_bytes(), 0
        while at < len(data):
            message = decode_frame(data, at, base + at, base + segment_size, options)
            if isinstance(message, EndOfFile | NotYetWritten):
                break
            assert isinstance(message, Message), message
            found.append(message)
            at += message.size
    return found


def files_of(target: Path) -> list[str]:
    """Everything below it, by name."""
    return sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())


def parquet_of(target: Path) -> list[Path]:
    """The files that readers see, in the log's order within a partition."""
    return sorted(path for path in target.rglob("*.parquet"))
