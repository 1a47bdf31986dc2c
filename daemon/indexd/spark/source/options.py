"""Reads the options of the data source ``rocketmq_commitlog``.

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

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.alias_generators import to_camel

from indexd.config import KEYS, Config, load, parse_size
from indexd.errors import MissingOk, UsageError
from indexd.query.by_queue_and_time import scan_start
from indexd.query.source import open_index
from indexd.spark.source.columns import DEFAULT_COLUMNS, nearest, parse_columns
from indexd.storage.disk import Disk
from indexd.storage.names import segment_base
from indexd.storage.remote import disk_for

FORMAT = "rocketmq_commitlog"
_DEFAULT = "default"


def _topics(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(","))


def _word(text: str) -> str:
    return text.strip().lower()


Policy = Literal["fail", "skip"]
_Policy = Annotated[Policy, BeforeValidator(_word)]
_Offset = Annotated[int, Field(ge=0, lt=1 << 63)]
_Time = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
_Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]


class SourceOptions(BaseModel):
    """The source's own options; offsets in bytes, times in ms, None where nothing was said. ``config``: all others."""

    model_config = ConfigDict(alias_generator=to_camel)

    path: str | None = None
    columns: Annotated[tuple[str, ...], BeforeValidator(parse_columns)] = DEFAULT_COLUMNS
    topics: Annotated[frozenset[str] | None, BeforeValidator(_topics)] = None
    start_offset: _Offset | None = None
    end_offset: _Offset | None = None
    start_time: _Time | None = None
    end_time: _Time | None = None
    split_size: _Size | None = None
    corrupt: _Policy | None = None
    config_file: Path | None = Field(None, alias="config")
    starting_offset: Annotated[Literal["earliest", "latest"] | _Offset, BeforeValidator(_word)] = "earliest"
    max_bytes_per_trigger: _Size | None = None
    on_expired: _Policy = "fail"
    _config: Config = PrivateAttr()

    @property
    def config(self) -> Config:
        """The configuration, with what the options say of it."""
        return self._config

    def time_begin(self, disk: Disk) -> int | None:
        """Where ``start_time`` begins, as far as a data directory that somebody named says so."""
        if self.start_time is None or self.config.provenance.get("data", _DEFAULT).startswith(_DEFAULT):
            return None
        return begin_of_time(disk, self.config, self.start_time)


_BATCH_ONLY = ("startOffset", "endOffset")
_STREAM_ONLY = ("startingOffset", "maxBytesPerTrigger", "onExpired")
_OWN = [field.alias or "" for field in SourceOptions.model_fields.values()]
_NAMES = {name.lower(): name for name in _OWN}
_KEYS = {key.replace("_", ""): key for key in KEYS}


def parse_options(options: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Raises UsageError for what is wrong or unknown, and what reading a configuration does."""
    texts, keys = sorted_out(options)
    for name in _BATCH_ONLY if is_stream else _STREAM_ONLY:
        if name in texts:
            hint = "use startingOffset, startTime and endTime" if is_stream else "use startOffset and endOffset"
            raise UsageError(f"{name} is no option of a {'stream' if is_stream else 'batch'}", hint)
    try:
        own = SourceOptions.model_validate(texts)
    except ValidationError as error:
        wrong = error.errors()[0]
        text, why = str(wrong["loc"][0]), wrong["msg"].removeprefix("Value error, ")
        raise UsageError(f"{text} = {texts[text][:64]!r}: {why}") from None
    if own.corrupt is not None:
        keys["on_corrupt"] = "skip" if own.corrupt == "skip" else "stop"
    if own.path is not None:
        keys["store"] = own.path
    own._config = with_known_segment_size(load(keys, own.config_file, {}))
    if not own.config.store.commit_log_directories:
        raise UsageError("no store is given", "give load() the broker's storePathRootDir, or the option commitLogPaths")
    own.split_size = own.split_size or own.config.spark.split_size or None
    return own


def with_known_segment_size(config: Config) -> Config:
    """The configuration with the size that the log's files have, where nobody gave another."""
    if config.is_given("segment_size"):
        return config
    disk = disk_for(config)
    for directory in config.store.commit_log_directories:
        with MissingOk():
            for name, size in disk.list_dir(directory):
                if segment_base(name) is not None and size > 0:
                    store = config.store.model_copy(update={"segment_size": size})
                    return config.model_copy(update={"store": store})
    return config


def begin_of_time(disk: Disk, config: Config, start_time: int) -> int | None:
    """The physical offset before which every message is older, by the sparse indexes of the data directory.

    A message begins there, or a segment; None where they do not tell. Raises what opening a data directory does.
    """
    with closing(open_index(disk, config)) as index:
        look = index.look()
        coverage = look.queue_coverage
        if coverage.starts_late or look.frontier.sparse is None:
            return None
        begin = max(coverage.begin, coverage.log_begin or 0)
        found = scan_start(index, look, start_time, begin)
        # What was left out when it was built may be read now.
        return min([found, *(gap.begin for gap in coverage.uncovered if gap.end > begin)])


def sorted_out(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | None]]:
    """The source's own options, and keys of the configuration; UsageError for what is neither."""
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
            otherwise = f"there are {', '.join(_OWN)}, and every key of indexd's configuration"
            hint = nearest(name, _KEYS | _NAMES, otherwise)
            raise UsageError(f"there is no option {option[:64]!r} of {FORMAT}", hint)
    return own, keys
