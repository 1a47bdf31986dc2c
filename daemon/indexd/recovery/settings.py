"""What the configuration comes to for those who read the log and build from it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from indexd.commitlog import batcher
from indexd.commitlog.dispatch import make_rules
from indexd.commitlog.kernel import Rules
from indexd.commitlog.reading import ReaderOptions
from indexd.config import Config
from indexd.config.places import check_outside
from indexd.config.remote_path import RemotePath
from indexd.consumequeue import pending as queue_units
from indexd.errors import UnsafeStoreError, UsageError
from indexd.flush.frontier import Frontier
from indexd.index import file as index_file
from indexd.index.flavour import FLAVOURS
from indexd.index.format import IndexLayout
from indexd.sparse import kernel as sparse_kernel

_BODY_SIZE_BELIEVED = 64 << 20
# Topic, properties and fixed fields: what the broker allows above maxMessageSize (spec rocketmq-store 2.6).
_FRAME_OVERHEAD = 64 << 10
_READ_SIZE_MIN = 64 << 10
# So many of the newest segments are the consumers': their page cache is never given back.
_HOT_SEGMENTS = 2


def reader_options(config: Config) -> ReaderOptions:
    """The reader's share of the configuration."""
    return ReaderOptions(
        segment_size=config.store.segment_size,
        read_size=_read_size(config),
        settle=config.reader.settle_ms / 1000,
        corrupt_after=config.reader.corrupt_after_ms / 1000,
        skip_corrupt=config.reader.on_corrupt == "skip",
        verify_crc=config.reader.verify_crc,
        drop_behind=_HOT_SEGMENTS * config.store.segment_size if config.limits.drop_cache else None,
    )


def _read_size(config: Config) -> int:
    # Half a second's worth at a bounded rate, so that a wait for it is short.
    rate = config.limits.read_rate_max
    return config.reader.read_bytes if not rate else min(config.reader.read_bytes, max(rate // 2, _READ_SIZE_MIN))


def decode_rules(config: Config) -> Rules:
    """What the flavour and the broker's settings ask of the decoder."""
    flavour = FLAVOURS[config.index.flavour]
    return make_rules(
        config.store.delay_levels_ms,
        check_crc=False,
        want_uniq_key=flavour.uniq_key,
        want_tags=flavour.tags,
        want_queue=config.outputs.consume_queue or config.outputs.sparse,
        frame_size_max=frame_size_max(config),
    )


def frame_size_max(config: Config) -> int:
    """The largest total size that is believed: the broker's maxMessageSize may have been larger before."""
    return max(config.reader.max_message_size, _BODY_SIZE_BELIEVED) + _FRAME_OVERHEAD


def load_kernels(config: Config) -> None:
    """Compile, or load what is compiled, before there is work that would wait for it; the two halves side by side."""
    loads = [index_file.load_kernels]
    loads += [queue_units.load_kernels] if config.outputs.consume_queue else []
    loads += [sparse_kernel.load_kernels] if config.outputs.sparse else []
    builders = threading.Thread(target=lambda: [load() for load in loads])
    builders.start()
    batcher.load_kernels(decode_rules(config))
    builders.join()


def check_store(config: Config) -> Path:
    """The store root; refuses what must not be indexed at all."""
    store = config.store.store
    if store is None and not config.store.commit_log_directories:
        raise UsageError("no store is given", "say --store DIR (the broker's storePathRootDir), or --broker-conf FILE")
    if store is not None and not isinstance(store, RemotePath) and not store.is_dir():
        raise UnsafeStoreError(f"the store {store} is no directory", "give the broker's storePathRootDir as --store")
    root = store or config.store.commit_log_directories[0].parent
    check_outside(config, config.store.data, "--data")
    if config.broker.enable_dledger_commit_log:
        raise UnsafeStoreError(
            "the broker keeps a DLedger log (enableDLegerCommitLog), which is not read",
            "point --store at a broker that runs without it",
        )
    return root.resolve()


def fresh_frontier(config: Config, store: Path) -> Frontier:
    """Of a directory in which nothing has been built, and so nothing has to be scrubbed yet."""
    return Frontier(
        str(store),
        tuple(str(path.resolve()) for path in config.store.commit_log_directories),
        config.store.segment_size,
        config.index.flavour,
        IndexLayout(config.index.hash_slot_num, config.index.index_num),
        queue_file_size=config.store.consume_queue_file_size,
        scrubbed_at=int(time.time() * 1000),
    )
