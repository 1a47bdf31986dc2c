"""ServeThread: the event loop of everything that is shown and answered, beside the one that indexes.

It is up before recovery begins and until the last flush is done. Whatever goes wrong in an outlet is logged and the
outlet starts again, later each time; indexing never waits for it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import uvloop

from indexd.config import OFF, Config, split_address
from indexd.dispatch.reput import pause
from indexd.errors import IndexdError, UsageError
from indexd.serve.access_files import read_http_access
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.remoting.access import read_access
from indexd.serve.remoting.upstream import read_upstream_tls

_RESTART_SECONDS = (1.0, 60.0)
# A run this long makes the next restart a quick one again.
_STEADY_SECONDS = 60.0
# What is under way at a stop may take so long.
_LEAVE_SECONDS = 5.0


class ServeThread:
    """A context manager around the daemon's whole life; UsageError when token or certificate cannot be used.

    An address that cannot be listened on (a port that another still holds, an interface that is not up yet at boot) is
    said and tried again: the index must not wait for it.
    """

    def __init__(self, config: Config, status: DaemonStatus, log: Any) -> None:
        self._config, self._status, self._log = config, status, log
        #: Of the outlets that listen, by name, which is also the key of the address: where, and the socket once it is.
        self._addresses: dict[str, str] = {}
        self._sockets: dict[str, socket.socket] = {}
        # What cannot be used of files is said at the start, not at each try.
        if config.http.http != OFF:
            read_http_access(config)
            self._addresses["http"] = config.http.http
        if config.remoting.remoting != OFF:
            read_access(config)
            read_upstream_tls(config)
            self._addresses["remoting"] = config.remoting.remoting
        self._outlets = [*self._addresses, *(["mqtt"] if config.mqtt.mqtt_host is not None else [])]
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="serve", daemon=True)

    def __enter__(self) -> ServeThread:
        if self._outlets:
            self._loop = uvloop.new_event_loop()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(2 * _LEAVE_SECONDS)
        if self._thread.is_alive():
            self._log.warning("outlets_left_behind", seconds=2 * _LEAVE_SECONDS)
        for listening in self._sockets.values():
            listening.close()

    def _run(self) -> None:
        # Not by asyncio.run, which waits for every query that still runs in a thread.
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(self._keep(name)) for name in self._outlets]
        await self._stop.wait()
        _, late = await asyncio.wait(tasks, timeout=_LEAVE_SECONDS)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_LEAVE_SECONDS / 2)
        if late:
            self._log.warning("outlets_cut_off", outlets=len(late))

    async def _outlet(self, name: str) -> None:
        # What each is made of is much of a start's time and memory: it is loaded when it is wanted, in this thread.
        given = self._config, self._status, self._log
        if name == "mqtt":
            from indexd.serve import mqtt  # noqa: PLC0415 - aiomqtt and paho

            await mqtt.publish(*given, self._stop)
        elif name == "http":
            from indexd.serve.http import server as http  # noqa: PLC0415 - starlette and uvicorn

            await http.serve_http(*given, self._sockets[name], self._stop)
        else:
            from indexd.serve.remoting import server as remoting  # noqa: PLC0415 - a daemon may not speak it

            await remoting.serve_remoting(*given, self._sockets[name], self._stop)

    def _listen(self, name: str) -> None:
        listening = self._sockets[name] = listen(self._addresses[name], name)
        host, port = listening.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        setattr(self._status, name, address)
        self._log.info("listening", **{name: address})

    async def _keep(self, name: str) -> None:
        seconds, stop = _RESTART_SECONDS[0], self._stop
        while not stop.is_set():
            started, problem = time.monotonic(), "it ended"
            try:
                if name in self._addresses and name not in self._sockets:
                    await asyncio.to_thread(self._listen, name)  # a name may have to be asked for
                await self._outlet(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the same; uvicorn ends by sys.exit
                problem = error.line() if isinstance(error, IndexdError) else repr(error)
            if stop.is_set():
                return
            seconds = _RESTART_SECONDS[0] if time.monotonic() - started > _STEADY_SECONDS else seconds
            self._log.error("outlet_failed", outlet=name, problem=problem, retry_seconds=seconds)
            await pause(stop, seconds)
            seconds = min(2 * seconds, _RESTART_SECONDS[1])


def listen(address: str, key: str = "http") -> socket.socket:
    """A listening socket; UsageError says why there is none, and which ``key`` of the configuration to change."""
    host, port = split_address(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_v6 = family == socket.AF_INET6  # [::] is every address, of both kinds
        return socket.create_server(place, family=family, backlog=1024, dualstack_ipv6=is_v6)
    except OSError as error:
        hint = f"give another --{key} HOST:PORT, or --{key} {OFF}"
        reason = str(error.strerror or error).partition(" (while attempting")[0]  # the library repeats the address
        raise UsageError(f"cannot listen on {address}: {reason}", hint) from error
