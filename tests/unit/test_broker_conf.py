"""Configuration: the broker's own file, read as Java reads it, and the offload mode that needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexd.config import PropertiesError, load, parse_properties
from indexd.errors import UnsafeStoreError
from support.configs import HOME, no_system_file, refused, write

__all__ = ["no_system_file"]


# --- broker.conf


@pytest.mark.parametrize(
    ("text", "expected"),  # every expectation is what java.util.Properties of JDK 17 and 25 gives
    [
        ("a=1", {"a": "1"}),
        ("a = 1 \n", {"a": "1 "}),
        ("a:1\rb 2\r\nc\t\f=\f3", {"a": "1", "b": "2", "c": "3"}),
        ("a = = 1\nb == 1\nc : = 2", {"a": "= 1", "b": "= 1", "c": "= 2"}),
        ("  # no\n\t! no \\\na=1", {"a": "1"}),
        ("a=1 # yes", {"a": "1 # yes"}),
        ("a\nb=\n\n", {"a": "", "b": ""}),
        ("a=1,\\\n   2,\\\r\n\t3\nb=4", {"a": "1,2,3", "b": "4"}),
        ("a=1\\\n\nb=2", {"a": "1", "b": "2"}),
        ("a=1\\\n#2\nb=3", {"a": "1#2", "b": "3"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\", {"a": "1"}),
        ("\\\n  a=1", {"a": "1"}),
        ("a\\ b\\=c\\:d=1", {"a b=c:d": "1"}),
        ("\\#a=1\na\\\\=2", {"#a": "1", "a\\": "2"}),
        ('a=\\t\\n\\r\\f\\q\\"', {"a": '\t\n\r\fq"'}),
        ("a=\\u0041\\u00e9", {"a": "Aé"}),
        ("a=\\ud83d\\ude00", {"a": "😀"}),
        ("a=C:\\\\data\\\\store", {"a": "C:\\data\\store"}),
        ("a=1\na=2", {"a": "2"}),
        ("=1", {"": "1"}),
        ("\\u0061b=1", {"ab": "1"}),
        ("\xe9=\xff", {"\xe9": "\xff"}),
    ],
)
def test_properties_are_read_as_java_reads_them(text, expected):
    assert {key: entry.value for key, entry in parse_properties(text).items()} == expected


def test_properties_know_their_lines_and_refuse_what_java_refuses():
    assert {k: e.line for k, e in parse_properties("\n# x\na=1\\\n2\nb=3\ra=4").items()} == {"a": 6, "b": 5}
    for text in ("a=1\nb=\\u00g0", "\n\\u12=1", "\nb=\\u"):
        with pytest.raises(PropertiesError) as caught:
            parse_properties(text)
        assert caught.value.line == 2


def broker_conf(tmp_path, text, **flags):
    file = write(tmp_path / "broker.conf", text)
    return load({"broker_conf": str(file), **flags}, None, HOME)


def test_broker_conf_gives_every_shared_key(tmp_path):
    text = """
        storePathRootDir = /data/store\x20
        storePathCommitLog=/d1/commitlog,/d2/commitlog
        readOnlyCommitLogStorePaths = /d3/commitlog
        mappedFileSizeCommitLog=65536
        mappedFileSizeConsumeQueue=30
        maxHashSlotNum=100
        maxIndexNum=+400
        messageDelayLevel=1s 2m 3h 4d
        maxMsgsNumBatch=65
        defaultQueryMaxNum=33
        maxMessageSize=65535
        messageIndexEnable=FALSE
        indexFileWriteEnable=false
        storeType=defaultRocksDB
        enableDLegerCommitLog=true
        flushDiskType=SYNC_FLUSH
        transientStorePoolEnable=true
        brokerRole=SLAVE
        brokerName=anything
    """
    made = broker_conf(tmp_path, text)
    assert made.store.store == Path("/data/store")
    assert made.store.commit_log_paths == (Path("/d1/commitlog"), Path("/d2/commitlog"))
    assert made.store.commit_log_directories[-1] == Path("/d3/commitlog")
    assert (made.store.segment_size, made.store.consume_queue_file_size) == (65536, 40)
    assert (made.index.hash_slot_num, made.index.index_num) == (100, 400)
    assert made.store.delay_levels_ms == (1000, 120_000, 10_800_000, 345_600_000)
    assert (made.query.max_msgs_num_batch, made.query.default_query_max_num) == (65, 33)
    assert made.reader.max_message_size == 65535
    facts = made.broker
    assert (facts.message_index_enable, facts.index_file_write_enable) == (False, False)
    assert (facts.store_type, facts.flush_disk_type, facts.broker_role) == ("defaultRocksDB", "SYNC_FLUSH", "SLAVE")
    assert facts.enable_dledger_commit_log
    assert facts.transient_store_pool_enable
    assert not facts.message_index_safe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1\nmaxIndexNum=20m", 'maxIndexNum = "20m" (from FILE line 2) is not a whole number'),
        ("maxIndexNum=400 ", 'maxIndexNum = "400 " (from FILE line 1) is not a whole number'),
        ("maxIndexNum=", 'maxIndexNum = "" (from FILE line 1) is not a whole number'),
        ("maxIndexNum=2147483648", "is not a whole number of 32 bits"),
        ("maxIndexNum=" + "9" * 9000, "is not a whole number of 32 bits"),
        ("maxIndexNum=5_000", "is not a whole number"),
        ("messageIndexEnable=no", 'messageIndexEnable = "no" (from FILE line 1) is not true or false'),
        ("messageIndexEnable=true ", "the broker reads it as false"),
        ("flushDiskType=SYNC", "is not one of ASYNC_FLUSH, SYNC_FLUSH"),
        ("storePathRootDir=${user.home}/store", 'storePathRootDir = "${user.home}/store" (from FILE line 1) is not ex'),
        ("storePathRootDir=", 'store = "" (from FILE line 1, storePathRootDir) is empty'),
        ("storePathCommitLog=/a,/b\\u0000c", "(from FILE line 1, storePathCommitLog) is not a path"),
        ("storePathCommitLog=/a\\ud800", "characters that no file name"),
        ("messageDelayLevel=1s 2y", 'message_delay_level = "1s 2y" (from FILE line 1, messageDelayLevel) is not'),
        ("a=1\n\n b=\\u12", "FILE line 3: a \\u is not followed by four hexadecimal digits"),
    ],
)
def test_broker_conf_that_does_not_mean_what_it_says(tmp_path, text, expected):
    file = write(tmp_path / "broker.conf", text)
    assert expected.replace("FILE", str(file)) in str(refused({"broker_conf": str(file)}))


def test_unused_placeholders_are_left_alone(tmp_path):
    assert broker_conf(tmp_path, "storePathIndex=${user.home}/x\nstorePathRootDir=/s").store.store == Path("/s")


def test_the_old_spelling_counts_where_the_broker_reads_it(tmp_path):
    old = "mapedFileSizeCommitLog=65536\n"
    assert broker_conf(tmp_path, old).store.segment_size == 2**30
    made = broker_conf(tmp_path, old, flavour="4.0")
    assert made.store.segment_size == 65536
    assert made.provenance["segment_size"].endswith("broker.conf line 1, mappedFileSizeCommitLog")
    assert broker_conf(tmp_path, old + "mappedFileSizeCommitLog=4096", flavour="3.x").store.segment_size == 4096


# --- mode offload


def test_offload_wants_proof_that_the_broker_does_not_index(tmp_path):
    error = refused({"run_mode": "offload"}, error=UnsafeStoreError)
    assert error.exit_code == 3
    assert "--broker-conf" in error.hint
    for text, flavour, key in (
        ("", "5.4", "indexFileWriteEnable"),
        ("messageIndexEnable=true\nindexFileWriteEnable=true", "5.4", "indexFileWriteEnable"),
        ("indexFileWriteEnable=false", "4.7", "messageIndexEnable"),
    ):
        file = write(tmp_path / "broker.conf", text)
        error = refused({"run_mode": "offload", "broker_conf": str(file), "flavour": flavour}, error=UnsafeStoreError)
        assert f"{key} is true in {file}" in str(error)
        assert f"set {key}=false" in error.hint
    for text, flavour in (
        ("messageIndexEnable=false", "5.4"),
        ("indexFileWriteEnable=false", "5.4"),
        ("messageIndexEnable=false", "4.0"),
    ):
        assert broker_conf(tmp_path, text, run_mode="offload", flavour=flavour).store.run_mode == "offload"
