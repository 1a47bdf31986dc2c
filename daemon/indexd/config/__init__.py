"""The configuration: what may be set, where it is read from, and which source of a value wins.

    model        one frozen model a stage; the bounds of everything that has a bound
    facts        what broker.conf says about the broker itself
    units        sizes, durations, paths as people write them
    remote_path  a store behind a URI
    serving      the keys of what stands around the index: HTTP, MQTT, limits
    remoting     the keys of RocketMQ's own protocol
    spark        the keys of the pipeline on Spark, which nothing of the daemon looks at
    keys         the list of all keys, for flags and help
    sources      flags, environment, TOML file -> key, value, source
    broker_conf  the broker's own properties file -> the keys it shares with us, and facts about it
    load         all of them -> one Config
    places       where indexd may keep its own files
    compiled     where compiled kernels are kept

Importing this costs every command its start-up: standard library and pydantic only.
"""

from indexd.config.load import DEFAULT_CONFIG_FILE, Entry, PropertiesError, load, parse_properties, refuse_double_index
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
from indexd.config.units import parse_delay_levels, parse_millis, parse_seconds, parse_size, show_size

from .facts import BrokerFacts
from .keys import KEYS, SECTIONS, KeyInfo, env_name, flag_name
from .model import (
    Config,
    Flavour,
    FlushConfig,
    IndexConfig,
    LogConfig,
    Mode,
    OnCorrupt,
    OutputsConfig,
    QueryConfig,
    QueueConfig,
    ReaderConfig,
    RecoveryConfig,
    StoreConfig,
    state_directory,
)

__all__ = [
    "DEFAULT_CONFIG_FILE",
    "KEYS",
    "OFF",
    "SECTIONS",
    "BrokerFacts",
    "Config",
    "Entry",
    "Flavour",
    "FlushConfig",
    "HttpConfig",
    "IndexConfig",
    "KeyInfo",
    "LimitsConfig",
    "LogConfig",
    "Mode",
    "MqttConfig",
    "NodeConfig",
    "OnCorrupt",
    "OutputsConfig",
    "PropertiesError",
    "QueryConfig",
    "QueueConfig",
    "ReaderConfig",
    "RecoveryConfig",
    "RemotingConfig",
    "SparkConfig",
    "StoreConfig",
    "env_name",
    "flag_name",
    "load",
    "parse_delay_levels",
    "parse_millis",
    "parse_properties",
    "parse_seconds",
    "parse_size",
    "refuse_double_index",
    "show_size",
    "split_address",
    "state_directory",
]
