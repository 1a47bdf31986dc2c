"""Settings: values with units, addresses, parts of a whole; what is refused, and how; what must hold together."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from indexd.config import (
    KEYS,
    OFF,
    SECTIONS,
    Config,
    HttpConfig,
    LimitsConfig,
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
from indexd.config.model import Flavour
from indexd.config.serving import listens
from indexd.config.units import listed, parse_count, parse_path, parse_ratio, shown
from support.configs import HOME, no_system_file, refused, write

__all__ = ["no_system_file"]
parse_address = listens(9577)


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
        ("[http]\nhttp = 9577", "is not HOST:PORT"),
        ("[http]\nhttp = false", "is not HOST:PORT"),
        ('[http]\nhttp_cors_origins = ["https://a", 1]', "is not a list of origins"),
        ("[http]\nhttp_body_max = true", "is not a size"),
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
    text += '[http]\nhttp = "[::1]:0"\nhttp_cors_origins = ["https://a"]\n[limits]\ndisk_used_max = 1\nmemory_max = 5\n'
    made = load({}, write(tmp_path / "i.toml", "\ufeff" + text.replace("\n", "\r\n")), HOME)
    reader = made.reader
    assert (made.index.flavour, reader.verify_crc, reader.settle_ms) == ("4.7", True, 100)
    assert made.queue.drain_interval == 1.0
    assert made.store.commit_log_directories == (Path("/a"), Path("/b"), Path("/c"), Path("/d"))
    assert made.http == HttpConfig(http="[::1]:0", http_cors_origins=["https://a"])
    assert made.limits == LimitsConfig(disk_used_max=1.0, memory_max=5)


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
        (listed(parse_path), "/a, /b", (Path("/a"), Path("/b"))),
        (listed(parse_path), [], ()),
    ],
)
def test_units(parse, value, expected):
    assert parse(value) == expected
    assert type(parse(value)) is type(expected)


NUMBERS = [parse_size, parse_millis, parse_seconds, parse_count, parse_ratio]
NO_NUMBERS = ["1\0", "٣", "1e9", "--1", 2**99, "%", "x%"]


@pytest.mark.parametrize("parse", [*NUMBERS, parse_path])
def test_units_refuse_with_a_text_and_nothing_else(parse):
    for value in (None, True, b"1", [], {}, 1j, float("nan"), float("inf"), "", "\0", *NO_NUMBERS * (parse in NUMBERS)):
        with pytest.raises(ValueError, match=r"^is "):
            parse(value)


@given(st.integers(min_value=0, max_value=2**62))
def test_a_size_survives_being_shown(value):
    assert parse_size(show_size(value)) == value


@given(st.text())
def test_shown_text_is_one_printable_line(text):
    assert shown(text).isprintable()


def test_models_are_frozen_closed_and_complete():
    made = Config()
    for wrong in (
        lambda: setattr(made.index, "index_num", 3),
        lambda: ReaderConfig(settle=1),
        lambda: ReaderConfig(poll_min_ms=60, poll_max_ms=50),
    ):
        with pytest.raises(ValidationError):
            wrong()
    assert (made.provenance, made.http.http, made.node.broker_address) == ({}, "127.0.0.1:9577", None)
    assert StoreConfig(store="/s", data="/d").commit_log_directories == (Path("/s/commitlog"),)
    delays = StoreConfig(data="/d").delay_levels_ms
    assert (delays[:3], len(delays), StoreConfig(data="/d").commit_log_directories) == ((1000, 5000, 10_000), 18, ())
    assert StoreConfig(data="/d", message_delay_level="0s 1d").delay_levels_ms == (0, 86_400_000)
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
    assert split(load({"http": text}, None, HOME).http.http) == expected


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
        error = str(refused(environ={env_name(key): text}))
        assert re.match(rf"{key} = .* \(from environment {env_name(key)}\) is not HOST:PORT.*{says}", error), error


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


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("mqtt_host", "mqtt.example.org", "mqtt.example.org"),
        ("mqtt_host", "10.0.0.1", "10.0.0.1"),
        ("http", OFF, OFF),
        ("broker_address", "[::1]:10911", "[::1]:10911"),
        ("disk_used_max", "70.5%", 0.705),
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
    for made in (load({key: value}, None, HOME), load({}, None, HOME | {env_name(key): value})):
        found = getattr(getattr(made, KEYS[key].section), key)
        assert (found, type(found)) == (expected, type(expected))
        assert made.provenance[key] in (flag_name(key), f"environment {env_name(key)}")


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
        ("queue_rows", "4MiB", "is not a whole number"),
        ("index_num", "1", "is not in 2 to"),
        ("index_num", str(2**31), "is not in 2 to"),
        ("verify_crc", "maybe", "is not true or false"),
        ("run_mode", "", "is not one of shadow, offload"),
        ("log_level", "INFO", "is not one of debug"),
        ("message_delay_level", "1s 5x", "is not a list of delay levels"),
        ("message_delay_level", "", "delay levels: write 1 to 1024"),
        ("message_delay_level", "999999999999999d", "delay levels: write"),
        ("store", "", "is not a path"),
        ("store", "/a\0b", "is not a path"),
        ("data", "~/data", "nothing expands ~"),
        ("data", "s3://bucket/data", "is a URI"),
        ("commit_log_paths", "/a,,/b", "is not a path"),
        ("broker_conf", "\n", "is not a path"),
        ("mqtt_host", "mqtt.example.org:1883", "is no host: write a name or an address, without a port"),
        ("mqtt_host", "mqtts://mqtt", "is no host"),
        ("broker_address", "127.0.0.1:0", "is not HOST:PORT"),
        ("broker_address", OFF, "is not HOST:PORT"),
        ("mqtt_host", "[::1]", "is no host"),
        ("mqtt_host", "", "is no host"),
        ("mqtt_host", "a b", "is no host"),
        ("mqtt_port", "0", "is not in 1 to 65535"),
        ("mqtt_tls", "maybe", "is not true or false"),
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
        ("remoting_allow", "10.0.0.1/8", "is not a list of networks: write 10.0.0.0/8"),
        ("read_rate_max", "2TiB", "is not in 0 to 1TiB"),
        ("memory_max", "-1", "is not in 0 to 1TiB"),
        ("drop_cache", "2", "is not true or false"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_source(key: str, value: str, expected: str) -> None:
    error = str(refused({key: value}))
    assert re.match(rf'{key} = ".*[".] \(from {flag_name(key)}\) ', error), error
    assert expected in error


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"poll_min_ms": "100"},
            'poll_min_ms = "100" (from --poll-min-ms) and poll_max_ms = 50 (default): '
            "poll_min_ms must not be more than poll_max_ms",
        ),
        ({"corrupt_after_ms": "10"}, "settle_ms must not be more than corrupt_after_ms"),
        ({"mqtt_ca_file": "/ca"}, "authorities vouch with TLS only"),
        ({"mqtt_password_file": "/p"}, "a password needs a name"),
        (
            {"http_tls_cert": "/c"},
            'http_tls_cert = "/c" (from --http-tls-cert) and http_tls_key = not set (default): '
            "TLS needs certificate and key",
        ),
        ({"http_tls_key": "/k"}, "TLS needs"),
        ({"remoting": "10976"}, "127.0.0.1:10976, [::1]:10976"),
        ({"http": "10976"}, "127.0.0.1:9577, [::1]:9577"),
        *(
            ({"remoting_advertise": address}, "not where clients reach it")
            for address in ("0.0.0.0:10976", "[::]:10976", "[::ffff:0.0.0.0]:1", "0:10976")
        ),
        *(
            ({"remoting": "127.0.0.1:10976", "upstream_namesrv": address}, "cannot stand in front of itself")
            for address in ("127.0.0.1:10976", "10.0.0.1:9876;127.0.0.1:10976")
        ),
    ],
)
def test_what_cannot_be_given_together_or_alone(keys: dict[str, str | None], says: str) -> None:
    assert says in str(refused(keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"mqtt_password_file": "/p", "mqtt_username": "u", "mqtt_ca_file": "/c", "mqtt_tls": "true"},
        {"http_tls_cert": "/c", "http_tls_key": "/k"},
        {"remoting_advertise": "10.0.0.7:10976"},
        {"remoting": "127.0.0.1:10976", "upstream_namesrv": "127.0.0.1:9876"},
        {"remoting": "127.0.0.1:10976", "upstream_namesrv": "10.0.0.1:10976"},
        {"remoting": "0.0.0.0:10976", "upstream_namesrv": "10.0.0.1:10976"},
        {"remoting": OFF, "upstream_namesrv": "127.0.0.1:10976"},
    ],
)
def test_what_can(keys: dict[str, str | list[str] | None]) -> None:
    made = load(keys, None, HOME)
    assert {key: made.provenance[key] for key in keys} == {key: flag_name(key) for key in keys}
