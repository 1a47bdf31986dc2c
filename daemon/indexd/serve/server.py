"""ServeThread: the event loop of everything that is shown and answered, beside the one that indexes.

It is up before recovery begins and until the last flush is done. Whatever goes wrong in an outlet is logged and the
outlet starts again, later each time; indexing never waits for it.

Workers: threads that answer questions for an event loop, as few as keep up with them.

Questions are short and mostly Python: two threads that run at the same time spend more on handing the interpreter to
each other than on answers, and so do a worker and the event loop. So one thread answers all that has come in one turn
of the loop, and the loop is told when all of it is answered. A second thread helps when the oldest question has waited:
then the first is held up by a disk or a long walk; what it has answered by then is fetched.

Long questions take turns with short ones: one that has had its first turn while others wait begins anew behind them
(``give_way``), and from then on answers those that come meanwhile before it goes on.

What decides who may ask, as every outlet reads it: secret and certificate files, and who an address reaches.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from indexd.config import OFF, Config, split_address
from indexd.errors import DiskError, IndexdError, UsageError
from indexd.serve.board import Board
from indexd.serve.http.guard import read_access
from indexd.serve.remoting.server import read_access as read_remoting_access
from indexd.serve.remoting.upstream import read_link_settings
from indexd.storage.disk import Disk

Logger = Any
Outlet = Callable[[asyncio.Event], Awaitable[None]]

_RESTART_SECONDS = (1.0, 60.0)
# A run this long makes the next restart a quick one again.
_STEADY_SECONDS = 60.0
# So long recovery waits for the thread to be there, which it is at once.
_START_SECONDS = 5.0
# What is under way at a stop may take so long.
_LEAVE_SECONDS = 5.0
_BACKLOG = 1024


async def serve_http(config: Config, board: Board, log: Logger, listening: socket.socket, stop: asyncio.Event) -> None:
    """HTTP until ``stop``. What it is made of is a third of a start's time and memory: loaded in its own thread."""
    from indexd.serve.http import server  # noqa: PLC0415 - loads FastAPI and uvicorn

    await server.serve_http(config, board, log, listening, stop)


async def serve_remoting(
    config: Config, board: Board, log: Logger, listening: socket.socket, stop: asyncio.Event
) -> None:
    """RocketMQ's protocol until ``stop``."""
    from indexd.serve.remoting import server  # noqa: PLC0415 - a daemon that does not speak it need not load it

    await server.serve_remoting(config, board, log, listening, stop)


async def publish(config: Config, board: Board, log: Logger, stop: asyncio.Event) -> None:
    """MQTT until ``stop``."""
    from indexd.serve import mqtt  # noqa: PLC0415 - loads aiomqtt and paho

    await mqtt.publish(config, board, log, stop)


class ServeThread:
    """A context manager around the daemon's whole life; UsageError when token or certificate cannot be used.

    An address that cannot be listened on (a port that another still holds, an interface that is not up yet at boot) is
    said and tried again: the index must not wait for it.
    """

    def __init__(self, config: Config, board: Board, log: Logger) -> None:
        self._board, self._log = board, log
        self._config = config
        #: Of the outlets that listen, by name, which is also the key of the address: where, and the socket once it is.
        self._addresses: dict[str, str] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._outlets: dict[str, Outlet] = {}
        # What cannot be used of files is said at the start, not at each try.
        if config.http.http != OFF:
            read_access(config)
            self._addresses["http"], self._outlets["http"] = config.http.http, self._http
        if config.remoting.remoting != OFF:
            read_remoting_access(config)
            read_link_settings(config)
            self._addresses["remoting"], self._outlets["remoting"] = config.remoting.remoting, self._remoting
        elif config.remoting.unused:
            log.warning("remoting_unused", keys=list(config.remoting.unused), hint="give --remoting HOST:PORT")
        if config.mqtt.mqtt_host is not None:
            self._outlets["mqtt"] = lambda stop: publish(config, board, log, stop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serve", daemon=True)

    def __enter__(self) -> ServeThread:
        for name, address in self._addresses.items():
            if is_number(address):
                with suppress(UsageError):  # its outlet tries again at once, and says why it cannot
                    self._listen(name)
        if self._outlets:
            self._thread.start()
            self._ready.wait(_START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        if self._thread.is_alive():
            if self._loop is not None and self._stop is not None:
                with suppress(RuntimeError):  # the loop has ended by itself
                    self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(2 * _LEAVE_SECONDS)
            if self._thread.is_alive():
                self._log.warning("outlets_left_behind", seconds=2 * _LEAVE_SECONDS)
        for listening in self._sockets.values():
            listening.close()

    def _run(self) -> None:
        # A loop that cannot be made, for want of descriptors, or that ends is made again, later each time.
        seconds = _RESTART_SECONDS[0]
        while not self._leave.is_set():
            try:
                self._run_loop()
            except Exception as error:  # noqa: BLE001 - whatever it is, the index goes on without what is shown
                self._log.error("outlet_failed", outlet="all", problem=repr(error), retry_seconds=seconds)
            self._ready.set()
            self._leave.wait(seconds)
            seconds = min(2 * seconds, _RESTART_SECONDS[1])

    def _run_loop(self) -> None:
        # Not by asyncio.run, which waits for every query that still runs in a thread.
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        stop = self._stop
        if self._leave.is_set():
            return
        tasks = [asyncio.create_task(self._keep(name, outlet, stop)) for name, outlet in self._outlets.items()]
        self._ready.set()
        await stop.wait()
        _, late = await asyncio.wait(tasks, timeout=_LEAVE_SECONDS)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_LEAVE_SECONDS / 2)
        if late:
            self._log.warning("outlets_cut_off", outlets=len(late))

    async def _http(self, stop: asyncio.Event) -> None:
        await serve_http(self._config, self._board, self._log, await self._listening("http"), stop)

    async def _remoting(self, stop: asyncio.Event) -> None:
        await serve_remoting(self._config, self._board, self._log, await self._listening("remoting"), stop)

    async def _listening(self, name: str) -> socket.socket:
        if name not in self._sockets:
            await asyncio.to_thread(self._listen, name)
        return self._sockets[name]

    def _listen(self, name: str) -> None:
        listening = self._sockets[name] = listen(self._addresses[name], name)
        host, port = listening.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        setattr(self._board, name, address)
        self._log.info("listening", **{name: address})

    async def _keep(self, name: str, outlet: Outlet, stop: asyncio.Event) -> None:
        seconds = _RESTART_SECONDS[0]
        while not stop.is_set():
            started = time.monotonic()
            problem = "it ended"
            try:
                await outlet(stop)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the same; uvicorn ends by sys.exit
                problem = error.line() if isinstance(error, IndexdError) else repr(error)
            if stop.is_set():
                return
            if time.monotonic() - started > _STEADY_SECONDS:
                seconds = _RESTART_SECONDS[0]
            self._log.error("outlet_failed", outlet=name, problem=problem, retry_seconds=seconds)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)
            seconds = min(2 * seconds, _RESTART_SECONDS[1])


def is_number(address: str) -> bool:
    """Whether the host is an address of numbers: nobody has to be asked for it, which may take long."""
    try:
        ipaddress.ip_address(split_address(address)[0])
    except ValueError:
        return False
    return True


def listen(address: str, key: str = "http") -> socket.socket:
    """A listening socket; UsageError says why there is none, and which ``key`` of the configuration to change."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"cannot listen on {address}: {reason}", f"give another --{key} HOST:PORT, or --{key} {OFF}"
        ) from error
    return listening


_LOOK_SECONDS = 0.02
#: Who has waited longer is told so; nobody waits for an answer then.
PATIENCE_SECONDS = 5.0
# A long question has waited for others that came later: it may wait longer.
_LONG_PATIENCE = 4
_TURN_SECONDS = 0.01
# So many of them at once: more only take the interpreter from each other, and from the event loop.
_LONG_AT_ONCE = 2


class TurnOverError(Exception):
    """A question has had its first turn: it is asked again behind those that have had none."""


class TooManyError(Exception):
    """As many wait as may, or this one has waited too long."""


class StoppedError(Exception):
    """No questions are answered any more."""


@dataclass(slots=True)
class _Question:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    asked: float
    #: It has had its first turn.
    is_long: bool = False
    #: When it gives way: the thread's own time at the end of its first turn, None until it has looked; then the clock.
    gives_way: float | None = None


class Workers:
    """At most ``threads_max`` threads and ``waiting_max`` questions that wait.

    All methods but ``close`` are the event loop's.
    """

    def __init__(self, threads_max: int, waiting_max: int) -> None:
        self._threads_max, self._waiting_max = threads_max, waiting_max
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Those that have had no turn, and those that have had one.
        self._waiting: deque[_Question] = deque()
        self._long: deque[_Question] = deque()
        self._long_running = 0
        #: What a thread works at, the last one answered within those before it.
        self._work_of = threading.local()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_starting = False
        self._lock = threading.Lock()
        self._active = 0
        self._parked: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Workers({self._active} of {self._threads_max} work, {len(self._waiting)} questions wait)"

    async def ask(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns or raises in a worker; TooManyError, StoppedError."""
        if self._is_closed:
            raise StoppedError
        if len(self._waiting) + len(self._long) >= self._waiting_max:
            raise TooManyError
        loop = self._loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append(_Question(call, future, time.monotonic()))
        with self._lock:
            is_idle = self._active == 0
        if is_idle and not self._is_starting:
            self._is_starting = True
            loop.call_soon(self._start, loop)
        return await future

    def give_way(self) -> float:
        """Called again and again by a question while it is answered; the seconds for which it was held up by that.

        Those that wait for their first turn are answered now, as many as wait; but one that is in its own first turn
        ends by TurnOverError when that is over.
        """
        running: list[_Question] = getattr(self._work_of, "questions", [])
        if not (running and self._waiting) and len(running) < 2:
            return 0.0
        question = running[-1]
        if not question.is_long:
            # By the thread's own time: a machine that has much to do makes no short question a long one.
            used = time.thread_time()
            if question.gives_way is None:
                question.gives_way = used + _TURN_SECONDS
            if used >= question.gives_way:
                raise TurnOverError
            return 0.0
        now = time.monotonic()
        if question.gives_way is not None and now < question.gives_way:
            return 0.0
        for _ in range(len(self._waiting)):
            with suppress(IndexError):  # another thread has taken it
                self._answer(self._waiting.popleft())
        self._tell()
        ended = time.monotonic()
        question.gives_way = 2 * ended - now  # as long as it has waited it goes on
        return ended - now

    def stop(self) -> None:
        """Questions that wait or are still to come are not asked; each thread ends behind the one that it is at."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting or self._long:
            with suppress(IndexError), self._lock:  # a thread has taken it
                lane = self._waiting or self._long
                self._done.append((lane.popleft().future, None, StoppedError()))
        self._deliver()
        with self._lock:
            parked, self._parked = self._parked, []
        for latch in parked:
            latch.release()

    def close(self, seconds: float) -> int:
        """Wait so long for the threads of stopped workers, in any thread: how many are left, which hold up nothing."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return sum(thread.is_alive() for thread in self._threads)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_starting = False
        if not self._is_closed:
            self._activate()
            if self._timer is None:
                self._timer = loop.call_later(_LOOK_SECONDS, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._deliver()
        with self._lock:
            active = self._active
        self._timer = None
        if active == 0 or self._is_closed:
            return
        with suppress(IndexError):  # another thread empties it
            lane = self._waiting or self._long
            if time.monotonic() - lane[0].asked >= _LOOK_SECONDS and active < self._threads_max:
                self._activate()
        self._timer = loop.call_later(_LOOK_SECONDS, self._look, loop)

    def _activate(self) -> None:
        with self._lock:
            self._active += 1
            latch = self._parked.pop() if self._parked else None
        if latch is not None:
            latch.release()
            return
        thread = threading.Thread(target=self._work, name=f"query-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory for a thread
            self._has_no_thread()
        else:
            self._threads.append(thread)

    def _has_no_thread(self) -> None:
        # Those that are there go on; where there is none, nobody waits for nothing.
        with self._lock:
            self._active -= 1
            is_idle = self._active == 0
        if is_idle:
            while self._waiting:
                self._done.append((self._waiting.popleft().future, None, TooManyError()))
            self._deliver()

    def _work(self) -> None:
        latch = threading.Lock()
        latch.acquire()
        while True:
            if self._is_over():
                self._tell()
                return
            question = self._next()
            if question is None:
                self._tell()
                with self._lock:
                    # Whoever asks looks at the number of the active behind its question, and ``stop`` at the parked
                    # behind its word, both under the same lock.
                    if self._waiting or self._may_be_long() or self._is_over():
                        continue
                    self._active -= 1
                    self._parked.append(latch)
                latch.acquire()
                continue
            was_long = question.is_long
            self._answer(question)
            with self._lock:
                self._long_running -= was_long

    def _next(self) -> _Question | None:
        with suppress(IndexError):
            return self._waiting.popleft()
        with self._lock:
            if not self._may_be_long():
                return None
            self._long_running += 1
            return self._long.popleft()

    def _may_be_long(self) -> bool:
        # Under the lock, as all that takes one out of the lane.
        return bool(self._long) and self._long_running < _LONG_AT_ONCE

    def _is_over(self) -> bool:
        return self._is_closed

    def _answer(self, question: _Question) -> None:
        answer, error = None, None
        if question.future.cancelled():
            return
        running = self._work_of.__dict__.setdefault("questions", [])
        running.append(question)
        try:
            patience = PATIENCE_SECONDS * (_LONG_PATIENCE if question.is_long else 1)
            if time.monotonic() - question.asked > patience:
                raise TooManyError
            answer = question.call()
        except TurnOverError:
            question.is_long, question.asked, question.gives_way = True, time.monotonic(), None
            self._long.append(question)
            return
        except BaseException as raised:  # noqa: BLE001 - it is raised again where the question came from
            error = raised
        finally:
            running.pop()
        self._done.append((question.future, answer, error))

    def _tell(self) -> None:
        if self._done and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._done:
            future, answer, error = self._done.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)


_SECRET_BYTES_MAX = 4096
_NO_PLAIN_FILE = (errno.EISDIR, errno.EINVAL)
_TLS_HINT = "give a PEM chain and its key without a password"


def read_secret(path: Path, key: str, *, what: str, least: int, remedy: str) -> bytes:
    """The one line of printable ASCII that the file holds, which ``key`` of the configuration names.

    UsageError if it cannot be read or is none of ``least`` to 4,096 bytes; it never shows what is there instead.
    """
    try:
        secret = Disk().read(path).strip()
    except DiskError as error:
        hint = f"give a file with the {what}" if error.errno in _NO_PLAIN_FILE else error.hint
        raise UsageError(f"{error.args[0]} ({key})", hint) from error
    if not least <= len(secret) <= _SECRET_BYTES_MAX or not all(0x21 <= byte <= 0x7E for byte in secret):
        bounds = f"{least} to {_SECRET_BYTES_MAX} printable characters without spaces"
        raise UsageError(f"{path} ({key}) holds no {what}: {bounds}", remedy)
    return secret


def read_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """What a server needs to speak TLS 1.2 or later with this chain and key; UsageError if they cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        is_other = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        hint = "give the key that belongs to the certificate" if is_other else _TLS_HINT
        raise UsageError(f"cannot use {cert} and {key} for TLS: {reason}", hint) from error
    return context


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there. Of names, localhost alone does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
