"""What broker.conf says about the broker itself, and the base of every stage of the configuration.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Stage(BaseModel):
    """One frozen part of the configuration; a key that it does not know is refused."""

    # Built at first use: Config's one validator covers every stage, and each stage's own would double the start-up.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)


class ConflictError(ValueError):
    """Keys that are each allowed but not together; `keys` are those to name, with values and sources."""

    def __init__(self, keys: tuple[str, ...], text: str) -> None:
        super().__init__(text)
        self.keys = keys


class BrokerFacts(Stage):
    """What broker.conf says about the broker and is not ours to set; RocketMQ's defaults where it says nothing."""

    message_index_enable: bool = Field(default=True, description="messageIndexEnable: it dispatches to its index")
    message_index_safe: bool = Field(default=False, description="messageIndexSafe: its recovery builds the index, too")
    index_file_write_enable: bool = Field(default=True, description="indexFileWriteEnable (5.4): it writes index files")
    index_rocksdb_enable: bool = Field(default=False, description="indexRocksDBEnable (5.4): it indexes into RocksDB")
    store_type: str = Field(default="default", description="storeType: default or defaultRocksDB, in any case")
    enable_dledger_commit_log: bool = Field(default=False, description="enableDLegerCommitLog: DLedger's own format")
    enable_controller_mode: bool = Field(default=False, description="enableControllerMode: a failover may cut the tail")
    duplication_enable: bool = Field(
        default=False, description="duplicationEnable: only confirmed messages are dispatched"
    )
    transient_store_pool_enable: bool = Field(
        default=False, description="transientStorePoolEnable: bytes appear at commit"
    )
    flush_disk_type: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = Field(default="ASYNC_FLUSH", description="flushDiskType")
    broker_role: Literal["ASYNC_MASTER", "SYNC_MASTER", "SLAVE"] = Field(
        default="ASYNC_MASTER", description="brokerRole"
    )
    listen_port: int = Field(default=10911, description="listenPort: where it listens")
    broker_ip1: str = Field(default="", description="brokerIP1: the address that clients are told, else its host's")
