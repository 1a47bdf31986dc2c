"""Reads the options of the data source ``rocketmq_commitlog``, and turns hints about flags into hints about options.

Names in any case, with or without ``_``. The source's own:

==================== ==============================================================================================
path                 the broker's storePathRootDir; what ``load(...)`` is given
columns              names between commas, ``*`` for all; default: all but ``body``
topics               names between commas: messages of these alone
startOffset          physical offset: messages that begin there or behind it
endOffset            physical offset: messages that begin before it
startTime            ms since the epoch: messages stored then or later
endTime              ms since the epoch: messages stored before it
splitSize            log of one task, default: a segment, or less when that makes too few tasks; bytes, or ``64MiB``
corrupt              ``fail`` (default) or ``skip``: unreadable bytes behind which the log goes on
config               a configuration file of indexd (TOML)
startingOffset       of a stream: ``earliest`` (default), ``latest``, or a physical offset
maxBytesPerTrigger   of a stream: log of one batch, at most; a single longer message is a batch of its own
onExpired            of a stream: ``fail`` (default) or ``skip``: segments that expired before they were read
==================== ==============================================================================================

Every key of indexd's configuration is one too: ``segmentSize`` (taken from the files where nobody gives it), ``data``
(a data directory of indexd: its sparse indexes say for sure where ``startTime`` begins), ``brokerConf``, ...
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from indexd.config import KEYS, Config, load, parse_size
from indexd.errors import DiskError, IndexdError, UsageError
from indexd.query.by_time import scan_start
from indexd.query.source import open_index
from indexd.spark.source.columns import parse_columns
from indexd.storage.disk import Disk
from indexd.storage.names import segment_base
from indexd.storage.remote import disk_for

FORMAT = "rocketmq_commitlog"
Policy = Literal["fail", "skip"]
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """All of them, read and checked; offsets in bytes, times in ms, None where nothing was said."""

    config: Config
    columns: tuple[str, ...]
    topics: frozenset[str] | None
    start_offset: int | None
    end_offset: int | None
    start_time: int | None
    end_time: int | None
    split_size: int | None
    #: ``earliest``, ``latest`` or a physical offset.
    starting_offset: str | int
    max_bytes_per_trigger: int | None
    on_expired: Policy

    @property
    def has_data(self) -> bool:
        """Somebody said where a data directory of indexd is."""
        return not self.config.provenance.get("data", _DEFAULT).startswith(_DEFAULT)


def _integer(text: str, least: int = -(1 << 63)) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError("is not a whole number") from None
    if value < least == 0:
        raise ValueError("is negative")
    if not least <= value < 1 << 63:
        raise ValueError("is not in 64 bits")
    return value


def _size(text: str) -> int:
    value = parse_size(text)
    if value < 1:
        raise ValueError("is less than 1")
    return value


def _starting_offset(text: str) -> str | int:
    word = text.strip().lower()
    try:
        return word if word in ("earliest", "latest") else _integer(text, 0)
    except ValueError:
        raise ValueError("is not earliest, latest or a physical offset") from None


def _policy(text: str) -> str:
    word = text.strip().lower()
    if word not in ("fail", "skip"):
        raise ValueError("is not one of fail, skip")
    return word


def _topics(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(","))


_BATCH_ONLY: dict[str, Callable[[str], Any]] = {
    "startOffset": partial(_integer, least=0),
    "endOffset": partial(_integer, least=0),
}
_STREAM_ONLY: dict[str, Callable[[str], Any]] = {
    "startingOffset": _starting_offset,
    "maxBytesPerTrigger": _size,
    "onExpired": _policy,
}
_OWN: dict[str, Callable[[str], Any]] = {
    "path": str,
    "columns": parse_columns,
    "topics": _topics,
    "startTime": _integer,
    "endTime": _integer,
    "splitSize": _size,
    "corrupt": _policy,
    "config": Path,
    **_BATCH_ONLY,
    **_STREAM_ONLY,
}
_NAMES = {name.lower(): name for name in _OWN}
_KEYS = {key.replace("_", ""): key for key in KEYS}

OPTIONS_HINT = f"there are {', '.join(_OWN)}, and every key of indexd's configuration"
"""What to say where the command line would name its help."""


def parse_options(options: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Raises UsageError for what is wrong or unknown, and what reading a configuration does."""
    texts, keys = _sorted_out(options)
    for name in _BATCH_ONLY if is_stream else _STREAM_ONLY:
        if name in texts:
            hint = "use startingOffset, startTime and endTime" if is_stream else "use startOffset and endOffset"
            raise UsageError(f"{name} is no option of a {'stream' if is_stream else 'batch'}", hint)
    own = {name: _parsed(name, text) for name, text in texts.items()}
    if "corrupt" in own:
        keys["on_corrupt"] = "skip" if own["corrupt"] == "skip" else "stop"
    if "path" in own:
        keys["store"] = own["path"]
    config = with_known_segment_size(load(keys, own.get("config"), {}))
    if not config.store.commit_log_directories:
        raise UsageError("no store is given", "give load() the broker's storePathRootDir, or the option commitLogPaths")
    return SourceOptions(
        config=config,
        columns=own.get("columns") or parse_columns(None),
        topics=own.get("topics"),
        start_offset=own.get("startOffset"),
        end_offset=own.get("endOffset"),
        start_time=own.get("startTime"),
        end_time=own.get("endTime"),
        split_size=own.get("splitSize") or config.spark.split_size or None,
        starting_offset=own.get("startingOffset", "earliest"),
        max_bytes_per_trigger=own.get("maxBytesPerTrigger"),
        on_expired=own.get("onExpired", "fail"),
    )


def check_names(options: Mapping[str, str]) -> None:
    """UsageError for an option that there is not."""
    _sorted_out(options)


def with_known_segment_size(config: Config) -> Config:
    """The configuration with the size that the log's files have, where nobody gave another."""
    if config.provenance.get("segment_size", _DEFAULT) != _DEFAULT:
        return config
    disk = disk_for(config)
    for directory in config.store.commit_log_directories:
        try:
            files = disk.list_dir(directory)
        except DiskError as error:
            if not error.is_missing:
                raise
            continue
        for name, size in files:
            if segment_base(name) is not None and size > 0:
                store = config.store.model_copy(update={"segment_size": size})
                return config.model_copy(update={"store": store})
    return config


def begin_of_time(disk: Disk, config: Config, start_time: int) -> int | None:
    """The physical offset before which every message is older, by the sparse indexes of the data directory.

    A message begins there, or a segment; None where they do not tell. Raises what opening a data directory does.
    """
    index = open_index(disk, config)
    try:
        look = index.look()
        coverage = look.queue_coverage
        if coverage.starts_late or look.frontier.sparse is None:
            return None
        begin = max(coverage.begin, coverage.log_begin or 0)
        found = scan_start(index, look, start_time, begin)
        # What was left out when it was built may be read now.
        return min([found, *(gap.begin for gap in coverage.uncovered if gap.end > begin)])
    finally:
        index.close()


def _sorted_out(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | None]]:
    # The source's own options, and keys of the configuration.
    own: dict[str, str] = {}
    keys: dict[str, str | None] = {}
    for option, text in options.items():
        name = option.lower().replace("_", "")
        if name in _NAMES:
            own[_NAMES[name]] = text
        elif name in _KEYS:
            keys[_KEYS[name]] = text
        elif name == "paths":
            # What Spark makes of load([a, b]).
            raise UsageError(
                f"one store is loaded at a time, not {text[:256]}",
                "load each and union them; the directories of one store's log are the option commitLogPaths",
            )
        else:
            near = difflib.get_close_matches(name[:64], [*_NAMES, *_KEYS], n=1)
            hint = f"did you mean {_NAMES.get(near[0]) or _KEYS[near[0]]}?" if near else OPTIONS_HINT
            raise UsageError(f"there is no option {option[:64]!r} of {FORMAT}", hint)
    return own, keys


def _parsed(name: str, text: str) -> Any:
    try:
        return _OWN[name](text)
    except ValueError as error:
        raise UsageError(f"{name} = {text[:64]!r} {error}") from None


_HELP = re.compile(r"see indexd --help( for all of them)?")
# With the value that a hint may give; what is behind ``indexd`` is a command, and stays one.
_FLAG = re.compile(r"(?<!indexd )--([a-z]+(?:-[a-z]+)*)(?:[ =](skip\b|\d+))?")
_OTHER_NAMES = {"on-corrupt": "corrupt", "store": "path"}


@contextmanager
def explained() -> Iterator[None]:
    """Lets an IndexdError through with its hint as a note: of what a data source raises, Spark shows the traceback.

    A hint for the command line becomes one for ``option(...)``: ``--segment-size 5`` is ``the option segmentSize=5``.
    """
    try:
        yield
    except IndexdError as error:
        error.hint = _FLAG.sub(_option, _HELP.sub(OPTIONS_HINT, error.hint))
        if error.hint and error.hint not in getattr(error, "__notes__", ()):
            error.add_note(error.hint)
        raise


def _option(flag: re.Match[str]) -> str:
    first, *rest = flag[1].split("-")
    name = _OTHER_NAMES.get(flag[1]) or first + "".join(word.capitalize() for word in rest)
    return f"the option {name}={flag[2]}" if flag[2] else f"the option {name}"
