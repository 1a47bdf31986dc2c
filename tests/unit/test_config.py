"""Configuration: which source wins, what a value may be, and that every wrong one ends in one line that says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from indexd.config import (
    KEYS,
    SECTIONS,
    Config,
    IndexConfig,
    PropertiesError,
    ReaderConfig,
    StoreConfig,
    env_name,
    flag_name,
    load,
    parse_delay_levels,
    parse_millis,
    parse_properties,
    parse_seconds,
    parse_size,
    show_size,
)
from indexd.config.load import DEFAULT
from indexd.config.model import Flavour, state_directory
from indexd.config.units import parse_count, parse_flag, parse_path, parse_paths, shown
from indexd.errors import IndexdError, UnsafeStoreError, UsageError

SHIPPED = Path(__file__).parents[2] / "config" / "indexd.toml"
HOME = {"HOME": "/home/op"}
LOAD = sys.modules["indexd.config.load"]  # the module: in its package, the function has that name


@pytest.fixture(autouse=True)
def _no_system_file(tmp_path, monkeypatch):
    monkeypatch.setattr(LOAD, "DEFAULT_CONFIG_FILE", tmp_path / "etc" / "indexd.toml")


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(flags=None, file=None, environ=None, error=UsageError) -> IndexdError:
    """The error of a load that must fail, after a look that it is one printable line."""
    with pytest.raises(error) as caught:
        load(flags or {}, file, HOME | (environ or {}))
    assert str(caught.value).isprintable()
    assert caught.value.line().isprintable()
    return caught.value


# --- which source wins


def test_each_source_gives_way_to_the_stronger_one(tmp_path):
    broker = write(tmp_path / "broker.conf", "storePathRootDir=/b\nmaxIndexNum = 11\nmaxHashSlotNum=12\n")
    toml = write(tmp_path / "i.toml", f'[index]\nindex_num = 21\nflavour = "4.7"\n[store]\nbroker_conf = "{broker}"\n')
    environ = HOME | {"INDEXD_INDEX_NUM": "31", "INDEXD_QUEUE_ROWS": "5_000", "INDEXD_CONFIG": "/nowhere"}

    made = load({"index_num": "41", "queue_rows": None}, toml, environ)
    assert made.index == IndexConfig(flavour="4.7", hash_slot_num=12, index_num=41)
    assert made.queue.queue_rows == 5000
    assert made.store.store == Path("/b")
    assert load({}, toml, environ).index.index_num == 31
    assert load({}, toml, HOME).index.index_num == 21
    assert load({"broker_conf": str(broker)}, None, HOME).index.index_num == 11
    assert load({}, None, HOME).index.index_num == 20_000_000


def test_every_value_knows_where_it_came_from(tmp_path):
    broker = write(tmp_path / "broker.conf", "# mine\nmaxHashSlotNum=12\n")
    toml = write(tmp_path / "i.toml", f"""[store]\nbroker_conf = '{broker}'\n\n[query]\n"query_max_num"=9\n""")
    made = load({"flavour": "4.0"}, toml, HOME | {"INDEXD_LOG_LEVEL": "debug"})
    assert list(made.provenance) == list(KEYS)
    assert made.provenance["flavour"] == "--flavour"
    assert made.provenance["log_level"] == "environment INDEXD_LOG_LEVEL"
    assert made.provenance["query_max_num"] == f"{toml} line 5"
    assert made.provenance["hash_slot_num"] == f"{broker} line 2, maxHashSlotNum"
    assert made.provenance["segment_size"] == DEFAULT
    assert made.provenance["data"] == "default (home directory)"


def test_a_stronger_source_stands_in_for_a_broken_value(tmp_path):
    broker = write(tmp_path / "b.conf", "storePathRootDir=${user.home}/store\nmaxIndexNum=many\n")
    toml = write(tmp_path / "i.toml", '[log]\nlog_level = "loud"\n')
    flags = {"broker_conf": str(broker), "store": "/s", "index_num": "5", "log_level": "info"}
    assert load(flags, toml, HOME).store.store == Path("/s")


def test_config_file_from_the_environment_and_from_etc(tmp_path, monkeypatch):
    named = write(tmp_path / "named.toml", "[index]\nindex_num = 7\n")
    assert load({}, None, HOME | {"INDEXD_CONFIG": str(named)}).index.index_num == 7
    standard = write(tmp_path / "standard.toml", "[index]\nindex_num = 8\n")
    monkeypatch.setattr(LOAD, "DEFAULT_CONFIG_FILE", standard)
    assert load({}, None, HOME).index.index_num == 8
    assert load({}, named, HOME).index.index_num == 7
    standard.unlink()
    standard.symlink_to(tmp_path / "gone")
    assert "No such file" in str(refused()), "a link to nothing is a mistake, not an absence"


def test_data_directory_follows_systemd_then_xdg_then_home():
    def data(environ):
        made = load({}, None, environ)
        return str(made.store.data), made.provenance["data"]

    everything = HOME | {"XDG_STATE_HOME": "/x", "STATE_DIRECTORY": "/var/lib/indexd:/var/lib/other"}
    assert data(everything) == ("/var/lib/indexd", "default ($STATE_DIRECTORY)")
    assert data(HOME | {"XDG_STATE_HOME": "/x"}) == ("/x/indexd", "default ($XDG_STATE_HOME)")
    assert data(HOME | {"XDG_STATE_HOME": "relative"}) == ("/home/op/.local/state/indexd", "default (home directory)")
    assert state_directory({}).is_absolute()


def test_no_home_at_all_is_a_usage_error(monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(UsageError, match="no home"):
        load({}, None, {})
    assert load({"data": "/d"}, None, {}).store.data == Path("/d")


# --- what a wrong value looks like


def test_the_line_names_key_value_source_and_what_is_allowed(tmp_path):
    error = refused(environ={"INDEXD_FLAVOUR": "6.0"})
    assert str(error) == 'flavour = "6.0" (from environment INDEXD_FLAVOUR) is not one of 3.x, 4.0, 4.7, 5.4'
    assert error.exit_code == 2
    toml = write(tmp_path / "i.toml", "[reader]\n\nread_bytes = 5\n")
    assert str(refused(file=toml)) == f"read_bytes = 5 (from {toml} line 3) is not in 64KiB to 1GiB"
    broker = write(tmp_path / "b.conf", "maxIndexNum=1\n")
    assert str(refused({"broker_conf": str(broker)})) == (
        f"index_num = 1 (from {broker} line 1, maxIndexNum) is not in 2 to 2147483647"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("segment_size", "", "is not a size"),
        ("segment_size", "1023", "is not in 1KiB to 2147483647"),
        ("segment_size", "-1GiB", "is not in"),
        ("segment_size", "1e999", "is not a size"),
        ("segment_size", "9" * 5000, "is not a size"),
        ("segment_size", "1 GiB\0", "is not a size"),
        ("segment_size", "0.3", "is not a size"),
        ("settle_ms", "0", "is not in 1 to 600000"),
        ("settle_ms", "0.5ms", "is not a duration"),
        ("drain_interval", "1e999", "is not a duration"),
        ("drain_interval", "nan", "is not a duration"),
        ("drain_interval", "-3", "is not in 0.001 to 3600"),
        ("queue_rows", "5.0", "is not a whole number"),
        ("queue_rows", "4MiB", "is not a whole number"),
        ("index_num", "1", "is not in 2 to"),
        ("index_num", str(2**31), "is not in 2 to"),
        ("verify_crc", "yes", "is not true or false"),
        ("run_mode", "", "is not one of shadow, offload"),
        ("log_level", "INFO", "is not one of debug"),
        ("message_delay_level", "1s 5x", 'delay levels: "5x" is not'),
        ("message_delay_level", "", "delay levels: write 1 to 1024"),
        ("message_delay_level", "999999999999999d", "delay levels: write"),
        ("store", "", "is empty"),
        ("store", "/a\0b", "holds a NUL"),
        ("store", "/a\ud800", "characters that no file name"),
        ("data", "~/data", "is not expanded"),
        ("commit_log_paths", "/a,,/b", "is empty"),
        ("broker_conf", "\n", "is empty"),
        ("flavour", "x" * 1000, "..."),
    ],
)
def test_hostile_text_is_refused(key, value, expected):
    for error, source in (
        (refused({key: value}), flag_name(key)),
        (refused(environ={env_name(key): value}), f"environment {env_name(key)}"),
    ):
        assert str(error).startswith(f"{key} = ")
        assert f"(from {source})" in str(error)
        assert expected in str(error)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hash_slot_num = true", "hash_slot_num = true (from"),
        ("hash_slot_num = 5.0", "is not a whole number"),
        ("hash_slot_num = 0x" + "f" * 9000, "(a int too long to print)"),
        ("hash_slot_num = [0x" + "f" * 9000 + "]", "(a list too long to print)"),
        ("hash_slot_num = 1979-05-27T07:32:00Z", "is not a whole number"),
        ("flavour = 5.5", "flavour = 5.5 (from"),
        ("flavour = true", "is not one of"),
        ("flavour = {a = 1}", "is not one of"),
    ],
)
def test_toml_of_another_type_is_refused(tmp_path, line, expected):
    assert expected in str(refused(file=write(tmp_path / "i.toml", f"[index]\n{line}\n")))


def test_toml_values_in_their_own_types(tmp_path):
    text = '[index]\nflavour = 4.7\n[reader]\nverify_crc = true\nsettle_ms = "0.1s"\n[queue]\ndrain_interval = 1\n'
    text += '[store]\ncommit_log_paths = ["/a", "/b"]\nread_only_commit_log_paths = "/c, /d"\n'
    made = load({}, write(tmp_path / "i.toml", "\ufeff" + text.replace("\n", "\r\n")), HOME)
    assert made.index.flavour == "4.7"
    assert made.reader.verify_crc is True
    assert made.reader.settle_ms == 100
    assert made.queue.drain_interval == 1.0
    assert made.store.commit_log_directories == (Path("/a"), Path("/b"), Path("/c"), Path("/d"))


def test_keys_that_contradict_each_other_are_all_named():
    error = refused({"poll_min_ms": "100"})
    assert str(error) == (
        'poll_min_ms = "100" (from --poll-min-ms) and poll_max_ms = 50 (default): '
        "poll_min_ms must not be more than poll_max_ms"
    )
    assert "settle_ms must not be more than corrupt_after_ms" in str(refused({"corrupt_after_ms": "10"}))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[index]\nhash_slots_num = 1\n", 'unknown key "hash_slots_num" (from FILE line 2, [index])', "hash_slot_num?"),
        ("[indx]\na = 1\n", 'unknown table "indx" (from FILE line 1)', "did you mean index?"),
        ("[zzz]\na = 1\n", 'unknown table "zzz" (from FILE line 1)', "there are store, reader"),
        ("[store]\nindex_num = 3\n", "index_num (from FILE line 2) is under [store]", "move it to [index]"),
        ("index_num = 3\n", "index_num (from FILE line 1) is in no table", "put it under [index]"),
        ("index = 3\n", "index = 3 (from FILE line 1) is not a table", None),
        ("[index]\n[[store]]\n", "store = [{}] (from FILE) is not a table", None),
        ("[index\n", "FILE line 1, column 7: Expected ']'", "not TOML"),
        ("[index]\nindex_num = \n", "FILE line 2, column 13: Invalid value", "not TOML"),
        ("[index]\nflavour = 'a", "FILE line 2", "not TOML"),
        ("[a]\nb = 1\nb = 2\n", "FILE line 3", "not TOML"),
        ("a = 1" * 9000, "FILE line 1", "not TOML"),
        ("a = " + "9" * 9000, "FILE: ", "not TOML"),
        ("a = " + "[" * 90_000, "FILE: tables or lists are nested too deeply", None),
        (b"[store]\nstore = '\xff'\n", "FILE line 2 is not UTF-8", "TOML"),
        ("brokerName = broker-a\n", "FILE line 1", "--broker-conf"),
        ("# c\nlistenPort=10911\n", 'unknown table "listenPort" (from FILE line 2)', "--broker-conf"),
        ("#" * (2**20 + 1), "FILE (from -c) is larger than 1 MiB", None),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path, text, message, hint):
    file = write(tmp_path / "i.toml", text)
    error = refused(file=file)
    assert message.replace("FILE", str(file)) in str(error)
    assert hint is None or hint in error.hint


def test_files_that_cannot_be_read(tmp_path):
    gone = tmp_path / "gone.toml"
    assert str(refused(file=gone)) == f"cannot read {gone} (from -c): No such file or directory"
    assert "(from environment INDEXD_CONFIG): Is a directory" in str(refused(environ={"INDEXD_CONFIG": str(tmp_path)}))
    assert 'config = "" (from environment INDEXD_CONFIG) is empty' in str(refused(environ={"INDEXD_CONFIG": ""}))
    assert "larger than 1 MiB" in str(refused(file=Path("/dev/zero")))
    assert f"cannot read {gone} (from --broker-conf)" in str(refused({"broker_conf": str(gone)}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path):
    file = write(tmp_path / "i.toml", "")
    file.chmod(0)
    assert "Permission denied" in str(refused(file=file))


def test_unknown_names_get_the_nearest_one():
    error = refused(environ={"INDEXD_FLAVOR": "5.4"})
    assert str(error) == "unknown environment variable INDEXD_FLAVOR"
    assert error.hint == "did you mean INDEXD_FLAVOUR?"
    assert "INDEXD_CONFIG?" in refused(environ={"INDEXD_CONFIGS": ""}).hint
    assert "indexd --help" in refused(environ={"INDEXD_": ""}).hint
    assert refused({"hash_slots": "1"}).hint == "did you mean hash_slot_num?"
    assert load({}, None, HOME | {"indexd_x": "", "INDEX": "1"}).index.index_num == 20_000_000


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


# --- units and models


@pytest.mark.parametrize(
    ("parse", "value", "expected"),
    [
        (parse_size, 7, 7),
        (parse_size, "1GiB", 2**30),
        (parse_size, " 1.5 kib ", 1536),
        (parse_size, "100MB", 100_000_000),
        (parse_size, "64B", 64),
        (parse_size, "-1", -1),
        (parse_millis, "50ms", 50),
        (parse_millis, "1.001s", 1001),
        (parse_millis, "2M", 120_000),
        (parse_seconds, "500ms", 0.5),
        (parse_seconds, "0.1", 0.1),
        (parse_seconds, 3, 3.0),
        (parse_seconds, "2m", 120.0),
        (parse_count, "5_000_000", 5_000_000),
        (parse_flag, "TRUE", True),
        (parse_paths, "/a, /b", (Path("/a"), Path("/b"))),
        (parse_paths, [], ()),
    ],
)
def test_units(parse, value, expected):
    assert parse(value) == expected
    assert type(parse(value)) is type(expected)


@pytest.mark.parametrize("parse", [parse_size, parse_millis, parse_seconds, parse_count, parse_flag, parse_path])
@pytest.mark.parametrize(
    "value", [None, b"1", [], {}, 1j, float("nan"), float("inf"), "", "\0", "1\0", "٣", "1e9", "--1"]
)
def test_units_refuse_with_a_text_and_nothing_else(parse, value):
    if parse is parse_path and value in ("٣", "1e9", "--1"):
        return
    with pytest.raises(ValueError, match=r"^is "):
        parse(value)


@given(st.integers(min_value=0, max_value=2**62))
def test_a_size_survives_being_shown(value):
    assert parse_size(show_size(value)) == value


@given(st.text())
def test_shown_text_is_one_printable_line(text):
    assert shown(text).isprintable()


def test_delay_levels():
    assert StoreConfig(data="/d").delay_levels_ms[:3] == (1000, 5000, 10_000)
    assert len(StoreConfig(data="/d").delay_levels_ms) == 18
    assert parse_delay_levels("0s 1d") == (0, 86_400_000)


def test_models_are_frozen_closed_and_complete():
    made = Config()
    with pytest.raises(ValidationError):
        made.index.index_num = 3
    with pytest.raises(ValidationError):
        ReaderConfig(settle=1)
    with pytest.raises(ValidationError):
        ReaderConfig(poll_min_ms=60, poll_max_ms=50)
    assert made.provenance == {}
    assert StoreConfig(store="/s", data="/d").commit_log_directories == (Path("/s/commitlog"),)
    assert StoreConfig(data="/d").commit_log_directories == ()
    assert "\n" not in repr(made)
    largest = 40 + 4 * (2**31 - 1) + 20 * (2**31 - 1)
    assert largest <= 2**40, "the bounds of the two keys bound the file, too"


def test_keys_describe_every_field():
    models = [getattr(Config(), section) for section in SECTIONS]
    assert list(KEYS) == [key for model in models for key in type(model).model_fields]
    for key, info in KEYS.items():
        assert info.default, key
        assert re.search(r"[;:] .+$", info.description), f"{key} names no unit"
        assert info.is_bool == (info.type == "true|false")
        assert hasattr(getattr(Config(), info.section), key)
    assert KEYS["flavour"].type.split("|") == list(get_args(Flavour))
    assert [key for key, info in KEYS.items() if info.is_bool] == ["verify_crc"]
    assert (KEYS["queue_bytes"].default, KEYS["queue_bytes"].bounds) == ("64MiB", "64KiB to 1TiB")


# --- the shipped file


def test_the_shipped_file_changes_nothing():
    made, bare = load({}, SHIPPED, HOME), load({}, None, HOME)
    assert made == bare
    assert set(tomllib.loads(SHIPPED.read_text())) == set(SECTIONS)


def test_the_shipped_file_documents_every_key_with_its_default():
    section, comment, found = "", [], []
    for line in SHIPPED.read_text().splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif entry := re.fullmatch(r"# (\w+) = (.*)", line):
            key, value = entry[1], tomllib.loads(line[2:])[entry[1]]
            found.append(key)
            text = "\n".join(comment)
            assert KEYS[key].section == section
            for part in ("# Unit: ", " Default: ", "# Why: "):
                assert part in text, f"{key}: no {part.strip('# ')}"
            if KEYS[key].bounds:
                assert KEYS[key].bounds in text, key
            if key not in ("store", "data", "broker_conf"):  # these have no default that could be written down
                default = load({}, None, HOME)
                model = type(getattr(default, section))
                made = model.model_validate({key: value, **({"data": "/d"} if section == "store" else {})})
                assert getattr(made, key) == getattr(getattr(default, section), key), key
        comment = [*comment, line] if line.startswith("#") else []
    assert found == list(KEYS)


# --- whatever comes


VALUES = st.one_of(
    st.text(max_size=30),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.sampled_from(["1GiB", "5s", "5.4", "offload", "/a,/b", "1e999", "${user.home}", "~", "0", "-1", "\0", "1s 2h"]),
)


def load_or_refuse(flags, file, environ) -> Config | None:
    try:
        return load(flags, file, environ)
    except IndexdError as error:
        text = str(error)
    assert text.isprintable()
    return None


def toml_value(value: object) -> str:
    if isinstance(value, str):
        plain = value.encode("utf-8", "replace").decode()
        return '"' + "".join(f"\\U{ord(c):08x}" for c in plain) + '"'
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.dictionaries(st.sampled_from(list(KEYS)), VALUES, max_size=6),
    st.dictionaries(st.sampled_from(list(KEYS)), st.text(max_size=20), max_size=3),
)
@example({"flavour": 4.0, "broker_conf": "/dev/null"}, {})
@example({"index_num": 2**40000}, {})
def test_no_value_leads_to_anything_but_our_errors(tmp_path, values, environ):
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for key, value in values.items():
            if KEYS[key].section == section:
                number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
                lines.append(f"{key} = {hex(value) if number else toml_value(value)}")
    file = write(tmp_path / "any.toml", "\n".join(lines))
    made = load_or_refuse({}, file, HOME | {env_name(key): value for key, value in environ.items()})
    assert made is None or set(made.provenance) == set(KEYS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='[]=:\\"\n#u0aK. ', max_size=60).map(str.encode))
def test_no_file_leads_to_anything_but_our_errors(tmp_path, data):
    file = write(tmp_path / "any", data)
    load_or_refuse({}, file, HOME)
    load_or_refuse({"broker_conf": str(file)}, None, HOME)


def test_importing_it_stays_cheap():
    heavy = ("numpy", "numba", "structlog", "pydantic_settings", "asyncio", "pyspark")
    code = f"import sys, indexd.config; print([name for name in {heavy!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
