"""Settings: which source wins, the shipped file, broker.conf; values with units, what is refused, and how."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from indexd.cli.output import common_options, given_flags
from indexd.config import (
    KEYS,
    OFF,
    SECTIONS,
    Config,
    HttpConfig,
    IndexConfig,
    LimitsConfig,
    MqttConfig,
    NodeConfig,
    ReaderConfig,
    StoreConfig,
    env_name,
    flag_name,
    load,
    parse_millis,
    parse_seconds,
    parse_size,
    show_size,
)
from indexd.config import split_address as split
from indexd.config.load import DEFAULT, parse_properties
from indexd.config.model import Flavour, state_directory
from indexd.config.serving import parse_address
from indexd.config.units import listed, parse_count, parse_flag, parse_path, parse_ratio, shown
from indexd.errors import IndexdError, UnsafeStoreError, UsageError
from support.configs import HOME, LOAD, SHIPPED, no_system_file, refused, write

__all__ = ["no_system_file"]


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
    assert made.provenance["query_max_num"] == str(toml)
    assert made.provenance["hash_slot_num"] == f"{broker} line 2, maxHashSlotNum"
    assert made.provenance["segment_size"] == made.provenance["data"] == DEFAULT


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
    everything = HOME | {"XDG_STATE_HOME": "/x", "STATE_DIRECTORY": "/var/lib/indexd:/var/lib/other"}
    for environ, expected in (
        (everything, "/var/lib/indexd"),
        (HOME | {"XDG_STATE_HOME": "/x"}, "/x/indexd"),
        (HOME | {"XDG_STATE_HOME": "relative"}, "/home/op/.local/state/indexd"),
    ):
        assert str(load({}, None, environ).store.data) == expected
    assert state_directory({}).is_absolute()


def test_no_home_at_all_is_a_usage_error(monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(UsageError, match="no home"):
        load({}, None, {})
    assert load({"data": "/d"}, None, {}).store.data == Path("/d")


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
            if "|" in KEYS[key].type:
                assert all(word in text for word in KEYS[key].type.split("|")), key
            default = load({}, None, HOME)
            # Without a default that could be written down: what is not set, and the directory of whoever runs it.
            if key != "data" and getattr(getattr(default, section), key) is not None:
                model = type(getattr(default, section))
                made = model.model_validate({key: value, **({"data": "/d"} if section == "store" else {})})
                assert getattr(made, key) == getattr(getattr(default, section), key), key
        comment = [*comment, line] if line.startswith("#") else []
    assert found == list(KEYS)


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
    assert {key: value for key, (value, _) in parse_properties(text).items()} == expected


def test_properties_know_their_lines_and_refuse_what_java_refuses():
    assert {key: line for key, (_, line) in parse_properties("\n# x\na=1\\\n2\nb=3\ra=4").items()} == {"a": 6, "b": 5}
    for text in ("a=1\nb=\\u00g0", "\n\\u12=1", "\nb=\\u"):
        with pytest.raises(ValueError, match="line 2: "):
            parse_properties(text)


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
    assert facts.store_type == "defaultRocksDB"
    assert facts.enable_dledger_commit_log
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
        ("listenPort=1 0", 'listenPort = "1 0" (from FILE line 1) is not a whole number of 32 bits'),
        ("storePathRootDir=${a}/b", 'store = "${a}/b" (from FILE line 1, storePathRootDir) is not a path'),
        ("storePathRootDir=", 'store = "" (from FILE line 1, storePathRootDir) is not a path'),
        ("storePathCommitLog=/a,/b\\u0000c", "(from FILE line 1, storePathCommitLog) is not a path"),
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


# --- values ---


def test_the_line_names_key_value_source_and_what_is_allowed(tmp_path):
    error = refused(environ={"INDEXD_FLAVOUR": "6.0"})
    assert str(error) == 'flavour = "6.0" (from environment INDEXD_FLAVOUR) is not one of 3.x, 4.0, 4.7, 5.4'
    assert error.exit_code == 2
    toml = write(tmp_path / "i.toml", "[reader]\n\nread_bytes = 5\n")
    assert str(refused(file=toml)) == f"read_bytes = 5 (from {toml}) is not in 64KiB to 1GiB"
    broker = write(tmp_path / "b.conf", "maxIndexNum=1\n")
    assert str(refused({"broker_conf": str(broker)})) == (
        f"index_num = 1 (from {broker} line 1, maxIndexNum) is not in 2 to 2147483647"
    )


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
        ("[index]\nhash_slots_num = 1\n", 'unknown key "hash_slots_num" (from FILE, [index])', "hash_slot_num?"),
        ("[indx]\na = 1\n", '"indx" (from FILE) is no table of settings', "did you mean index?"),
        ("[store]\nindex_num = 3\n", "index_num (from FILE) is under [store]", "move it to [index]"),
        ("index_num = 3\n", '"index_num" (from FILE) is no table', "put it under [index]"),
        ("[index]\n[[store]]\n", '"store" (from FILE) is no table', None),
        ("[index\n", "FILE is not TOML: Expected ']' at the end of a table declaration (at line 1, column 7)", "TOML"),
        ("[a]\nb = 1\nb = 2\n", "at line 3", "TOML"),
        ("a = " + "9" * 9000, "FILE is not TOML", "TOML"),
        ("a = " + "[" * 90_000, "FILE is not TOML", None),
        (b"[store]\nstore = '\xff'\n", "FILE is not TOML", "TOML"),
        ("brokerName = broker-a\n", "FILE is not TOML", "--broker-conf"),
        ("#" * (2**20 + 1), "FILE (from -c) is no file of up to 1 MiB", None),
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
    os.mkfifo(tmp_path / "pipe")
    assert "pipe (from environment INDEXD_CONFIG) is no file of up to 1 MiB" in str(
        refused(environ={"INDEXD_CONFIG": str(tmp_path / "pipe")})
    )
    assert "(from environment INDEXD_CONFIG) is no file" in str(refused(environ={"INDEXD_CONFIG": str(tmp_path)}))
    assert 'config = "" (from environment INDEXD_CONFIG) is not a path' in str(refused(environ={"INDEXD_CONFIG": ""}))
    assert "/dev/zero (from -c) is no file" in str(refused(file=Path("/dev/zero")))
    assert f"cannot read {gone} (from --broker-conf)" in str(refused({"broker_conf": str(gone)}))


def test_a_file_without_permission():
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, whose parents only root may enter
        Path(folder).chmod(0o755)
        file = write(Path(folder) / "i.toml", "")
        file.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root reads everything, nobody does not
        try:
            assert "Permission denied" in str(refused(file=file))
        finally:
            os.seteuid(user)


def test_unknown_names_get_the_nearest_one():
    error = refused(environ={"INDEXD_FLAVOR": "5.4"})
    assert str(error) == "unknown environment variable INDEXD_FLAVOR"
    assert error.hint == "did you mean INDEXD_FLAVOUR?"
    assert "INDEXD_CONFIG?" in refused(environ={"INDEXD_CONFIGS": ""}).hint
    assert "indexd --help-all" in refused(environ={"INDEXD_": ""}).hint
    assert refused({"hash_slots": "1"}).hint == "did you mean hash_slot_num?"
    assert load({}, None, HOME | {"indexd_x": "", "INDEX": "1"}).index.index_num == 20_000_000


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
        (listed(parse_path, "no"), "/a, /b", (Path("/a"), Path("/b"))),
        (listed(parse_path, "no"), [], ()),
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
    assert StoreConfig(data="/d", message_delay_level="0s 1d").delay_levels_ms == (0, 86_400_000)


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
        assert hasattr(getattr(Config(), info.section), key)
    assert KEYS["flavour"].type.split("|") == list(get_args(Flavour))
    assert (KEYS["queue_bytes"].default, KEYS["queue_bytes"].bounds) == ("64MiB", "64KiB to 1TiB")


SERVING = ("node", "http", "remoting", "mqtt", "limits")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9577", ("127.0.0.1", 9577)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9577", ("::1", 9577)),
        ("[::]:0", ("::", 0)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("localhost:1", ("localhost", 1)),
        ("broker_a-1.example.org.:80", ("broker_a-1.example.org.", 80)),
    ],
)
def test_an_address_and_its_parts(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == text
    assert split(text) == expected
    assert load({"http": text}, None, HOME).http.http == text
    assert load({}, None, HOME | {"INDEXD_HTTP": text}).http.http == text


HOSTILE = (
    *("", ":", ":80", "host", "host:", "host:65536", "host:080", "host:+1", "host:-1", "host:１", "host:1:2", "::1:80"),
    *("[::1]", "[::1", "::1]:80", "[]:80", "[::1]x:80", "x[::1]:80", "[1.2.3.4]:80", "[v1.a]:80", "[::1%]:80"),
    *("http://host:80", "user@host:80", "host:80/x", "host:80?x", "host?:80", "host#:80", " host:80", "host :80"),
    *("host:80\n", "ho\0st:80", "ho\ud800st:80", "*:80", "höst:80", "a..b:80", "." * 9 + ":80", "x" * 64 + ":80"),
    *("x." * 140 + "x:80", "1" * 5000, "host:" + "9" * 5000, "OFF"),
)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_is_no_address_is_refused_with_its_source(text: str) -> None:
    for key, says in (("http", "or off"), ("broker_address", "10.0.0.1:10911")):
        for error, source in (
            (refused({key: text}), flag_name(key)),
            (refused(environ={env_name(key): text}), f"environment {env_name(key)}"),
        ):
            assert str(error).startswith(f"{key} = ")
            assert f"(from {source}) is not HOST:PORT" in str(error)
            assert says in str(error)


@given(st.text(max_size=30) | st.from_regex(r"\[?[0-9a-z:.%\-]*\]?:[0-9]{0,6}", fullmatch=True))
@example("a" * 63 + ":1")
def test_a_text_that_is_taken_can_be_looked_up_or_is_unknown(text: str) -> None:
    try:
        host, port = split(parse_address(text))
    except ValueError as error:
        assert str(error).startswith("is not HOST:PORT")  # noqa: PT017 - either of two ends is right
        return
    try:  # without asking anybody: whatever else it is, it is no UnicodeError
        socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST)
    except OSError as error:
        assert isinstance(error, socket.gaierror)  # noqa: PT017 - a name is none here


def test_http_can_be_off_and_a_broker_has_a_port() -> None:
    assert load({"http": OFF}, None, HOME).http.http == OFF
    assert load({}, None, HOME).http.http == "127.0.0.1:9577"
    assert load({}, None, HOME).node.broker_address is None
    assert load({"broker_address": "[::1]:10911"}, None, HOME).node.broker_address == "[::1]:10911"
    assert "is not HOST:PORT" in str(refused({"broker_address": "127.0.0.1:0"}))
    assert "is not HOST:PORT" in str(refused({"broker_address": OFF}))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("mqtt_host", "mqtt.example.org", "mqtt.example.org"),
        ("mqtt_host", "10.0.0.1", "10.0.0.1"),
        ("mqtt_host", "fe80::1%eth0", "fe80::1%eth0"),
        ("mqtt_topic_prefix", "a/b c/ü", "a/b c/ü"),
        ("mqtt_username", "a b:c", "a b:c"),
        ("mqtt_port", "8_883", 8883),
        ("mqtt_interval", "500ms", 0.5),
        ("mqtt_tls", "TRUE", True),
        ("http_cors_origins", "https://a.example, http://b:81", ("https://a.example", "http://b:81")),
        ("http_cors_origins", "http://[::1]:9577", ("http://[::1]:9577",)),
        ("http_cors_origins", "", ()),
        ("http_body_max", "0", 0),
        ("http_queries_max", "1024", 1024),
        ("cluster", "DefaultCluster", "DefaultCluster"),
        ("node_id", "订单-a/0", "订单-a/0"),
        ("broker_check_interval", "0.1", 0.1),
        ("disk_used_max", "70%", 0.7),
        ("disk_used_max", "0.855", 0.855),
        ("disk_used_max", "1", 1.0),
        ("read_rate_max", "100MB", 100_000_000),
        ("memory_max", "1.5GiB", 3 * 2**29),
        ("drop_cache", "false", False),
    ],
)
def test_values_from_flags_and_environment(key: str, value: str, expected: object) -> None:
    for made, source in (
        (load({key: value}, None, HOME), flag_name(key)),
        (load({}, None, HOME | {env_name(key): value}), f"environment {env_name(key)}"),
    ):
        found = getattr(getattr(made, KEYS[key].section), key)
        assert (found, type(found)) == (expected, type(expected))
        assert made.provenance[key] == source


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
        ("message_delay_level", "1s 5x", "is not a list of delay levels"),
        ("message_delay_level", "", "delay levels: write 1 to 1024"),
        ("message_delay_level", "999999999999999d", "delay levels: write"),
        ("store", "", "is not a path"),
        ("store", "/a\0b", "is not a path"),
        ("data", "~/data", "nothing expands ~"),
        ("commit_log_paths", "/a,,/b", "is not a path"),
        ("broker_conf", "\n", "is not a path"),
        ("mqtt_host", "mqtt.example.org:1883", "is no host: write a name or an address, without a port"),
        ("mqtt_host", "mqtts://mqtt", "is no host"),
        ("mqtt_host", "[::1]", "is no host"),
        ("mqtt_host", "", "is no host"),
        ("mqtt_host", "a b", "is no host"),
        ("mqtt_port", "0", "is not in 1 to 65535"),
        ("mqtt_tls", "yes", "is not true or false"),
        ("mqtt_username", " ", "is not text of one line"),
        ("mqtt_username", "a\nb", "is not text of one line"),
        ("mqtt_ca_file", "~/ca", "nothing expands ~"),
        ("mqtt_topic_prefix", "", "is no beginning of an MQTT topic"),
        ("mqtt_topic_prefix", "a/#", "is no beginning"),
        ("mqtt_topic_prefix", "+/a", "is no beginning"),
        ("mqtt_topic_prefix", "/a", "is no beginning"),
        ("mqtt_topic_prefix", "a/", "is no beginning"),
        ("mqtt_topic_prefix", "a//b", "is no beginning"),
        ("mqtt_topic_prefix", "$SYS/a", "is no beginning"),
        ("mqtt_topic_prefix", "a\0", "is no beginning"),
        ("mqtt_topic_prefix", "a\ud800", "is no beginning"),
        ("mqtt_topic_prefix", "ü" * 513, "is no beginning"),
        ("mqtt_queue_max", "0", "is not in 1 to 1000000"),
        ("mqtt_interval", "0.05", "is not in 0.1 to 3600"),
        ("http_cors_origins", "*", "is not a list of origins"),
        ("http_cors_origins", "https://a/", "is not a list of origins"),
        ("http_cors_origins", "HTTPS://a", "is not a list of origins"),
        ("http_cors_origins", "ops.example", "is not a list of origins"),
        ("http_connections_max", "0", "is not in 1 to 65536"),
        ("http_queries_max", "many", "is not a whole number"),
        ("http_body_max", "-1", "is not in 0 to 1GiB"),
        ("http_token_file", "", "is not a path"),
        ("cluster", "", "is not text of one line"),
        ("node_id", "\t", "is not text of one line"),
        ("broker_check_interval", "0", "is not in 0.1 to 3600"),
        ("disk_used_max", "0", "is not in 0.01 to 1"),
        ("disk_used_max", "70", "is not in 0.01 to 1"),
        ("disk_used_max", "101%", "is not in 0.01 to 1"),
        ("disk_used_max", "70%%", "is not"),
        ("disk_used_max", "nan", "is not"),
        ("disk_used_max", "1e999", "is not"),
        ("read_rate_max", "2TiB", "is not in 0 to 1TiB"),
        ("memory_max", "-1", "is not in 0 to 1TiB"),
        ("drop_cache", "1", "is not true or false"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_source(key: str, value: str, expected: str) -> None:
    for error, source in (
        (refused({key: value}), flag_name(key)),
        (refused(environ={env_name(key): value}), f"environment {env_name(key)}"),
    ):
        assert re.match(rf'{key} = ".*[".] \(from {source}\) ', str(error)), str(error)
        assert expected in str(error)


@pytest.mark.parametrize("value", [None, True, [], {}, b"1", 1j, float("nan"), float("inf"), 2**99, "", "%", "x%"])
def test_what_is_no_part_of_a_whole_is_refused_with_words(value: object) -> None:
    with pytest.raises(ValueError, match=r"^is "):
        parse_ratio(value)


@given(st.integers(min_value=1, max_value=1000))
def test_a_part_can_be_written_in_two_ways(thousandths: int) -> None:
    percent = f"{thousandths // 10}.{thousandths % 10}%"
    assert parse_ratio(percent) == parse_ratio(str(thousandths / 1000)) == thousandths / 1000


def test_toml_gives_them_in_their_own_types_and_names_its_line(tmp_path: Path) -> None:
    text = '[http]\nhttp = "[::1]:0"\nhttp_cors_origins = ["https://a"]\n[limits]\ndisk_used_max = 1\nmemory_max = 5\n'
    made = load({}, write(tmp_path / "i.toml", text), HOME)
    assert made.http == HttpConfig(http="[::1]:0", http_cors_origins=["https://a"])
    assert made.limits == LimitsConfig(disk_used_max=1.0, memory_max=5)
    for line, says in (
        ("http = 9577", "is not HOST:PORT"),
        ("http = false", "is not HOST:PORT"),
        ('http_cors_origins = ["https://a", 1]', "is not a list of origins"),
        ("http_body_max = true", "is not a size"),
    ):
        file = write(tmp_path / "wrong.toml", f"[http]\n{line}\n")
        assert f"(from {file}) {says}" in str(refused(file=file))


def test_what_mqtt_needs_together() -> None:
    assert "authorities vouch with TLS only" in str(refused({"mqtt_ca_file": "/ca"}))
    assert "a password needs a name" in str(refused({"mqtt_password_file": "/p"}))
    made = load(
        {"mqtt_password_file": "/p", "mqtt_username": "u", "mqtt_ca_file": "/c", "mqtt_tls": "true"}, None, HOME
    )
    assert (made.mqtt.mqtt_password_file, made.mqtt.mqtt_ca_file) == (Path("/p"), Path("/c"))


def test_certificate_and_key_come_together() -> None:
    error = refused({"http_tls_cert": "/c"}, environ={})
    assert str(error) == (
        'http_tls_cert = "/c" (from --http-tls-cert) and http_tls_key = not set (default): '
        "TLS needs certificate and key"
    )
    assert "TLS needs" in str(refused(environ={"INDEXD_HTTP_TLS_KEY": "/k"}))
    made = load({"http_tls_cert": "/c"}, None, HOME | {"INDEXD_HTTP_TLS_KEY": "/k"})
    assert (made.http.http_tls_cert, made.http.http_tls_key) == (Path("/c"), Path("/k"))


def test_the_broker_names_cluster_and_node_where_nothing_else_does(tmp_path: Path) -> None:
    broker = write(tmp_path / "b.conf", "brokerClusterName = shop \nbrokerName=broker-a\nbrokerId=0\n")
    flags: dict[str, str | list[str] | None] = {"broker_conf": str(broker)}
    made = load(flags, None, HOME)
    assert made.node == NodeConfig(cluster="shop", node_id="broker-a")
    assert made.provenance["cluster"] == f"{broker} line 1, brokerClusterName"
    assert made.provenance["node_id"] == f"{broker} line 2, brokerName"
    made = load(flags | {"cluster": "mine"}, None, HOME | {"INDEXD_NODE_ID": "b"})
    assert made.node == NodeConfig(cluster="mine", node_id="b")
    assert load({}, None, HOME).node == NodeConfig()
    write(broker, "brokerName=\n")
    assert f'node_id = "" (from {broker} line 1, brokerName) is not' in str(refused({"broker_conf": str(broker)}))
    assert load(flags | {"node_id": "a"}, None, HOME).node.node_id == "a"


def test_the_examples_of_the_shipped_file_hold_together(tmp_path: Path) -> None:
    sections = re.split(r"(?m)^(?=\[)", SHIPPED.read_text("utf-8"))
    mine = [part for part in sections if part.startswith(tuple(f"[{name}]" for name in SERVING))]
    assert len(mine) == len(SERVING)
    text = re.sub(r"(?m)^# (\w+ = )", r"\1", "".join(mine))
    for key in ("mqtt_tls", "upstream_tls"):  # the examples of authorities need them
        text = text.replace(f"{key} = false", f"{key} = true")
    made = load({}, write(tmp_path / "i.toml", text), HOME)
    for key, info in KEYS.items():
        assert (made.provenance[key] != "default") == (info.section in SERVING), key
    assert made.mqtt == MqttConfig(
        mqtt_host="mqtt.example.org",
        mqtt_tls=True,
        mqtt_ca_file="/etc/indexd/mqtt-ca.crt",
        mqtt_username="indexd",
        mqtt_password_file="/etc/indexd/mqtt-password",
    )


def test_every_key_is_a_flag_of_every_command() -> None:
    keys = [key for key, info in KEYS.items() if info.section in SERVING]
    args = common_options().parse_args([word for key in keys for word in (flag_name(key), f"<{key}>")])
    assert {key: text for key, text in given_flags(args).items() if text is not None} == {k: f"<{k}>" for k in keys}
    assert "--http HOST:PORT|off" in common_options().format_help()


def test_what_the_remoting_protocol_cannot_be_given() -> None:
    assert "127.0.0.1:10976, [::1]:10976" in str(refused({"remoting": "10976"}))
    assert "127.0.0.1:9577, [::1]:9577" in str(refused({"http": "10976"}))
    for address in ("0.0.0.0:10976", "[::]:10976", "[::ffff:0.0.0.0]:1", "0:10976"):
        assert "not where clients reach it" in str(refused({"remoting_advertise": address}))
    assert load({"remoting_advertise": "10.0.0.7:10976"}, None, HOME).remoting.remoting_advertise == "10.0.0.7:10976"


@pytest.mark.parametrize(
    ("remoting", "upstream", "is_same"),
    [
        ("127.0.0.1:10976", "127.0.0.1:10976", True),
        ("127.0.0.1:10976", "10.0.0.1:9876;127.0.0.1:10976", True),
        ("127.0.0.1:10976", "127.0.0.1:9876", False),
        ("127.0.0.1:10976", "10.0.0.1:10976", False),
        ("0.0.0.0:10976", "10.0.0.1:10976", False),
        (OFF, "127.0.0.1:10976", False),
    ],
)
def test_the_daemon_does_not_stand_in_front_of_itself(remoting: str, upstream: str, is_same: bool) -> None:
    given = {"remoting": remoting, "upstream_namesrv": upstream}
    if is_same:
        assert "cannot stand in front of itself" in str(refused(given))
    else:
        assert load(given, None, HOME).remoting.remoting == remoting
