"""Who may ask over remoting: networks, TLS certificate, and the signature that RocketMQ's ACL has clients make.

A signature is HMAC-SHA1 with the secret key over the values of all ext fields but itself, in the order of their
names, and the body, in base64 (AclClientRPCHook). Clients up to 4.9.3 leave out ``_UNIQUE_KEY_QUERY``. It contains no
time and no number: whoever has seen a request can send it again. TLS keeps it from being seen.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import ssl
from dataclasses import dataclass, field

from indexd.config import OFF, Config, split_address
from indexd.serve.access_files import is_loopback, read_secret, read_tls
from indexd.serve.remoting.command import V4_9_3, RemotingCommand, utf8

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Credentials:
    """An access key and the secret key that belongs to it."""

    access_key: str
    secret_key: bytes = field(repr=False)

    def signature(self, command: RemotingCommand) -> str:
        """What the client that has the secret key writes into ``Signature``, whose present value does not count."""
        fields = command.ext_fields
        # As Java sorts texts: by UTF-16, where what lies beyond U+FFFF comes before U+E000.
        names = sorted(fields.keys() - {SIGNATURE}, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
        if command.version <= V4_9_3 and UNIQUE_KEY_QUERY in fields:
            names.remove(UNIQUE_KEY_QUERY)
        values = utf8("".join([fields[name] for name in names]))
        return base64.b64encode(hmac.digest(self.secret_key, values + command.body, "sha1")).decode()

    def refusal(self, command: RemotingCommand) -> str | None:
        """Why the request bears no signature that these keys made; None if it does. In a time that tells nothing."""
        access_key, signature = command.ext_fields.get(ACCESS_KEY), command.ext_fields.get(SIGNATURE)
        if access_key is None or signature is None:
            return f"the request is not signed: it has no {SIGNATURE if access_key is not None else ACCESS_KEY}"
        is_known = hmac.compare_digest(utf8(access_key), utf8(self.access_key))
        if not hmac.compare_digest(utf8(signature), utf8(self.signature(command))) or not is_known:
            return "the signature is not one that the access key and the secret key known here make"
        return None


@dataclass(frozen=True, slots=True)
class RemotingAccess:
    """Read once at the start. ``networks``: whose clients are answered; none of them: all.

    ``is_open``: others than this machine reach it, and neither networks nor TLS with signatures keep anybody out.
    """

    tls: ssl.SSLContext | None
    credentials: Credentials | None
    networks: tuple[Network, ...]
    is_open: bool = False

    def admits(self, host: str) -> bool:
        """Whether a client at this address is answered."""
        return not self.networks or any(ip_of(host) in network for network in self.networks)


def read_access(config: Config) -> RemotingAccess:
    """UsageError if the secret key or the certificate cannot be used."""
    remoting = config.remoting
    tls = credentials = None
    if remoting.remoting_tls_cert is not None and remoting.remoting_tls_key is not None:
        tls = read_tls(remoting.remoting_tls_cert, remoting.remoting_tls_key)
    if remoting.remoting_access_key is not None and remoting.remoting_secret_key_file is not None:
        secret = read_secret(
            remoting.remoting_secret_key_file,
            "remoting_secret_key_file",
            what="secret key",
            least=1,
            remedy="write the secretKey there that clients sign with, alone on its line",
        )
        credentials = Credentials(remoting.remoting_access_key, secret)
    is_near = remoting.remoting == OFF or is_loopback(split_address(remoting.remoting)[0])
    is_narrow = bool(remoting.remoting_allow) and all(network.prefixlen for network in remoting.remoting_allow)
    is_guarded = tls is not None and credentials is not None
    return RemotingAccess(tls, credentials, remoting.remoting_allow, not (is_near or is_narrow or is_guarded))


def ip_of(host: str) -> IPAddress:
    """The address of a socket; an IPv4 address in an IPv6 one counts as the former."""
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address
