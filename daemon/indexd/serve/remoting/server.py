"""Access: who may ask: the networks, the certificate, and the signature that RocketMQ's ACL has clients make.

A signature is HMAC-SHA1 with the secret key over the values of all ext fields but itself, by the order of their
names, and the body, in base64 (AclClientRPCHook). Clients up to 4.9.3 leave out ``_UNIQUE_KEY_QUERY``. There is no time
and no number in it: who has seen a request can send it again. TLS keeps it from being seen.

RemotingCounts: what the connections did since the start, in plain numbers that the event loop alone changes.

Room: what all connections together may hold of this process's memory. Where it is too much, the largest goes.

Hall: what all connections of a server share.

serve_remoting: connections on a socket that listens already, until it is told to stop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import ipaddress
import resource
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from indexd.config import OFF, Config, split_address
from indexd.serve.board import Board
from indexd.serve.queries import Queries
from indexd.serve.remoting.command import V4_9_3, RemotingCommand, RequestCode, ResponseCode
from indexd.serve.remoting.connection import Connection, Processor
from indexd.serve.remoting.key_queries import load_key_queries
from indexd.serve.remoting.processor import RemotingProcessor
from indexd.serve.remoting.upstream import SparingLog
from indexd.serve.server import is_loopback, read_secret, read_tls

ACCESS_KEY = "AccessKey"
SIGNATURE = "Signature"
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Credentials:
    """An access key and the secret key that belongs to it."""

    access_key: str
    secret_key: bytes = field(repr=False)

    def signature(self, command: RemotingCommand) -> str:
        """What the client that has the secret key writes into ``Signature``, whose present value does not count."""
        fields = command.ext_fields
        names = [name for name in _as_java_sorts(fields) if name != SIGNATURE]
        if command.version <= V4_9_3 and UNIQUE_KEY_QUERY in fields:
            names.remove(UNIQUE_KEY_QUERY)
        values = "".join([fields[name] for name in names]).encode("utf-8", "replace")
        return base64.b64encode(hmac.digest(self.secret_key, values + command.body, "sha1")).decode()

    def refusal(self, command: RemotingCommand) -> str | None:
        """Why the request bears no signature that these keys made; None if it does. In a time that tells nothing."""
        access_key, signature = command.ext_fields.get(ACCESS_KEY), command.ext_fields.get(SIGNATURE)
        if access_key is None or signature is None:
            return f"the request is not signed: it has no {SIGNATURE if access_key is not None else ACCESS_KEY}"
        is_known = _is_same(access_key, self.access_key)
        if not _is_same(signature, self.signature(command)) or not is_known:
            return "the signature is not one that the access key and the secret key known here make"
        return None


@dataclass(frozen=True, slots=True)
class Access:
    """Read once at the start. ``networks``: whose clients are answered; none of them: all.

    ``is_open``: others than this machine reach it, and neither networks nor TLS with signatures keep anybody out.
    """

    tls: ssl.SSLContext | None
    credentials: Credentials | None
    networks: tuple[Network, ...]
    is_open: bool = False

    def admits(self, host: str) -> bool:
        """Whether a client at this address is answered; an IPv4 address in an IPv6 one counts as the former."""
        if not self.networks:
            return True
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self.networks)

    def refusal(self, command: RemotingCommand) -> str | None:
        """Why a request, whatever it asks, is answered NO_PERMISSION; None if it may ask."""
        return None if self.credentials is None else self.credentials.refusal(command)


def read_access(config: Config) -> Access:
    """UsageError if the secret key or the certificate cannot be used."""
    remoting = config.remoting
    tls = credentials = None
    if remoting.remoting_tls_cert is not None and remoting.remoting_tls_key is not None:
        tls = read_tls(remoting.remoting_tls_cert, remoting.remoting_tls_key)
    if remoting.remoting_access_key is not None and remoting.remoting_secret_key_file is not None:
        credentials = Credentials(remoting.remoting_access_key, _read_secret_key(remoting.remoting_secret_key_file))
    is_near = remoting.remoting == OFF or is_loopback(split_address(remoting.remoting)[0])
    is_narrow = bool(remoting.remoting_allow) and all(network.prefixlen for network in remoting.remoting_allow)
    is_guarded = tls is not None and credentials is not None
    return Access(tls, credentials, remoting.remoting_allow, not (is_near or is_narrow or is_guarded))


def _read_secret_key(path: Path) -> bytes:
    remedy = "write the secretKey there that clients sign with, alone on its line"
    return read_secret(path, "remoting_secret_key_file", what="secret key", least=1, remedy=remedy)


def _as_java_sorts(fields: dict[str, str]) -> list[str]:
    # A TreeMap of strings: by UTF-16, where what lies beyond U+FFFF comes before U+E000.
    names = sorted(fields)
    if not all(name.isascii() for name in names):
        names.sort(key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    return names


def _is_same(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), known.encode("utf-8", "replace"))


#: Why one that came was not let in; why one that was in was closed by us.
REFUSALS = ("allow", "full", "tls")
CLOSURES = ("bytes", "slow", "idle", "untaken", "memory")
#: How a request ended, the label ``result`` of its metric.
RESULTS = ("ok", "empty", "refused", "error")
#: The label of requests whose code has no name here: a client could make any number of them.
OTHER = "other"

_NAMES = {int(code): code.name for code in RequestCode}
_EMPTY = frozenset(
    {
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
_REFUSED = frozenset(
    {
        ResponseCode.NO_PERMISSION,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        ResponseCode.SERVICE_NOT_AVAILABLE,
    }
)


class RemotingCounts:
    """One for a server: it begins anew when the outlet does. Bytes are those of the protocol, without TLS."""

    def __init__(self) -> None:
        self.connections = 0
        self.connections_total = 0
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.closed = dict.fromkeys(CLOSURES, 0)
        self.requests: Counter[tuple[str, str]] = Counter()
        self.received_bytes = 0
        self.sent_bytes = 0

    def __repr__(self) -> str:
        return f"RemotingCounts({self.connections} connections, {self.requests.total()} requests)"

    def ended(self, request: int, response: int | None, times: int = 1) -> None:
        """So many requests are over; ``response``: the code of their answers, None for one that gets none."""
        self.requests[_NAMES.get(request, OTHER), result_of(request, response)] += times

    def row(self, address: str) -> dict[str, Any]:
        """What the board shows: {"address": .., "requests": {"QUERY_MESSAGE": {"ok": 7}}, ...}; never changed later."""
        requests: dict[str, dict[str, int]] = {}
        for (code, result), count in sorted(self.requests.items()):
            requests.setdefault(code, {})[result] = count
        return {
            "address": address,
            "connections": self.connections,
            "connectionsTotal": self.connections_total,
            "refused": dict(self.refused),
            "closed": dict(self.closed),
            "requests": requests,
            "receivedBytes": self.received_bytes,
            "sentBytes": self.sent_bytes,
        }


def result_of(request: int, response: int | None) -> str:
    """ok, empty (nothing is there), refused (no right, busy, not supported, nobody behind us) or error."""
    if response is None or response == ResponseCode.SUCCESS:
        return "ok"
    if response in _EMPTY:
        return "empty"
    # The broker too has no other code for an offset where no message is.
    if request == RequestCode.VIEW_MESSAGE_BY_ID and response == ResponseCode.SYSTEM_ERROR:
        return "empty"
    return "refused" if response in _REFUSED else "error"


HELD_MAX = 256 << 20
UNTAKEN_MAX = 256 << 20
# Room is made for more than the one that has just asked, or each of the next would look at all again.
_MAKE_RATIO = 0.75
# What a task takes, whatever its request holds; and its fields, as objects, beside their bytes.
_TASK_SIZE = 4096
_FIELD_SIZE = 16
_HEADER_MASK = 0xFFFFFF


class Guest(Protocol):
    """A connection, as the room sees it; both numbers are the room's to keep."""

    held: int
    untaken: int

    def weigh(self) -> int:
        """How much of its answers it has not taken, now."""

    def end(self, reason: str) -> None:
        """Close it at once; it leaves the room by itself, later."""


class Room:
    """Sizes in bytes: ``held`` are requests, unfinished and under way; ``untaken`` answers, as of each one's last look.

    What a connection leaves behind (requests under way when it closed) is held until it ends.
    """

    def __init__(self, held_max: int = HELD_MAX, untaken_max: int = UNTAKEN_MAX) -> None:
        self._held_max, self._untaken_max = held_max, untaken_max
        self.guests: set[Guest] = set()
        self.held = self.untaken = 0

    def __repr__(self) -> str:
        return f"Room({len(self.guests)} connections, {self.held} bytes held, {self.untaken} untaken)"

    @property
    def is_tight(self) -> bool:
        """Whether half of what may be held is."""
        return 2 * self.held > self._held_max

    def enter(self, guest: Guest) -> None:
        """It may hold something from now on."""
        self.guests.add(guest)

    def leave(self, guest: Guest) -> None:
        """Its answers are gone with it; what it holds still is given back by ``hold``."""
        self.guests.discard(guest)
        self.untaken -= guest.untaken
        guest.untaken = 0

    def hold(self, guest: Guest, size: int) -> None:
        """So much more, or less."""
        guest.held += size
        self.held += size
        if size > 0 and self.held > self._held_max:
            self._make(lambda one: one.held, self.held - int(_MAKE_RATIO * self._held_max))

    def keep(self, guest: Guest, untaken: int) -> None:
        """So much it has not taken now."""
        self.untaken += untaken - guest.untaken
        guest.untaken = untaken
        if self.untaken > self._untaken_max:
            for one in self.guests:
                size = one.weigh()
                self.untaken += size - one.untaken
                one.untaken = size
            if self.untaken > self._untaken_max:
                self._make(lambda one: one.untaken, self.untaken - int(_MAKE_RATIO * self._untaken_max))

    def _make(self, size_of: Callable[[Guest], int], size: int) -> None:
        for guest in sorted(self.guests, key=size_of, reverse=True):
            if size <= 0:
                return
            size -= size_of(guest)
            guest.end("memory")


def weight_of(frame: bytes | bytearray) -> int:
    """What a request holds while it runs: a task, its bytes, and its header's fields as objects beside them."""
    header_size = int.from_bytes(frame[:4], "big") & _HEADER_MASK
    return _TASK_SIZE + len(frame) + _FIELD_SIZE * header_size


@dataclass(frozen=True, slots=True)
class Hall:
    """``frame_max``: bytes of a request, its length field not counted; ``idle_seconds`` without any sign of life.

    ``under_way_max``: requests that run at once for one connection, long polls among them.
    """

    processor: Processor
    room: Room
    counts: RemotingCounts
    log: SparingLog
    frame_max: int
    idle_seconds: float
    under_way_max: int


#: Without an upstream no request needs more: the largest are signed queries, and the heartbeats of clients.
FRAME_MAX_ALONE = 1 << 20
#: Requests that run at once for one connection. A consumer has a long poll under way for each of its queues.
UNDER_WAY_MAX, UNDER_WAY_UPSTREAM_MAX = 256, 4096
# All three, and what closing the queries takes, are less than the outlet is given (serve.server).
_LEAVE_SECONDS, _ABORT_SECONDS, _CLOSE_SECONDS = 1.5, 0.3, 0.5
# Until TLS has begun, and until it has ended.
_HANDSHAKE_SECONDS, _SHUTDOWN_SECONDS = 5.0, 1.0
_LOOK_SECONDS = 1.0
_ACCEPTED_AT_ONCE = 64
_PAUSE_SECONDS = 1.0
_DESCRIPTORS = resource.RLIMIT_NOFILE
# Descriptors that indexing, queries and HTTP need beside the connections.
_DESCRIPTORS_KEPT = 512
_CONNECTIONS_LEAST = 16
# struct linger: closed at once, by a reset.
_RESET = struct.pack("ii", 1, 0)
_OPEN = (
    "give remoting_access_key with remoting_secret_key_file and TLS, or remoting_allow with the networks of your "
    "clients, or listen on 127.0.0.1"
)


async def serve_remoting(config: Config, board: Board, log: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serve until ``stop``; what is under way then is finished, or broken off after seconds.

    ``listening`` stays open for another try. UsageError if keys or certificate cannot be used.
    """
    access = read_access(config)
    if access.is_open:
        signed = access.credentials is not None
        log.warning(
            "remoting_open", remoting=config.remoting.remoting, signed=signed, tls=access.tls is not None, hint=_OPEN
        )
    queries = Queries(config, board, config.remoting.remoting_queries_max, load_key_queries)
    processor = RemotingProcessor(config, board, log, access, queries)
    try:
        server = RemotingServer(config, board, log, listening, processor, access)
        await server.run(stop, queries.stop)
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(processor.close(), _CLOSE_SECONDS)
        queries.stop()
        # In another thread: a query may be under way, and it is waited for.
        left = await asyncio.to_thread(queries.close)
        if left:
            log.warning("queries_left_behind", queries=left)


class RemotingServer:
    """Accepts connections, looks at each once a second, and writes on the board what they did.

    A connection counts from its first moment on, not from the end of a TLS handshake that may never come.
    """

    def __init__(
        self, config: Config, board: Board, log: Any, listening: socket.socket, processor: Processor, access: Access
    ) -> None:
        remoting = config.remoting
        is_alone = not remoting.upstream_namesrv
        frame_max = min(remoting.remoting_frame_max, FRAME_MAX_ALONE) if is_alone else remoting.remoting_frame_max
        self._board, self._log, self._access = board, log, access
        self._counts, self._room = RemotingCounts(), Room()
        under_way_max = UNDER_WAY_MAX if is_alone else UNDER_WAY_UPSTREAM_MAX
        times = (remoting.remoting_idle_timeout, under_way_max)
        self._hall = Hall(processor, self._room, self._counts, SparingLog(log), frame_max, *times)
        self._most = _connections_max(remoting.remoting_connections_max, 1 if is_alone else 2, log)
        self._address = address_of(*listening.getsockname()[:2])
        self._listening = listening.dup()
        self._listening.setblocking(False)
        self._times: dict[str, Any] = {}
        if access.tls is not None:
            self._times = {"ssl_handshake_timeout": _HANDSHAKE_SECONDS, "ssl_shutdown_timeout": _SHUTDOWN_SECONDS}
        self._is_tls = access.tls is not None
        self._opening: set[asyncio.Task[None]] = set()
        self._is_over, self._is_empty = False, asyncio.Event()

    def __repr__(self) -> str:
        return f"RemotingServer({self._address}, {self._counts})"

    async def run(self, stop: asyncio.Event, on_stop: Callable[[], None]) -> None:
        """Until ``stop``; then ``on_stop`` is called, and connections end as what is under way of them ends."""
        loop = asyncio.get_running_loop()
        try:
            self._listen()
            while not stop.is_set():
                for connection in self._connections():
                    connection.look(loop.time())
                self._tell()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _LOOK_SECONDS)
        finally:
            self._is_over = True
            loop.remove_reader(self._listening)
            self._listening.close()
            on_stop()
            await self._leave()
            self._tell()

    def _tell(self) -> None:
        upstream = self._hall.processor.row()
        self._board.outlets["remoting"] = {**self._counts.row(self._address), "upstream": upstream}

    def _connections(self) -> list[Connection]:
        return [guest for guest in self._room.guests if isinstance(guest, Connection)]

    async def _leave(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in self._connections():
            connection.leave()
        await self._wait_until_gone(_LEAVE_SECONDS)
        late = self._connections()
        if late:
            self._log.warning("remoting_cut_off", connections=len(late))
        for connection in late:
            connection.abort()
        await self._wait_until_gone(_ABORT_SECONDS)

    async def _wait_until_gone(self, seconds: float) -> None:
        if self._counts.connections:
            self._is_empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), seconds)

    # --- accepting --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._is_over:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                peer, place = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors: they wait in the kernel meanwhile
                self._hall.log.warning("remoting_full", connections=self._counts.connections, problem=str(error))
                loop.remove_reader(self._listening)
                loop.call_later(_PAUSE_SECONDS, self._listen)
                return
            reason = self._refusal(place[0])
            if reason is not None:
                self._counts.refused[reason] += 1
                with contextlib.suppress(OSError):
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                peer.close()
                continue
            self._counts.connections += 1
            self._counts.connections_total += 1
            task = loop.create_task(self._open(peer, address_of(*place[:2])))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _refusal(self, host: str) -> str | None:
        if not self._access.admits(host):
            self._hall.log.warning("remoting_not_allowed", peer=host, key="remoting_allow")
            return "allow"
        if self._counts.connections >= self._most:
            self._hall.log.warning("remoting_full", connections=self._counts.connections)
            return "full"
        return None

    async def _open(self, peer: socket.socket, name: str) -> None:
        try:
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self._hall, name, address_of(*peer.getsockname()[:2]), is_tls=self._is_tls)
            connection.on_close(self._release)
        except OSError:  # gone already
            peer.close()
            self._release()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, peer, ssl=self._access.tls, **self._times
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            with contextlib.suppress(OSError):
                peer.close()
            if not connection.was_made:  # or it tells by itself that it has ended
                self._counts.refused["tls"] += self._is_tls
                self._release()

    def _release(self) -> None:
        self._counts.connections -= 1
        if self._counts.connections == 0:
            self._is_empty.set()


def address_of(host: str, port: int) -> str:
    """``127.0.0.1:9577``; IPv6 in brackets, and an IPv4-mapped address as the IPv4 address that it is."""
    if ":" not in host:
        return f"{host}:{port}"
    mapped = host.removeprefix("::ffff:")
    return f"{mapped}:{port}" if "." in mapped and ":" not in mapped else f"[{host}]:{port}"


def _connections_max(wanted: int, descriptors_each: int, log: Any) -> int:
    # As many as descriptors are left for, once the process has taken all that it may: the index needs its own.
    soft, hard = (2**62 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(_DESCRIPTORS))
    need = wanted * descriptors_each + _DESCRIPTORS_KEPT
    if soft < min(need, hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(_DESCRIPTORS, (min(need, hard), resource.getrlimit(_DESCRIPTORS)[1]))
            soft = min(need, hard)
    if soft >= need:
        return wanted
    most = min(wanted, max((soft - _DESCRIPTORS_KEPT) // descriptors_each, _CONNECTIONS_LEAST))
    log.warning("remoting_descriptors", connections_max=most, wanted=wanted, descriptors=soft, hint="raise LimitNOFILE")
    return most
