"""The keys of what stands around the index: who it belongs to, HTTP, MQTT, and the limits that keep the broker safe.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

import re
import socket
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from .facts import ConflictError, Stage
from .units import Count, Flag, Kind, OptionalPath, Seconds, Size, parse_ratio

OFF = "off"
HTTP_DEFAULT = "127.0.0.1:9577"
_PORT_MAX = 65_535
_NOT_ADDRESS = "is not HOST:PORT: write 127.0.0.1:{port}, [::1]:{port}, or port 0 for any"
_HTTP_PORT = HTTP_DEFAULT.rpartition(":")[2]
_NOT_PEER = "is not HOST:PORT: write 10.0.0.1:10911 or [::1]:10911"
_NOT_HOST = "is no host: write a name or an address, without a port"
_ADDRESS = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(0|[1-9][0-9]{0,4})", re.ASCII)
# What getaddrinfo is given, which throws at longer or empty labels; names in other scripts in their form with xn--.
_NAME = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?", re.ASCII)
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,63}", re.ASCII)
_ORIGIN = re.compile(r"https?://(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[1-9][0-9]{0,4})?", re.ASCII)
_PREFIX = re.compile(r"[^$+#/][^+#/]*(/[^+#/]+)*")
_PREFIX_BYTES_MAX = 1024
_NAME_MAX = 253


def parse_address(value: object, port: str = _HTTP_PORT) -> str:
    """``HOST:PORT`` as it is written, an IPv6 host in brackets; port 0 is any free one. ``port``: of the example."""
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[3]) > _PORT_MAX or not (_is_ipv6(match[1]) if match[1] else _is_name(match[2])):
        raise ValueError(_NOT_ADDRESS.format(port=port))
    return match[0]


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of a checked address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    try:
        socket.inet_pton(socket.AF_INET6, address)
    except (OSError, ValueError):
        return False
    return not percent or _ZONE.fullmatch(zone) is not None


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and len(text) <= _NAME_MAX


def is_peer(text: str) -> bool:
    """Whether something can be reached there: an address, and a port that is one."""
    try:
        return split_address(parse_address(text))[1] != 0
    except ValueError:
        return False


def parse_listen(value: object, port: str = _HTTP_PORT) -> str:
    """Where something listens, or off."""
    if value == OFF:
        return OFF
    try:
        return parse_address(value, port)
    except ValueError as error:
        raise ValueError(f"{error}; or {OFF}") from None


def parse_peer(value: object) -> str | None:
    """Where something is that is called; None if it is not given."""
    if value is None:
        return None
    try:
        address = parse_address(value)
    except ValueError:
        raise ValueError(_NOT_PEER) from None
    if split_address(address)[1] == 0:
        raise ValueError(_NOT_PEER)
    return address


def _parse_host(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not (_is_name(value) or _is_ipv6(value)):
        raise ValueError(_NOT_HOST)
    return value


def _parse_text(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("is not text of one line")
    return value


def _parse_origins(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    # What a browser sends, letter by letter: another spelling would never meet it.
    if not isinstance(value, list | tuple) or not all(
        isinstance(part, str) and _ORIGIN.fullmatch(part) for part in value
    ):
        raise ValueError("is not a list of origins: write https://host or http://host:port, several with , between")
    return tuple(value)


def _parse_prefix(value: object) -> str:
    if (
        not isinstance(value, str)
        or not value.isprintable()
        or not _PREFIX.fullmatch(value)
        or len(value.encode()) > _PREFIX_BYTES_MAX
    ):
        raise ValueError(
            "is no beginning of an MQTT topic: write words with / between them, without +, # and a first $"
        )
    return value


Listen = Annotated[str, BeforeValidator(parse_listen), Kind("HOST:PORT|off", str)]
OptionalAddress = Annotated[str | None, BeforeValidator(parse_peer), Kind("host:port", lambda _: "not set")]
OptionalHost = Annotated[str | None, BeforeValidator(_parse_host), Kind("host", lambda _: "not set")]
OptionalText = Annotated[str | None, BeforeValidator(_parse_text), Kind("text", lambda _: "not set")]
Origins = Annotated[tuple[str, ...], BeforeValidator(_parse_origins), Kind("origins", lambda _: "none")]
TopicPrefix = Annotated[str, BeforeValidator(_parse_prefix), Kind("text", str)]
Ratio = Annotated[float, BeforeValidator(parse_ratio), Kind("ratio", lambda value: f"{value:g}")]


class NodeConfig(Stage):
    """Whose index this is, and how the broker is looked at."""

    cluster: OptionalText = Field(
        default=None, description="The cluster's name in metrics and topics (brokerClusterName); a word"
    )
    node_id: OptionalText = Field(
        default=None, description="The broker's name there (brokerName), else this host's; a word"
    )
    broker_address: OptionalAddress = Field(
        default=None,
        description="Where the broker listens: it is asked how far its log goes, else found when needed; HOST:PORT",
    )
    broker_check_interval: Seconds = Field(
        default=5.0, ge=0.1, le=3600, description="Time between two looks at the broker; seconds"
    )


class HttpConfig(Stage):
    """Metrics, health, queries and the page."""

    http: Listen = Field(
        default=HTTP_DEFAULT, description="Where metrics, queries and the page are served; HOST:PORT, or off"
    )
    http_token_file: OptionalPath = Field(
        default=None, description="A file with the token that a request must bear; a path"
    )
    http_tls_cert: OptionalPath = Field(default=None, description="The certificate chain for TLS, PEM; a path")
    http_tls_key: OptionalPath = Field(default=None, description="Its private key, PEM; a path")
    http_cors_origins: Origins = Field(
        default=(), description="Origins whose pages may read the answers, such as https://ops.example; texts"
    )
    http_connections_max: Count = Field(
        default=256, ge=1, le=65_536, description="Most connections at once; the rest is refused; connections"
    )
    http_queries_max: Count = Field(
        default=8, ge=1, le=1024, description="Most queries that run at once; the rest waits or is refused; queries"
    )
    http_body_max: Size = Field(
        default=4 * 2**20, ge=0, le=2**30, description="Most of a message's body in an answer; bytes"
    )

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            raise ConflictError(("http_tls_cert", "http_tls_key"), "TLS needs certificate and key")
        return self


class MqttConfig(Stage):
    """What is published, and where."""

    mqtt_host: OptionalHost = Field(default=None, description="The MQTT broker; nothing is published without; a host")
    mqtt_port: Count = Field(default=1883, ge=1, le=65_535, description="Its port, 8883 is usual with TLS; a number")
    mqtt_tls: Flag = Field(default=False, description="Speak TLS with it; true or false")
    mqtt_ca_file: OptionalPath = Field(
        default=None, description="The authorities that may vouch for it, PEM, else the system's; a path"
    )
    mqtt_username: OptionalText = Field(default=None, description="The name to log in with; a text")
    mqtt_password_file: OptionalPath = Field(default=None, description="A file with the password; a path")
    mqtt_topic_prefix: TopicPrefix = Field(
        default="indexd", description="What all topics begin with; a beginning of topics"
    )
    mqtt_interval: Seconds = Field(
        default=10.0, ge=0.1, le=3600, description="Time between two states that are published; seconds"
    )
    mqtt_queue_max: Count = Field(
        default=1000, ge=1, le=1_000_000, description="Most events that wait; the oldest are dropped; events"
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        # Without these a password would go out in the clear, or not at all, and nobody would be told.
        if self.mqtt_ca_file is not None and not self.mqtt_tls:
            raise ConflictError(("mqtt_ca_file", "mqtt_tls"), "authorities vouch with TLS only: set mqtt_tls")
        if self.mqtt_password_file is not None and self.mqtt_username is None:
            raise ConflictError(("mqtt_password_file", "mqtt_username"), "a password needs a name to log in with")
        return self


class LimitsConfig(Stage):
    """What indexd must not take from the broker."""

    disk_used_max: Ratio = Field(
        default=0.70, ge=0.01, le=1, description="Indexing waits while the data's file system is fuller; 1: never"
    )
    read_rate_max: Size = Field(
        default=0, ge=0, le=2**40, description="Most log read a second while catching up, 0: no bound; bytes"
    )
    memory_max: Size = Field(
        default=0, ge=0, le=2**40, description="Reading waits while the process holds more memory, 0: never; bytes"
    )
    drop_cache: Flag = Field(
        default=True, description="Give back the page cache of log that was read far behind its end; true or false"
    )
