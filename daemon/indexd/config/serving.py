"""The keys of what stands around the index: who it belongs to, HTTP, MQTT, and the limits that keep the broker safe.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from .facts import ConflictError, Stage
from .units import Count, Flag, Kind, OptionalPath, Seconds, Size, parse_ratio

OFF = "off"
HTTP_DEFAULT = "127.0.0.1:9577"
_NOT_ADDRESS = "is not HOST:PORT: write 127.0.0.1:9577, [::1]:9577, or port 0 for any"
_PREFIX = re.compile(r"[^+#\x00/]+(/[^+#\x00/]+)*")


def parse_address(value: object) -> str:
    """``HOST:PORT`` as it is written, an IPv6 host in brackets; port 0 is any free one."""
    if not isinstance(value, str) or not value.isprintable() or "/" in value or "@" in value:
        raise ValueError(_NOT_ADDRESS)
    try:
        parts = urlsplit(f"//{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(_NOT_ADDRESS) from None
    if not host or port is None or value.rpartition(":")[2] != str(port):
        raise ValueError(_NOT_ADDRESS)
    return value


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of a checked address."""
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port or 0


def _parse_listen(value: object) -> str:
    if value == OFF:
        return OFF
    try:
        return parse_address(value)
    except ValueError as error:
        raise ValueError(f"{error}; or {OFF}") from None


def _parse_optional_address(value: object) -> str | None:
    return None if value is None else parse_address(value)


def _parse_text(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("is not text of one line")
    return value


def _parse_texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) and part.isprintable() for part in value):
        raise ValueError("is not a list of texts: write a list, or one text with , between them")
    return tuple(value)


def _parse_prefix(value: object) -> str:
    if not isinstance(value, str) or not _PREFIX.fullmatch(value) or len(value.encode()) > 1024:
        raise ValueError("is no beginning of an MQTT topic: write words with / between them, without + and #")
    return value


Listen = Annotated[str, BeforeValidator(_parse_listen), Kind("host:port|off", str)]
OptionalAddress = Annotated[
    str | None, BeforeValidator(_parse_optional_address), Kind("host:port", lambda _: "not set")
]
OptionalText = Annotated[str | None, BeforeValidator(_parse_text), Kind("text", lambda _: "not set")]
Texts = Annotated[tuple[str, ...], BeforeValidator(_parse_texts), Kind("texts", lambda _: "none")]
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
        default=None, description="Where the broker listens: it is asked how far its log goes; HOST:PORT"
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
    http_cors_origins: Texts = Field(
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

    mqtt_host: OptionalText = Field(default=None, description="The MQTT broker; nothing is published without; a host")
    mqtt_port: Count = Field(default=1883, ge=1, le=65_535, description="Its port, 8883 is usual with TLS; a number")
    mqtt_tls: Flag = Field(default=False, description="Speak TLS with it; true or false")
    mqtt_ca_file: OptionalPath = Field(
        default=None, description="The authorities that may vouch for it, PEM, else the system's; a path"
    )
    mqtt_username: OptionalText = Field(default=None, description="The name to log in with; a text")
    mqtt_password_file: OptionalPath = Field(default=None, description="A file with the password; a path")
    mqtt_topic_prefix: TopicPrefix = Field(
        default="rocketmq-indexd", description="What all topics begin with; a beginning of topics"
    )
    mqtt_interval: Seconds = Field(
        default=10.0, ge=0.1, le=3600, description="Time between two states that are published; seconds"
    )
    mqtt_queue_max: Count = Field(
        default=1000, ge=1, le=1_000_000, description="Most events that wait; the oldest are dropped; events"
    )


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
