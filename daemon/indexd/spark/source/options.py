"""What ``option(...)`` may say to the data source ``rocketmq_commitlog``, and what it comes to.

Names in any case, with or without ``_``. The source's own:

==================== ==============================================================================================
path                 the broker's storePathRootDir; what ``load(...)`` is given
columns              names between commas, ``*`` for all; default: all but ``body``
topics               names between commas: messages of these alone
startOffset          physical offset: messages that begin there or behind it
endOffset            physical offset: messages that begin before it
startTime            ms since the epoch: messages stored then or later
endTime              ms since the epoch: messages stored before it
timeSlack            how far the broker's clock may have gone back, as ``1h``: segments are left out by when their first
                     messages were stored. A clock that stepped by more loses rows; default: none is left out by guess
splitSize            log of one task, default: a segment, or less when that makes too few tasks; bytes, or ``64MiB``
corrupt              ``fail`` (default) or ``skip``: unreadable bytes behind which the log goes on
config               a configuration file of indexd (TOML)
startingOffset       of a stream: ``earliest`` (default), ``latest``, or a physical offset
maxBytesPerTrigger   of a stream: log of one batch, at most; a single longer message is a batch of its own
onExpired            of a stream: ``fail`` (default) or ``skip``: segments that expired before they were read
==================== ==============================================================================================

Every key of indexd's configuration is one too: ``segmentSize`` (taken from the files where nobody gives it), ``data``
(a data directory of indexd: its sparse indexes say for sure where ``startTime`` begins), ``brokerConf``, ...

Which part of the log can hold messages of a time range; what is read is then looked at row by row all the same.

Nothing is left out by guess unless somebody asks for it. The sparse indexes of a data directory say for sure before
which offset every message is older: each segment's has its largest time. The smallest is not known, so the end of a
range leaves nothing out.

With ``timeSlack`` the first message of each segment must do: the log is taken to be in order of time but for the
slack, by which the broker's clock may have gone back. A clock that was off by more inside a segment, and was right
again at the next one's begin, then leaves messages out.

Errors that end up in Spark's own text keep their hint, which names options where the command line has flags.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from indexd.config import KEYS, Config, load, parse_millis, parse_size
from indexd.errors import DiskError, IndexdError, UsageError
from indexd.query.by_time import scan_start
from indexd.query.source import open_index
from indexd.spark.source.columns import parse_columns
from indexd.spark.source.log_end import LogEnd
from indexd.storage.disk import Disk
from indexd.storage.names import segment_base
from indexd.storage.remote import disk_for

FORMAT = "rocketmq_commitlog"

_BATCH_ONLY = ("startoffset", "endoffset")
_STREAM_ONLY = ("startingoffset", "maxbytespertrigger", "onexpired")
_OWN = {
    name.lower(): name
    for name in (
        "path", "columns", "topics", "startOffset", "endOffset", "startTime", "endTime", "timeSlack", "splitSize",
        "corrupt", "config", "startingOffset", "maxBytesPerTrigger", "onExpired",
    )
}  # fmt: skip
_KEYS = {key.replace("_", ""): key for key in KEYS}
_DEFAULT = "default"

OPTIONS_HINT = f"there are {', '.join(_OWN.values())}, and every key of indexd's configuration"
"""What to say where the command line would name its help."""

Policy = Literal["fail", "skip"]


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
    #: None: no segment is left out by the time of its first message.
    time_slack: int | None
    split_size: int | None
    #: ``earliest``, ``latest`` or a physical offset.
    starting_offset: str | int
    max_bytes_per_trigger: int | None
    on_expired: Policy

    @property
    def has_data(self) -> bool:
        """Somebody said where a data directory of indexd is."""
        return not self.config.provenance.get("data", _DEFAULT).startswith(_DEFAULT)


def parse_options(options: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Raises UsageError for what is wrong or unknown, and what reading a configuration does."""
    own, keys = _sorted_out(options)
    for name in _STREAM_ONLY if not is_stream else _BATCH_ONLY:
        if name in own:
            hint = "use startOffset and endOffset" if not is_stream else "use startingOffset, startTime and endTime"
            raise UsageError(f"{_OWN[name]} is no option of a {'stream' if is_stream else 'batch'}", hint)
    value = partial(_value, own)
    policies = ("fail", "skip")
    corrupt = value("corrupt", lambda text: _one_of(text, policies))
    if corrupt is not None:
        keys["on_corrupt"] = "skip" if corrupt == "skip" else "stop"
    if "path" in own:
        keys["store"] = own["path"]
    file = own.get("config")
    config = with_known_segment_size(load(keys, Path(file) if file is not None else None, {}))
    if not config.store.commit_log_directories:
        raise UsageError("no store is given", "give load() the broker's storePathRootDir, or the option commitLogPaths")
    topics = own.get("topics")
    return SourceOptions(
        config=config,
        columns=parse_columns(own.get("columns")),
        topics=None if topics is None else frozenset(word.strip() for word in topics.split(",")),
        start_offset=value("startoffset", _whole),
        end_offset=value("endoffset", _whole),
        start_time=value("starttime", _integer),
        end_time=value("endtime", _integer),
        time_slack=value("timeslack", parse_millis),
        split_size=value("splitsize", _positive_size) or config.spark.split_size or None,
        starting_offset=value("startingoffset", _starting_offset, "earliest"),
        max_bytes_per_trigger=value("maxbytespertrigger", _positive_size),
        on_expired=value("onexpired", lambda text: _one_of(text, policies), "fail"),
    )


def check_names(options: Mapping[str, str]) -> None:
    """UsageError for an option that there is not."""
    _sorted_out(options)


def with_known_segment_size(config: Config, disk: Disk | None = None) -> Config:
    """The configuration with the size that the log's files have, where nobody gave another."""
    if config.provenance.get("segment_size", _DEFAULT) != _DEFAULT:
        return config
    disk = disk or disk_for(config)
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


def _sorted_out(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | None]]:
    # The source's own options, and keys of the configuration.
    own: dict[str, str] = {}
    keys: dict[str, str | None] = {}
    for option, text in options.items():
        name = option.lower().replace("_", "")
        if name in _OWN:
            own[name] = text
        elif name in _KEYS:
            keys[_KEYS[name]] = text
        elif name == "paths":
            # What Spark makes of load([a, b]).
            raise UsageError(
                f"one store is loaded at a time, not {text[:256]}",
                "load each and union them; the directories of one store's log are the option commitLogPaths",
            )
        else:
            near = difflib.get_close_matches(name[:64], [*_OWN, *_KEYS], n=1)
            hint = f"did you mean {_OWN.get(near[0]) or _KEYS[near[0]]}?" if near else OPTIONS_HINT
            raise UsageError(f"there is no option {option[:64]!r} of {FORMAT}", hint)
    return own, keys


def _value(own: Mapping[str, str], name: str, parse: Callable[[str], Any], default: object = None) -> Any:
    if name not in own:
        return default
    try:
        return parse(own[name])
    except ValueError as error:
        raise UsageError(f"{_OWN[name]} = {own[name][:64]!r} {error}") from None


def _integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError("is not a whole number") from None
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("is not in 64 bits")
    return value


def _whole(text: str) -> int:
    value = _integer(text)
    if value < 0:
        raise ValueError("is negative")
    return value


def _positive_size(text: str) -> int:
    value = parse_size(text)
    if value < 1:
        raise ValueError("is less than 1")
    return value


def _starting_offset(text: str) -> str | int:
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return word
    try:
        return _whole(text)
    except ValueError:
        raise ValueError("is not earliest, latest or a physical offset") from None


def _one_of(text: str, words: tuple[str, ...]) -> str:
    word = text.strip().lower()
    if word not in words:
        raise ValueError(f"is not one of {', '.join(words)}")
    return word


_NEVER, _ALWAYS = -(1 << 63), (1 << 63) - 1


def time_range(disk: Disk, options: SourceOptions, log_end: LogEnd) -> tuple[int | None, int | None]:
    """(begin, end): physical offsets outside of which no message is of the time asked for; None sets no bound.

    A message begins at each, or a segment. Raises what opening a data directory does where one is given.
    """
    start_time, end_time = options.start_time, options.end_time
    slack = options.time_slack
    begin = end = None
    if start_time is not None and options.has_data:
        begin = _by_sparse_indexes(disk, options, start_time)
    if slack is None or (start_time is None and end_time is None):
        return begin, end
    log_end.refresh()
    bases, times = _first_messages(log_end)
    if start_time is not None and begin is None:
        begin = segment_before(bases, times, start_time - slack)
    if end_time is not None:
        end = segment_behind(bases, times, end_time + slack)
    return begin, end


def segment_before(bases: list[int], times: list[int | None], time: int) -> int | None:
    """The last segment up to whose first message all first messages are older than ``time``; an unknown one is not."""
    newest = accumulate((_ALWAYS if found is None else found for found in times), max)
    older = [base for base, found in zip(bases, newest, strict=True) if found < time]
    return older[-1] if older else None


def segment_behind(bases: list[int], times: list[int | None], time: int) -> int | None:
    """The first segment from which on all first messages are of ``time`` or later; an unknown one is not."""
    oldest = list(accumulate((_NEVER if found is None else found for found in reversed(times)), min))[::-1]
    later = [base for base, found in zip(bases, oldest, strict=True) if found >= time]
    return later[0] if later else None


def _first_messages(log_end: LogEnd) -> tuple[list[int], list[int | None]]:
    # Of the segments in use: where they begin, and the store time of what stands there.
    segments = [segment for segment in log_end.log.segments if log_end.is_in_use(segment)]
    bases = [segment.base for segment in segments]
    return bases, [log_end.store_timestamp(base) for base in bases]


def _by_sparse_indexes(disk: Disk, options: SourceOptions, start_time: int) -> int | None:
    index = open_index(disk, options.config)
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


_HELP = re.compile(r"see indexd --help( for all of them)?")
# With the value that a hint may give; what is behind ``indexd`` is a command, and stays one.
_FLAG = re.compile(r"(?<!indexd )--([a-z]+(?:-[a-z]+)*)(?:[ =](skip\b|\d+))?")
_OTHER_NAMES = {"on-corrupt": "corrupt", "store": "path"}


@contextmanager
def explained() -> Iterator[None]:
    """Lets an IndexdError through with its hint as a note: of what a data source raises, Spark shows the traceback."""
    try:
        yield
    except IndexdError as error:
        error.hint = with_options(error.hint)
        if error.hint and error.hint not in getattr(error, "__notes__", ()):
            error.add_note(error.hint)
        raise


def with_options(hint: str) -> str:
    """A hint for the command line as one for ``option(...)``: ``--segment-size 5`` is ``the option segmentSize=5``."""
    return _FLAG.sub(_option, _HELP.sub(OPTIONS_HINT, hint))


def _option(flag: re.Match[str]) -> str:
    first, *rest = flag[1].split("-")
    name = _OTHER_NAMES.get(flag[1]) or first + "".join(word.capitalize() for word in rest)
    return f"the option {name}={flag[2]}" if flag[2] else f"the option {name}"
