"""The settings, one small frozen model a stage: type, default, bounds, meaning and unit; and the list of all keys.

A key's name is unique over all the stages, so that ``--hash-slot-num``, ``INDEXD_HASH_SLOT_NUM`` and
``hash_slot_num`` under ``[index]`` are one thing. Names and defaults are RocketMQ's where it has them.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from indexd.config.serving import HttpConfig, LimitsConfig, MqttConfig, NodeConfig, RemotingConfig, SparkConfig
from indexd.config.units import (
    JAVA_INT_MAX,
    JAVA_TRIM,
    ConflictError,
    Count,
    DelayLevels,
    Flag,
    Kind,
    Millis,
    OnePath,
    OptionalPath,
    OptionalPlace,
    Places,
    Seconds,
    Size,
    Stage,
    parse_choice,
    parse_java_flag,
    parse_java_int,
    parse_millis,
)
from indexd.errors import UsageError

CQ_STORE_UNIT_SIZE = 20
MESSAGE_DELAY_LEVEL = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

Flavour = Literal["3.x", "4.0", "4.7", "5.4"]


def state_directory(environ: Mapping[str, str]) -> Path:
    """Where our own files lie when nothing says so: systemd's directory, else the user's XDG state directory.

    An XDG path or a HOME that is not absolute is ignored, as the XDG specification asks. UsageError when the
    user has no home at all.
    """
    if given := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(given)
    for name, below in (("XDG_STATE_HOME", "indexd"), ("HOME", ".local/state/indexd")):
        if environ.get(name, "").startswith("/"):
            return Path(environ[name]) / below
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".local/state/indexd"
    except KeyError:
        raise UsageError("there is no home directory to keep data in", "give --data") from None


JavaBool = Annotated[bool, BeforeValidator(parse_java_flag)]
JavaInt = Annotated[int, BeforeValidator(parse_java_int)]
JavaText = Annotated[str, BeforeValidator(lambda text: text.strip(JAVA_TRIM))]


class BrokerFacts(Stage):
    """What broker.conf says about the broker and is not ours to set; RocketMQ's defaults where it says nothing."""

    message_index_enable: JavaBool = Field(
        default=True, alias="messageIndexEnable", description="It dispatches to its index"
    )
    message_index_safe: JavaBool = Field(
        default=False, alias="messageIndexSafe", description="Its recovery builds the index, too"
    )
    index_file_write_enable: JavaBool = Field(
        default=True, alias="indexFileWriteEnable", description="It writes index files (5.4)"
    )
    store_type: JavaText = Field(
        default="default", alias="storeType", description="default or defaultRocksDB, in any case"
    )
    enable_dledger_commit_log: JavaBool = Field(
        default=False, alias="enableDLegerCommitLog", description="DLedger's own format"
    )
    listen_port: JavaInt = Field(default=10911, alias="listenPort", description="Where it listens")
    broker_ip1: JavaText = Field(
        default="", alias="brokerIP1", description="The address that clients are told, else its host's"
    )


class StoreConfig(Stage):
    """Where the broker's files are and how large it makes them; where ours are."""

    store: OptionalPlace = Field(
        default=None, description="The broker's store root (storePathRootDir): a directory, for Spark also a URI"
    )
    commit_log_paths: Places = Field(
        default=(),
        description="The commitlog directories (storePathCommitLog), empty: <store>/commitlog; paths, by comma",
    )
    read_only_commit_log_paths: Places = Field(
        default=(),
        description="Commitlog directories the broker only reads (readOnlyCommitLogStorePaths); paths, by comma",
    )
    data: OnePath = Field(
        default_factory=lambda: state_directory(os.environ),
        description="Where indexd keeps its own files, never inside the store; a directory",
    )
    segment_size: Size = Field(
        default=2**30, ge=1024, le=JAVA_INT_MAX, description="One commitlog file (mappedFileSizeCommitLog); bytes"
    )
    consume_queue_file_size: Size = Field(
        default=300_000 * CQ_STORE_UNIT_SIZE,
        ge=CQ_STORE_UNIT_SIZE,
        le=JAVA_INT_MAX // CQ_STORE_UNIT_SIZE * CQ_STORE_UNIT_SIZE,
        description="One ConsumeQueue file (mappedFileSizeConsumeQueue), rounded up to whole 20-byte units; bytes",
    )
    broker_conf: OptionalPath = Field(
        default=None, description="The broker's own configuration file, read for every key it shares with us; a file"
    )
    message_delay_level: DelayLevels = Field(
        default=MESSAGE_DELAY_LEVEL,
        description="Delay of each level (messageDelayLevel), level 1 first; numbers with s, m, h, d",
    )
    run_mode: Annotated[Literal["shadow", "offload"], BeforeValidator(parse_choice)] = Field(
        default="shadow",
        description="shadow: beside a broker that indexes; offload: the broker's own indexing is off; a word",
    )

    @field_validator("consume_queue_file_size")
    @classmethod
    def _whole_units(cls, value: int) -> int:
        return -(-value // CQ_STORE_UNIT_SIZE) * CQ_STORE_UNIT_SIZE

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Milliseconds a message of each delay level waits; index 0 is level 1."""
        return tuple(map(parse_millis, self.message_delay_level.split()))

    @property
    def commit_log_directories(self) -> tuple[Path, ...]:
        """Every directory that may hold segments, those the broker writes first; empty when none is known."""
        written = self.commit_log_paths
        if not written and self.store is not None:
            written = (self.store / "commitlog",)
        return written + tuple(path for path in self.read_only_commit_log_paths if path not in written)


class ReaderConfig(Stage):
    """How the commitlog is tailed, and when bytes count as written or as corrupt."""

    poll_min_ms: Millis = Field(default=1, ge=1, le=60_000, description="Shortest wait for new bytes at the tail; ms")
    poll_max_ms: Millis = Field(default=50, ge=1, le=60_000, description="Longest wait for new bytes at the tail; ms")
    settle_ms: Millis = Field(
        default=50, ge=1, le=600_000, description="A newest frame unchanged for this long counts as written; ms"
    )
    corrupt_after_ms: Millis = Field(
        default=5000,
        ge=1,
        le=86_400_000,
        description="Unreadable bytes at the tail unchanged for this long are corrupt; ms",
    )
    on_corrupt: Annotated[Literal["stop", "skip"], BeforeValidator(parse_choice)] = Field(
        default="stop",
        description="What corrupt bytes in the log lead to: stop indexing there, or skip to the next frame; a word",
    )
    retry_max_seconds: Seconds = Field(
        default=60.0,
        ge=0.001,
        le=86_400,
        description="Longest wait between two tries of a failed read or write; seconds",
    )
    read_bytes: Size = Field(
        default=4 * 2**20, ge=64 * 2**10, le=2**30, description="Buffer of one read of the log; bytes"
    )
    max_message_size: Size = Field(
        default=4 * 2**20,
        ge=1,
        le=JAVA_INT_MAX,
        description="The broker's maxMessageSize; 64MiB and less is always believed; bytes",
    )
    verify_crc: Flag = Field(
        default=False,
        description="Check the body CRC of every message in sealed segments too, not only at the tail; true or false",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for less, more in (("poll_min_ms", "poll_max_ms"), ("settle_ms", "corrupt_after_ms")):
            if getattr(self, less) > getattr(self, more):
                raise ConflictError((less, more), f"{less} must not be more than {more}")
        return self


class QueueConfig(Stage):
    """The bounded queue between reading and building."""

    drain_interval: Seconds = Field(
        default=3.0, ge=0.001, le=3600, description="Time between two drains of the queue; seconds"
    )
    queue_rows: Count = Field(
        default=500_000, ge=1, le=JAVA_INT_MAX, description="Most messages the queue holds; messages"
    )
    queue_bytes: Size = Field(
        default=64 * 2**20, ge=64 * 2**10, le=2**40, description="Most memory the queue holds; bytes"
    )


class IndexConfig(Stage):
    """The shape of an index file: 40 + 4 * hash_slot_num + 20 * index_num bytes, so 48 GiB at the bounds."""

    flavour: Annotated[Flavour, BeforeValidator(parse_choice)] = Field(
        default="5.4", description="Which RocketMQ's index files are written, byte for byte; a word"
    )
    hash_slot_num: Count = Field(
        default=5_000_000, ge=1, le=JAVA_INT_MAX, description="Hash slots of one index file (maxHashSlotNum); slots"
    )
    index_num: Count = Field(
        default=20_000_000,
        ge=2,
        le=JAVA_INT_MAX,
        description="Entries of one index file, entry 0 unused (maxIndexNum); entries",
    )


class FlushConfig(Stage):
    """When what was built becomes durable."""

    flush_interval: Seconds = Field(
        default=30.0, ge=0.001, le=86_400, description="Time between two checkpoints; seconds"
    )


class RecoveryConfig(Stage):
    """What a start makes sure of, and when it gives up."""

    recheck_bytes: Size = Field(
        default=64 * 2**20,
        ge=0,
        le=2**40,
        description="So much of the log is compared with the index at a start; bytes",
    )
    scrub_interval: Seconds = Field(
        default=86_400.0,
        ge=0,
        le=604_800,
        description="Every so often everything that was built is read again and mended, 0: never; seconds",
    )
    unclean_starts_max: Count = Field(
        default=5, ge=0, le=1000, description="Unclean starts that never caught up before it gives up, 0: never; starts"
    )
    unclean_starts_seconds: Seconds = Field(
        default=600.0, ge=1, le=86_400, description="The time within which those starts count; seconds"
    )


class QueryConfig(Stage):
    """The bounds of one query."""

    query_max_num: Count = Field(
        default=10_000, ge=1, le=10_000_000, description="Most messages one exact query may ask for (-m); messages"
    )
    query_walk_max: Count = Field(
        default=1_000_000, ge=1, le=JAVA_INT_MAX, description="Most entries of a chain one exact query walks; entries"
    )
    max_msgs_num_batch: Count = Field(
        default=64,
        ge=1,
        le=JAVA_INT_MAX,
        description="Most messages of one answer in rocketmq mode (maxMsgsNumBatch); messages",
    )
    default_query_max_num: Count = Field(
        default=32, ge=1, le=JAVA_INT_MAX, description="Messages of a unique-key answer (defaultQueryMaxNum); messages"
    )


class LogConfig(Stage):
    """What indexd says about itself."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(parse_choice)] = Field(
        default="info", description="The least severe event that is logged; a word"
    )
    log_format: Annotated[Literal["auto", "console", "json", "journal"], BeforeValidator(parse_choice)] = Field(
        default="auto",
        description="Lines for people or for machines; auto: console, journal or json, by where they go; a word",
    )


class OutputsConfig(Stage):
    """What is built beside the key index."""

    consume_queue: Flag = Field(default=True, description="Build the ConsumeQueues; true or false")
    queues_max: Count = Field(
        default=1_000_000, ge=1, le=JAVA_INT_MAX, description="Most queues of all topics together; queues"
    )
    sparse: Flag = Field(
        default=True, description="Build an OffsetIndex and a TimeIndex for every segment; true or false"
    )
    sparse_interval: Size = Field(
        default=4096, ge=0, le=2**30, description="Log between two of their entries (index.interval.bytes); bytes"
    )


class Config(Stage):
    """The whole configuration: an attribute a stage, the broker's facts, and where each value came from."""

    store: StoreConfig = Field(default_factory=StoreConfig)
    reader: ReaderConfig = Field(default_factory=ReaderConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    index: IndexConfig = Field(default_factory=IndexConfig)
    outputs: OutputsConfig = Field(default_factory=OutputsConfig)
    flush: FlushConfig = Field(default_factory=FlushConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    query: QueryConfig = Field(default_factory=QueryConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    node: NodeConfig = Field(default_factory=NodeConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    remoting: RemotingConfig = Field(default_factory=RemotingConfig)
    mqtt: MqttConfig = Field(default_factory=MqttConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    spark: SparkConfig = Field(default_factory=SparkConfig)
    broker: BrokerFacts = Field(default_factory=BrokerFacts)
    provenance: Mapping[str, str] = Field(
        default_factory=dict, repr=False, description="key -> where its value came from, for status and the log"
    )

    def is_given(self, key: str) -> bool:
        """Whether anybody has said it: an option, the environment, a file."""
        return self.provenance.get(key, "default") != "default"


SECTIONS = (
    *("store", "reader", "queue", "index", "outputs", "flush", "recovery", "query", "log"),
    *("node", "http", "remoting", "mqtt", "limits", "spark"),
)
ENV_PREFIX = "INDEXD_"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key as help and errors show it; `section` is the TOML table and the attribute of Config alike."""

    section: str
    type: str
    default: str
    description: str
    repeats: bool
    bounds: str = ""


def flag_name(key: str) -> str:
    """``hash_slot_num`` -> ``--hash-slot-num``."""
    return "--" + key.replace("_", "-")


def env_name(key: str) -> str:
    """``hash_slot_num`` -> ``INDEXD_HASH_SLOT_NUM``."""
    return ENV_PREFIX + key.upper()


def _info(section: str, field: FieldInfo) -> KeyInfo:
    kind = next((item for item in field.metadata if isinstance(item, Kind)), None)
    if kind is None:  # a closed list of words
        kind = Kind("|".join(get_args(field.annotation)), str)
    limits = [
        kind.show(bound)
        for name in ("ge", "le")
        for item in field.metadata
        if (bound := getattr(item, name, None)) is not None
    ]
    return KeyInfo(
        section=section,
        type=kind.name,
        default="$STATE_DIRECTORY, else $XDG_STATE_HOME/indexd, else ~/.local/state/indexd"
        if field.default_factory
        else kind.show(field.default),
        description=field.description or "",
        repeats=kind.repeats,
        bounds=" to ".join(limits),
    )


#: Every key with what help and errors say of it, read off the models.
KEYS: Mapping[str, KeyInfo] = MappingProxyType(
    {
        key: _info(section, field)
        for section in SECTIONS
        for key, field in getattr(Config.model_fields[section].annotation, "model_fields", {}).items()
    }
)
