"""Settings: which source wins, the shipped file, broker.conf, files and names that cannot be taken."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from indexd.cli.output import common_options
from indexd.config import (
    KEYS,
    SECTIONS,
    BrokerFacts,
    Config,
    IndexConfig,
    NodeConfig,
    env_name,
    flag_name,
    load,
)
from indexd.config.load import DEFAULT, parse_properties
from indexd.config.model import state_directory
from indexd.errors import IndexdError, UnsafeStoreError, UsageError
from support.configs import HOME, LOAD, SHIPPED, no_system_file, refused, write

__all__ = ["no_system_file"]


def test_each_source_gives_way_to_the_stronger_one(tmp_path):
    broker = write(tmp_path / "broker.conf", "storePathRootDir=/b\nmaxIndexNum = 11\nmaxHashSlotNum=12\n")
    toml = write(tmp_path / "i.toml", f'[index]\nindex_num = 21\nflavour = "4.7"\n[store]\nbroker_conf = "{broker}"\n')
    environ = HOME | {"INDEXD_INDEX_NUM": "31", "INDEXD_QUEUE_ROWS": "5_000", "INDEXD_CONFIG": "/nowhere"}
    made = load({"index_num": "41", "queue_rows": None}, toml, environ)
    assert made.index == IndexConfig(flavour="4.7", hash_slot_num=12, index_num=41)
    assert (made.queue.queue_rows, made.store.store) == (5000, Path("/b"))
    for (flags, file, names), index_num, source in (
        (({"index_num": "41"}, toml, environ), 41, "--index-num"),
        (({}, toml, environ), 31, "environment INDEXD_INDEX_NUM"),
        (({}, toml, HOME), 21, str(toml)),
        (({"broker_conf": str(broker)}, None, HOME), 11, f"{broker} line 2, maxIndexNum"),
        (({}, None, HOME), 20_000_000, DEFAULT),
    ):
        made = load(flags, file, names)
        assert (made.index.index_num, made.provenance["index_num"]) == (index_num, source)
        assert (list(made.provenance), made.provenance["data"]) == (list(KEYS), DEFAULT)


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


def test_data_directory_follows_systemd_then_xdg_then_home(monkeypatch):
    for environ, expected in (
        ({"XDG_STATE_HOME": "/x", "STATE_DIRECTORY": "/var/lib/indexd:/var/lib/other"}, "/var/lib/indexd"),
        ({"XDG_STATE_HOME": "/x"}, "/x/indexd"),
        ({"XDG_STATE_HOME": "relative"}, "/home/op/.local/state/indexd"),
    ):
        assert str(load({}, None, HOME | environ).store.data) == expected
    assert state_directory({}).is_absolute()
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(UsageError, match="no home"):
        load({}, None, {})
    assert load({"data": "/d"}, None, {}).store.data == Path("/d")


def test_the_shipped_file_changes_nothing_and_documents_every_key_with_its_default():
    default, text, found = load({}, None, HOME), SHIPPED.read_text("utf-8"), []
    assert load({}, SHIPPED, HOME) == default
    assert set(tomllib.loads(text)) == set(SECTIONS)
    for section, body in re.findall(r"(?ms)^\[(\w+)\]\n(.*?)(?=^\[|\Z)", text):
        for paragraph in body.strip().split("\n\n"):
            comment, _, setting = paragraph.rpartition("\n")
            ((key, value),) = tomllib.loads(setting.removeprefix("# ")).items()
            found.append(key)
            info, known = KEYS[key], getattr(getattr(default, section), key)
            home = {"data": "/d"} if section == "store" else {}
            words = info.type.split("|") if "|" in info.type else []
            parts = ["# Unit: ", " Default: ", "# Why: ", info.bounds, *words]
            assert (info.section, [part for part in parts if part not in comment]) == (section, []), key
            # Without a default that could be written down: what is not set, and the directory of whoever runs it.
            if key != "data" and known is not None:
                made = type(getattr(default, section)).model_validate(home | {key: value})
                assert getattr(made, key) == known, key
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
    return hex(value) if isinstance(value, int) and value >= 0 else repr(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.dictionaries(st.sampled_from(list(KEYS)), VALUES, max_size=6),
    st.dictionaries(st.sampled_from(list(KEYS)), st.text(max_size=20), max_size=3),
)
@example({"flavour": 4.0, "broker_conf": "/dev/null"}, {})
@example({"index_num": 2**40000}, {})
def test_no_value_leads_to_anything_but_our_errors(tmp_path, values, environ):
    lines = [f"{KEYS[key].section}.{key} = {toml_value(value)}\n" for key, value in values.items()]
    file = write(tmp_path / "any.toml", "".join(lines))
    made = load_or_refuse({}, file, HOME | {env_name(key): value for key, value in environ.items()})
    assert made is None or set(made.provenance) == set(KEYS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='[]=:\\"\n#u0aK. ', max_size=60).map(str.encode))
def test_no_file_leads_to_anything_but_our_errors(tmp_path, data):
    file = write(tmp_path / "any", data)
    load_or_refuse({}, file, HOME)
    load_or_refuse({"broker_conf": str(file)}, None, HOME)


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
    return load({"broker_conf": str(write(tmp_path / "broker.conf", text)), **flags}, None, HOME)


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
        storePathIndex=${user.home}/x
    """
    made = broker_conf(tmp_path, text)
    logs = ("/d1/commitlog", "/d2/commitlog", "/d3/commitlog")
    assert (made.store.store, made.store.commit_log_directories) == (Path("/data/store"), tuple(map(Path, logs)))
    assert (made.store.segment_size, made.store.consume_queue_file_size) == (65536, 40)
    assert (made.index.hash_slot_num, made.index.index_num) == (100, 400)
    assert made.store.delay_levels_ms == (1000, 120_000, 10_800_000, 345_600_000)
    assert (made.query.max_msgs_num_batch, made.query.default_query_max_num) == (65, 33)
    assert made.reader.max_message_size == 65535
    assert made.broker == BrokerFacts(
        messageIndexEnable="false",
        indexFileWriteEnable="false",
        storeType="defaultRocksDB",
        enableDLegerCommitLog="true",
    )


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


def test_the_old_spelling_counts_where_the_broker_reads_it(tmp_path):
    old = "mapedFileSizeCommitLog=65536\n"
    assert broker_conf(tmp_path, old).store.segment_size == 2**30
    made = broker_conf(tmp_path, old, flavour="4.0")
    assert made.store.segment_size == 65536
    assert made.provenance["segment_size"].endswith("broker.conf line 1, mappedFileSizeCommitLog")
    assert broker_conf(tmp_path, old + "mappedFileSizeCommitLog=4096", flavour="3.x").store.segment_size == 4096


@pytest.mark.parametrize(
    ("text", "flavour", "key"),
    [
        ("", "5.4", "indexFileWriteEnable"),
        ("messageIndexEnable=true\nindexFileWriteEnable=true", "5.4", "indexFileWriteEnable"),
        ("indexFileWriteEnable=false", "4.7", "messageIndexEnable"),
        ("messageIndexEnable=false", "5.4", None),
        ("indexFileWriteEnable=false", "5.4", None),
        ("messageIndexEnable=false", "4.0", None),
    ],
)
def test_offload_wants_proof_that_the_broker_does_not_index(tmp_path, text, flavour, key):
    file = write(tmp_path / "broker.conf", text)
    flags = {"run_mode": "offload", "broker_conf": str(file), "flavour": flavour}
    if key is None:
        assert load(flags, None, HOME).store.run_mode == "offload"
    else:
        line = refused(flags, error=UnsafeStoreError).line()
        assert f"{key} is true in {file}; set {key}=false" in line
    assert "--broker-conf" in refused({"run_mode": "offload"}, error=UnsafeStoreError).hint


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
    gone, pipe = tmp_path / "gone.toml", tmp_path / "pipe"
    os.mkfifo(pipe)
    assert str(refused(file=gone)) == f"cannot read {gone} (from -c): No such file or directory"
    for path, says in (
        (pipe, f"{pipe} (from environment INDEXD_CONFIG) is no file of up to 1 MiB"),
        (tmp_path, f"{tmp_path} (from environment INDEXD_CONFIG) is no file of up to 1 MiB"),
        ("/dev/zero", "/dev/zero (from environment INDEXD_CONFIG) is no file of up to 1 MiB"),
        ("", 'config = "" (from environment INDEXD_CONFIG) is not a path'),
    ):
        assert says in str(refused(environ={"INDEXD_CONFIG": str(path)}))
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
    assert str(refused({"hash_slots": "1"})) == 'hash_slots = "1" (from --hash-slots) is no setting'
    assert load({}, None, HOME | {"indexd_x": "", "INDEX": "1"}).index.index_num == 20_000_000


def test_the_broker_names_cluster_and_node_where_nothing_else_does(tmp_path: Path) -> None:
    broker = write(tmp_path / "b.conf", "brokerClusterName = shop \nbrokerName=broker-a\nbrokerId=0\n")
    flags: dict[str, str | list[str] | None] = {"broker_conf": str(broker)}
    for more, environ, expected in (
        (flags, {}, NodeConfig(cluster="shop", node_id="broker-a")),
        (flags | {"cluster": "mine"}, {"INDEXD_NODE_ID": "b"}, NodeConfig(cluster="mine", node_id="b")),
        ({}, {}, NodeConfig()),
    ):
        assert load(more, None, HOME | environ).node == expected
    write(broker, "brokerName=\n")
    assert f'node_id = "" (from {broker} line 1, brokerName) is not' in str(refused({"broker_conf": str(broker)}))


SERVING = ("node", "http", "remoting", "mqtt", "limits")


def test_the_examples_of_the_shipped_file_hold_together(tmp_path: Path) -> None:
    sections = re.split(r"(?m)^(?=\[)", SHIPPED.read_text("utf-8"))
    mine = [part for part in sections if part.startswith(tuple(f"[{name}]" for name in SERVING))]
    assert len(mine) == len(SERVING)
    text = re.sub(r"(?m)^# (\w+ = )", r"\1", "".join(mine))
    for key in ("mqtt_tls", "upstream_tls"):  # the examples of authorities need them
        text = text.replace(f"{key} = false", f"{key} = true")
    made = load({}, write(tmp_path / "i.toml", text), HOME)
    found = {key for key, source in made.provenance.items() if source != "default"}
    assert found == {key for key, info in KEYS.items() if info.section in SERVING}
    assert made.mqtt.mqtt_password_file == Path("/etc/indexd/mqtt-password")


def test_every_key_is_a_flag_of_every_command() -> None:
    args = common_options().parse_args([word for key in KEYS for word in (flag_name(key), f"<{key}>")])
    assert vars(args) == {key: [f"<{key}>"] if info.repeats else f"<{key}>" for key, info in KEYS.items()}
    assert "--http HOST:PORT|off" in common_options().format_help()
