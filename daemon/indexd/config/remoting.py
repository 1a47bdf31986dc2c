"""The keys of the remoting protocol: where it is spoken, who may ask, and whether a broker stands behind it.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .facts import ConflictError, Stage
from .serving import (
    OFF,
    OptionalText,
    parse_address,
    parse_listen,
    parse_peer,
    split_address,
)
from .units import Count, Flag, Kind, OptionalPath, Seconds, Size, parse_choice

_EXAMPLE_PORT = "10976"
RemotingMode = Literal["rocketmq", "exact"]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NOT_PEERS = "is not HOST:PORT: write 10.0.0.1:9876, several with ; between"
_NOT_REACHED = "is where a server listens, not where clients reach it: write its own address, such as 10.0.0.7:10976"
_NOT_NETWORKS = "is not a list of networks: write 10.0.0.0/8 or 10.1.2.3, several with , between"


def _parse_peers(value: object) -> tuple[str, ...]:
    # As RocketMQ's own namesrvAddr: several with ; between; a comma does as well, for it is in no address.
    if isinstance(value, str):
        value = [part.strip() for part in value.replace(",", ";").split(";") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError(_NOT_PEERS)
    try:
        peers = tuple(parse_address(part) for part in value)
    except ValueError:
        raise ValueError(_NOT_PEERS) from None
    if any(split_address(peer)[1] == 0 for peer in peers):
        raise ValueError(_NOT_PEERS)
    return tuple(dict.fromkeys(peers))


def _parse_networks(value: object) -> tuple[Network, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError(_NOT_NETWORKS)
    try:
        return tuple(ipaddress.ip_network(part) if isinstance(part, str) else _as_network(part) for part in value)
    except ValueError as error:
        raise ValueError(f"{_NOT_NETWORKS} ({error})") from None


def _parse_advertise(value: object) -> str | None:
    address = parse_peer(value)
    if address is not None and _is_any(split_address(address)[0]):
        raise ValueError(_NOT_REACHED)
    return address


def _is_any(host: str) -> bool:
    number = _number(host)
    return number is not None and number.is_unspecified


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ipaddress.IPv4Address(0) if host == "0" else None  # as getaddrinfo reads it
    return getattr(address, "ipv4_mapped", None) or address


def _is_same(listening: str, peer: str) -> bool:
    # As far as it can be told without asking anybody for names.
    (host, port), (peer_host, peer_port) = split_address(listening), split_address(peer)
    if port != peer_port:
        return False
    own, other = _number(host), _number(peer_host)
    if own is None or other is None:
        return host.lower() == peer_host.lower()
    return own == other or (own.is_unspecified and other.is_loopback)


def _as_network(value: object) -> Network:
    if isinstance(value, ipaddress.IPv4Network | ipaddress.IPv6Network):
        return value
    raise ValueError("no text")


Peers = Annotated[
    tuple[str, ...], BeforeValidator(_parse_peers), Kind("host:port;...", lambda value: ";".join(value) or "not set")
]
Networks = Annotated[
    tuple[Network, ...],
    BeforeValidator(_parse_networks),
    Kind("networks", lambda value: ",".join(map(str, value)) or "all"),
]


class RemotingConfig(Stage):
    """RocketMQ's own protocol: one port that is name server and broker in one for queries."""

    remoting: Annotated[
        str, BeforeValidator(lambda value: parse_listen(value, _EXAMPLE_PORT)), Kind("HOST:PORT|off", str)
    ] = Field(default=OFF, description="Where mqadmin and RocketMQ's clients are answered; HOST:PORT, or off")
    remoting_mode: Annotated[RemotingMode, BeforeValidator(parse_choice)] = Field(
        default="rocketmq", description="Answers to key queries: as the broker would give them, or exact; a word"
    )
    remoting_advertise: Annotated[
        str | None, BeforeValidator(_parse_advertise), Kind("host:port", lambda _: "not set")
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
        if (self.remoting_tls_cert is None) != (self.remoting_tls_key is None):
            raise ConflictError(("remoting_tls_cert", "remoting_tls_key"), "TLS needs certificate and key")
        if (self.remoting_access_key is None) != (self.remoting_secret_key_file is None):
            pair = ("remoting_access_key", "remoting_secret_key_file")
            raise ConflictError(pair, "a signature needs an access key and a secret key")
        if any(_is_same(self.remoting, peer) for peer in self.upstream_namesrv if self.remoting != OFF):
            pair = ("upstream_namesrv", "remoting")
            raise ConflictError(pair, "the daemon cannot stand in front of itself: give the real name servers")
        if self.upstream_ca_file is not None and not self.upstream_tls:
            raise ConflictError(
                ("upstream_ca_file", "upstream_tls"), "authorities vouch with TLS only: set upstream_tls"
            )
        return self

    @property
    def unused(self) -> tuple[str, ...]:
        """Keys that are set and mean nothing, because the protocol is not spoken."""
        if self.remoting != OFF:
            return ()
        fields = type(self).model_fields
        return tuple(key for key, field in fields.items() if getattr(self, key) != field.default)
