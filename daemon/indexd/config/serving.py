"""The settings of what stands around the index: node, HTTP, MQTT, limits, RocketMQ's own protocol, Spark.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from indexd.config.units import (
    ConflictError,
    Count,
    Flag,
    Kind,
    OptionalPath,
    Seconds,
    Size,
    Stage,
    listed,
    matching,
    parse_choice,
    parse_ratio,
    shown,
)

OFF = "off"
# What getaddrinfo is given, which throws at longer or empty labels; names in other scripts in their form with xn--.
_NAME = r"(?=.{1,253}(?::|\Z))(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]{1,63})?"
# 1 to 65535.
_PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
_PEER = rf"(?:\[{_IPV6}\]|{_NAME}):(?:{_PORT})"


def listens(port: int) -> Callable[[object], str]:
    """A parser of where something listens, or off: ``HOST:PORT``, an IPv6 host in brackets, port 0 for any free one.

    ``port`` is that of the example in its complaint.
    """
    return matching(
        rf"{OFF}|(?:\[{_IPV6}\]|{_NAME}):(?:0|{_PORT})",
        f"is not HOST:PORT: write 127.0.0.1:{port}, [::1]:{port}, or port 0 for any; or {OFF}",
    )


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of a checked address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


#: Where something is that is called.
parse_peer = matching(_PEER, "is not HOST:PORT: write 10.0.0.1:10911 or [::1]:10911")


def is_peer(text: str) -> bool:
    """Whether something can be reached there: an address, and a port that is one."""
    return re.fullmatch(_PEER, text, re.ASCII) is not None


Listen = Annotated[str, BeforeValidator(listens(9577)), Kind("HOST:PORT|off", str)]
OptionalAddress = Annotated[Annotated[str, BeforeValidator(parse_peer)] | None, Kind("host:port", lambda _: "not set")]
Host = Annotated[
    str, BeforeValidator(matching(rf"{_NAME}|{_IPV6}", "is no host: write a name or an address, without a port"))
]
OptionalHost = Annotated[Host | None, Kind("host", lambda _: "not set")]
Text = Annotated[str, BeforeValidator(matching(r".*\S.*", "is not text of one line"))]
OptionalText = Annotated[Text | None, Kind("text", lambda _: "not set")]
# What a browser sends, letter by letter: another spelling would never meet it.
Origins = Annotated[
    tuple[str, ...],
    BeforeValidator(
        listed(
            matching(
                r"https?://(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[1-9][0-9]{0,4})?",
                "is not a list of origins: write https://host or http://host:port, several with , between",
            )
        )
    ),
    Kind("origins", lambda _: "none"),
]
TopicPrefix = Annotated[
    str,
    BeforeValidator(
        matching(
            r"(?=.{1,256}$)[^$+#/][^+#/]*(/[^+#/]+)*",
            "is no beginning of an MQTT topic: write words with / between them, without +, # and a first $",
        )
    ),
    Kind("text", str),
]
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

    http: Listen = Field(default="127.0.0.1:9577", description="The address of HTTP; HOST:PORT, or off")
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
        return self.together("http_tls_cert", "http_tls_key", "TLS needs certificate and key")


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
        self.needs("mqtt_ca_file", "mqtt_tls", "authorities vouch with TLS only: set mqtt_tls")
        return self.needs("mqtt_password_file", "mqtt_username", "a password needs a name to log in with")


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


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _parse_advertise(value: object) -> str:
    address = parse_peer(value)
    if split_address(address)[0] in ("0", "0.0.0.0", "::", "::ffff:0.0.0.0"):
        raise ValueError(
            "is where a server listens, not where clients reach it: write its own address, such as 10.0.0.7:10976"
        )
    return address


# As RocketMQ's own namesrvAddr: several with ; between; a comma does as well, for it is in no address.
Peers = Annotated[
    tuple[str, ...],
    BeforeValidator(listed(matching(_PEER, "is not HOST:PORT: write 10.0.0.1:9876, several with ; between"), ";,")),
    Kind("host:port;...", lambda value: ";".join(value) or "not set"),
]
Networks = Annotated[
    tuple[Network, ...],
    BeforeValidator(listed(str)),
    Kind("networks", lambda value: ",".join(map(str, value)) or "all"),
]


class RemotingConfig(Stage):
    """RocketMQ's own protocol: one port that is name server and broker in one for queries."""

    remoting: Annotated[str, BeforeValidator(listens(10976)), Kind("HOST:PORT|off", str)] = Field(
        default=OFF, description="Where mqadmin and RocketMQ's clients are answered; HOST:PORT, or off"
    )
    remoting_mode: Annotated[Literal["rocketmq", "exact"], BeforeValidator(parse_choice)] = Field(
        default="rocketmq", description="Answers to key queries: as the broker would give them, or exact; a word"
    )
    remoting_advertise: Annotated[
        Annotated[str, BeforeValidator(_parse_advertise)] | None, Kind("host:port", lambda _: "not set")
    ] = Field(default=None, description="Where clients reach us, in routes; else where each has reached us; HOST:PORT")
    remoting_access_key: OptionalText = Field(
        default=None, description="The access key (accessKey) that a signed request must name; a text"
    )
    remoting_secret_key_file: OptionalPath = Field(
        default=None, description="A file with the secret key (secretKey) it must be signed with; a path"
    )
    remoting_tls_cert: OptionalPath = Field(default=None, description="The certificate chain for TLS, PEM; a path")
    remoting_tls_key: OptionalPath = Field(default=None, description="Its private key, PEM; a path")
    remoting_allow: Networks = Field(
        default=(), description="Networks whose clients are answered, empty: all; networks, by comma"
    )
    remoting_connections_max: Count = Field(
        default=4096, ge=1, le=65_536, description="Most connections at once; the rest is closed; connections"
    )
    remoting_queries_max: Count = Field(
        default=8, ge=1, le=1024, description="Most queries that run at once; the rest waits or is refused; queries"
    )
    remoting_frame_max: Size = Field(
        default=16 * 2**20, ge=2**16, le=2**30, description="The largest request or answer; bytes"
    )
    remoting_idle_timeout: Seconds = Field(
        default=120.0, ge=1, le=86_400, description="A connection that says nothing for so long is closed; seconds"
    )
    upstream_namesrv: Peers = Field(
        default=(), description="Name servers to stand in front of: all but queries goes on to the broker; HOST:PORT"
    )
    upstream_timeout: Seconds = Field(
        default=3.0, ge=0.1, le=60, description="For a connection to them and to the broker, and a route; seconds"
    )
    upstream_tls: Flag = Field(default=False, description="Speak TLS with them and with the broker; true or false")
    upstream_ca_file: OptionalPath = Field(
        default=None, description="The authorities that may vouch for them, PEM, else the system's; a path"
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        self.together("remoting_tls_cert", "remoting_tls_key", "TLS needs certificate and key")
        pair = ("remoting_access_key", "remoting_secret_key_file")
        self.together(*pair, "a signature needs an access key and a secret key")
        self.needs("upstream_ca_file", "upstream_tls", "authorities vouch with TLS only: set upstream_tls")
        if self.remoting in self.upstream_namesrv:
            pair = ("upstream_namesrv", "remoting")
            raise ConflictError(pair, "the daemon cannot stand in front of itself: give the real name servers")
        return self


_COUNT = "[1-9][0-9]{0,4}"  # of threads; Spark itself falls over 0, and over what is no int
LOCAL = re.compile(rf"local(?:\[(\*|{_COUNT})(?: *, *{_COUNT})?\])?")
"""The masters in this process; group 1 is how many tasks run at once, ``*`` or none."""
_CONF = re.compile(r"\s*(spark\.[\w.*-]+)\s*=(.*)")


#: A master as spark-submit takes it.
parse_master = matching(
    rf"{LOCAL.pattern}|local-cluster\[ *{_COUNT} *, *{_COUNT} *, *[0-9]+ *\]|spark://.+|yarn|k8s://.+",
    "is not a master of Spark: write local[*], spark://host:7077, yarn or k8s://https://host:443",
)
Remote = Annotated[
    str,
    BeforeValidator(
        matching(
            r"sc://[^/].*",
            "is not the address of a Spark Connect server: write sc://host, or sc://host:15002/;token=...",
        )
    ),
]


def _parse_pair(value: object) -> tuple[str, str]:
    text = "=".join(value) if isinstance(value, tuple) else value
    match = _CONF.fullmatch(text) if isinstance(text, str) and text.isprintable() else None
    if match is None:
        raise ValueError(f"holds {shown(value)}: write key=value with a key of Spark, as spark.executor.memory=2g")
    return match[1], match[2]


def parse_conf(value: object) -> tuple[tuple[str, str], ...]:
    """``k=v`` texts in a list, or lines of one text; of a key that is there twice the last holds."""
    return tuple(dict(listed(_parse_pair, "\n")(value)).items())


Conf = Annotated[
    tuple[tuple[str, str], ...], BeforeValidator(parse_conf), Kind("key=value", lambda _: "none", repeats=True)
]


class SparkConfig(Stage):
    """Where the pipeline on Spark runs; nothing of the daemon looks at it."""

    engine: Annotated[Literal["process", "spark"], BeforeValidator(parse_choice)] = Field(
        default="process", description="What rebuild and audit run on: this process, or Spark; a word"
    )
    master: Annotated[str, BeforeValidator(parse_master), Kind("master", str)] = Field(
        default="local[*]", description="Where a job of Spark runs: local[*], spark://host:7077, yarn, k8s://...; a URL"
    )
    remote: Annotated[Remote | None, Kind("remote", lambda _: "not set")] = Field(
        default=None, description="The Spark Connect server to use in place of a master: sc://host; a URL"
    )
    conf: Conf = Field(default=(), description="Spark's own keys, over all defaults of indexd; key=value, repeated")
    java_home: OptionalPath = Field(
        default=None, description="The Java 17 or newer of Spark's driver, else it is looked for; a directory"
    )
    split_size: Size = Field(
        default=0, ge=0, le=2**40, description="The log that one task reads, 0: a segment, less if those are few; bytes"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.remote is not None and self.master != type(self).model_fields["master"].default:
            raise ConflictError(("master", "remote"), "a job runs on a master or through a Connect server, not on both")
        return self
