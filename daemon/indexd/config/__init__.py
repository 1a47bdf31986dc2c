"""The configuration: what may be set, where it is read from, and which source of a value wins.

    model     one frozen model a stage, broker.conf's facts, and the list of all keys for flags and help
    serving   the stages around the index: HTTP, remoting, MQTT, limits, Spark
    units     the types: sizes, durations, paths, also behind a URI, as people write them
    load      flags, environment, TOML file, broker.conf -> one Config with the source of each value
    compiled  where compiled kernels are kept, and which folders are trusted

Importing this costs every command its start-up: standard library and pydantic only.
"""

from indexd.config.compiled import prepare_compiler
from indexd.config.load import DEFAULT_CONFIG_FILE, check_outside, load, refuse_double_index
from indexd.config.serving import (
    OFF,
    HttpConfig,
    LimitsConfig,
    MqttConfig,
    NodeConfig,
    RemotingConfig,
    SparkConfig,
    split_address,
)
from indexd.config.units import (
    RemotePath,
    parse_count,
    parse_millis,
    parse_path,
    parse_place,
    parse_seconds,
    parse_size,
    printable,
    show_size,
)

from .model import (
    KEYS,
    SECTIONS,
    BrokerFacts,
    Config,
    Flavour,
    FlushConfig,
    IndexConfig,
    KeyInfo,
    LogConfig,
    OutputsConfig,
    QueryConfig,
    QueueConfig,
    ReaderConfig,
    RecoveryConfig,
    StoreConfig,
    env_name,
    flag_name,
    state_directory,
)

__all__ = [
    "DEFAULT_CONFIG_FILE",
    "KEYS",
    "OFF",
    "SECTIONS",
    "BrokerFacts",
    "Config",
    "Flavour",
    "FlushConfig",
    "HttpConfig",
    "IndexConfig",
    "KeyInfo",
    "LimitsConfig",
    "LogConfig",
    "MqttConfig",
    "NodeConfig",
    "OutputsConfig",
    "QueryConfig",
    "QueueConfig",
    "ReaderConfig",
    "RecoveryConfig",
    "RemotePath",
    "RemotingConfig",
    "SparkConfig",
    "StoreConfig",
    "check_outside",
    "env_name",
    "flag_name",
    "load",
    "parse_count",
    "parse_millis",
    "parse_path",
    "parse_place",
    "parse_seconds",
    "parse_size",
    "prepare_compiler",
    "printable",
    "refuse_double_index",
    "show_size",
    "split_address",
    "state_directory",
]
