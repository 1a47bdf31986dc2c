"""Configuration: what a value may be, and that every wrong one ends in one line that says so."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from indexd.config import (
    KEYS,
    SECTIONS,
    Config,
    ReaderConfig,
    StoreConfig,
    env_name,
    flag_name,
    load,
    parse_delay_levels,
    parse_millis,
    parse_seconds,
    parse_size,
    show_size,
)
from indexd.config.model import Flavour
from indexd.config.units import parse_count, parse_flag, parse_path, parse_paths, shown
from support.configs import HOME, no_system_file, refused, write

__all__ = ["no_system_file"]


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
    os.mkfifo(tmp_path / "pipe")
    assert "pipe (from environment INDEXD_CONFIG) is no file" in str(
        refused(environ={"INDEXD_CONFIG": str(tmp_path / "pipe")})
    )
    assert "(from environment INDEXD_CONFIG): Is a directory" in str(refused(environ={"INDEXD_CONFIG": str(tmp_path)}))
    assert 'config = "" (from environment INDEXD_CONFIG) is empty' in str(refused(environ={"INDEXD_CONFIG": ""}))
    assert "/dev/zero (from -c) is no file" in str(refused(file=Path("/dev/zero")))
    (tmp_path / "large").write_bytes(bytes(2**20 + 1))
    assert "larger than 1 MiB" in str(refused(file=tmp_path / "large"))
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
    assert "indexd --help" in refused(environ={"INDEXD_": ""}).hint
    assert refused({"hash_slots": "1"}).hint == "did you mean hash_slot_num?"
    assert load({}, None, HOME | {"indexd_x": "", "INDEX": "1"}).index.index_num == 20_000_000


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
    assert [key for key, info in KEYS.items() if info.is_bool] == [
        *("verify_crc", "consume_queue", "sparse", "upstream_tls", "mqtt_tls", "drop_cache"),
    ]
    assert (KEYS["queue_bytes"].default, KEYS["queue_bytes"].bounds) == ("64MiB", "64KiB to 1TiB")
