"""Configuration: who the index belongs to, HTTP, MQTT and the limits: what may be written there, and what may not."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexd.cli.output import common_options, given_flags
from indexd.config import KEYS, OFF, HttpConfig, LimitsConfig, MqttConfig, NodeConfig, env_name, flag_name, load
from indexd.config import split_address as split
from indexd.config.serving import parse_address
from indexd.config.units import parse_ratio
from support.configs import HOME, SHIPPED, no_system_file, refused, write

__all__ = ["no_system_file"]

SERVING = ("node", "http", "remoting", "mqtt", "limits")

# --- addresses


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


# --- hosts, origins, beginnings of topics, parts of a whole


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
        ("mqtt_host", "mqtt.example.org:1883", "is no host: write a name or an address, without a port"),
        ("mqtt_host", "mqtts://mqtt", "is no host"),
        ("mqtt_host", "[::1]", "is no host"),
        ("mqtt_host", "", "is no host"),
        ("mqtt_host", "a b", "is no host"),
        ("mqtt_port", "0", "is not in 1 to 65535"),
        ("mqtt_tls", "yes", "is not true or false"),
        ("mqtt_username", " ", "is not text of one line"),
        ("mqtt_username", "a\nb", "is not text of one line"),
        ("mqtt_ca_file", "~/ca", "is not expanded"),
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
        ("http_token_file", "", "is empty"),
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
        assert re.match(rf'{key} = ".*" \(from {source}\) ', str(error)), str(error)
        assert expected in str(error)


@pytest.mark.parametrize("value", [None, True, [], {}, b"1", 1j, float("nan"), float("inf"), 2**99, "", "%", "x%"])
def test_what_is_no_part_of_a_whole_is_refused_with_words(value: object) -> None:
    with pytest.raises(ValueError, match=r"^is "):
        parse_ratio(value)


@given(st.integers(min_value=1, max_value=1000))
def test_a_part_can_be_written_in_two_ways(thousandths: int) -> None:
    percent = f"{thousandths // 10}.{thousandths % 10}%"
    assert parse_ratio(percent) == parse_ratio(str(thousandths / 1000)) == thousandths / 1000


# --- files


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
        assert f"(from {file} line 2) {says}" in str(refused(file=file))


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
        assert (made.provenance[key] != "default") == (info.section in SERVING or key == "data"), key
    assert made.mqtt == MqttConfig(
        mqtt_host="mqtt.example.org",
        mqtt_tls=True,
        mqtt_ca_file="/etc/indexd/mqtt-ca.crt",
        mqtt_username="indexd",
        mqtt_password_file="/etc/indexd/mqtt-password",
    )


# --- flags


def test_every_key_is_a_flag_of_every_command() -> None:
    keys = [key for key, info in KEYS.items() if info.section in SERVING]
    args = common_options().parse_args([word for key in keys for word in (flag_name(key), f"<{key}>")])
    assert {key: text for key, text in given_flags(args).items() if text is not None} == {k: f"<{k}>" for k in keys}
    assert "--http HOST:PORT|off" in common_options().format_help()
