"""RocketMQ's own classes, for tests that compare with the real thing.

::

    generate(tmp_path / "store", count=2000, profile="varied")        # a store, written by DefaultMessageStore
    with start("Store", "write", *arguments(store=tmp_path / "live", count=500, hold=True)) as writer:
        writer.line(60)                                                # "ready": the store is open
        writer.figures(60)                                             # all dispatched; open until the block ends
    with Broker(tmp_path / "broker", messageIndexEnable=False) as broker:
        run("Client", "send", *arguments(namesrv=broker.namesrv, count=200, out=tmp_path / "sent.jsonl"))

A test file says ``pytestmark = REAL``, a single test ``@requires_rocketmq``. Whatever a JVM prints or logs lands in the
``home`` it was given (or beside the store), never in the tree; everything here talks to loopback only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pytest

from support.missing import missing, requires
from support.rocketmq_jvm import (
    Program,
    RocketMQError,
    arguments,
    end,
    figures_of,
    java,
    run,
    start,
    tail,
    value_of,
    why_missing,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = [
    "REAL",
    "Broker",
    "Program",
    "RocketMQError",
    "arguments",
    "generate",
    "java",
    "mqadmin",
    "requires_rocketmq",
    "run",
    "start",
    "why_missing",
]

HALTED = 137  # what Store write exit=halt ends with
BOOT_SECONDS = 90
STOP_SECONDS = 60
BROKER_CONF: dict[str, object] = {
    "brokerClusterName": "TestCluster",
    "brokerName": "test",
    "brokerId": 0,
    "brokerIP1": "127.0.0.1",
    "brokerIP2": "127.0.0.1",
    "bindAddress": "127.0.0.1",
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 6000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 4000,
    "maxMessageSize": 262144,
    "diskMaxUsedSpaceRatio": 95,
    "fileReservedTime": 24 * 3653,
    "cleanFileForciblyEnable": False,
    "timerWheelEnable": False,
}

Test = TypeVar("Test", bound="Callable[..., Any]")


def _need_rocketmq() -> None:
    reason = why_missing()
    if reason is not None:
        missing(f"RocketMQ's own classes cannot be run: {reason}")


REAL = [pytest.mark.real, requires(_need_rocketmq)]


def requires_rocketmq(test: Test) -> Test:
    """Marks one test as ``real``: the classes are built when it starts."""
    for mark in REAL:
        test = mark(test)
    return test


def generate(store: Path, *, timeout: float = 600, **options: object) -> dict[str, Any]:
    """Runs ``Store write`` to its end and returns its figures; logs go to ``<store>.jvm`` beside the store."""
    words = arguments(store=store, **options)
    ends_with = HALTED if options.get("exit") == "halt" else 0
    home = store.with_name(store.name + ".jvm")
    return figures_of(run("Store", "write", *words, timeout=timeout, home=home, ends_with=ends_with).splitlines()[-1])


def mqadmin(namesrv: str, *args: str, home: Path | None = None, timeout: float = 60) -> str:
    """What ``mqadmin ARGS`` prints when it asks the given name server."""
    flags = (f"-Drocketmq.namesrv.addr={namesrv}",)
    return run("org.apache.rocketmq.tools.command.MQAdminStartup", *args, home=home, flags=flags, timeout=timeout)


def _free_block(count: int) -> int:
    """The first of ``count`` successive ports that nobody listens on, below those the kernel hands out itself."""
    for _ in range(200):
        first = random.randrange(20_000, 32_000 - count)
        try:
            with contextlib.ExitStack() as sockets:
                for port in range(first, first + count):
                    sockets.enter_context(socket.socket()).bind(("", port))
        except OSError:
            continue
        return first
    raise RocketMQError(f"found no {count} free ports in a row")


def _knows_a_broker(namesrv_port: int) -> bool:
    """Asks a name server (remoting request 105) for the topic that every broker which makes topics announces."""
    request = {"code": 105, "language": "JAVA", "version": 0, "opaque": 1, "flag": 0, "extFields": {"topic": "TBW102"}}
    header = json.dumps(request).encode()
    with socket.create_connection(("127.0.0.1", namesrv_port), timeout=10) as connection:
        connection.sendall(struct.pack(">II", 4 + len(header), len(header)) + header)
        with connection.makefile("rb") as answer:
            _, size = struct.unpack(">II", answer.read(8))
            return bool(json.loads(answer.read(size))["code"] == 0)


class Broker:
    """A real name server and a real broker, both on loopback, with small files; ready when the ``with`` block begins.

    ``store`` is ``home/store`` unless told otherwise; further arguments are keys of broker.conf and win over the small
    sizes in BROKER_CONF. RocketMQ's logs are in ``home/broker/logs`` and ``home/namesrv/logs``. ``stop`` ends both in
    order; ``kill`` ends the broker as kill -9 does, leaving its abort file. RocketMQ offers no way to bind its
    replication port (HA) to one address; everything else listens on loopback.
    """

    def __init__(self, home: Path, store: Path | None = None, **conf: object) -> None:
        first = _free_block(6)
        self.home = home
        self.store = store or home / "store"
        self.namesrv_port = first
        self.namesrv = f"127.0.0.1:{first}"
        self.port = first + 3  # one below is free, two below is its second listener (VIP), one above replicates (HA)
        self.address = f"127.0.0.1:{self.port}"
        self._namesrv_conf = {"listenPort": first, "bindAddress": "127.0.0.1"}
        self._conf = BROKER_CONF | {
            "namesrvAddr": self.namesrv,
            "listenPort": self.port,
            "haListenPort": self.port + 1,
            "storePathRootDir": self.store,
            "storePathCommitLog": self.store / "commitlog",
            **conf,
        }
        self._processes: list[subprocess.Popen[bytes]] = []  # in the order they were started

    def __repr__(self) -> str:
        running = sum(process.poll() is None for process in self._processes)
        return f"Broker({self.address}, namesrv={self.namesrv}, store={self.store}, {running} of 2 running)"

    def __enter__(self) -> Self:
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            self._boot("org.apache.rocketmq.namesrv.NamesrvStartup", "namesrv", self._namesrv_conf)
            self._boot("org.apache.rocketmq.broker.BrokerStartup", "broker", self._conf)
            self._wait_for_route()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The broker's process id."""
        return self._processes[1].pid

    def stop(self) -> None:
        """Ends the broker as an operator would (it takes ten seconds), then the name server, which keeps nothing."""
        for process in self._processes[1:]:
            end(process, signal.SIGTERM, STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the broker, then the name server, with SIGKILL."""
        for process in reversed(self._processes):
            end(process, signal.SIGKILL, STOP_SECONDS)

    def mqadmin(self, *args: str) -> str:
        """What ``mqadmin ARGS`` prints, asked of this name server."""
        return mqadmin(self.namesrv, *args, home=self.home / "mqadmin")

    def _wait_for_route(self) -> None:
        """The broker says that it is up without waiting for its name server; its next try is 10 seconds later."""
        deadline = time.monotonic() + BOOT_SECONDS
        while not _knows_a_broker(self.namesrv_port):
            if time.monotonic() > deadline:
                raise RocketMQError(f"the name server knows no broker: {tail(self.home / 'broker.out')}")
            time.sleep(0.05)

    def _boot(self, main: str, name: str, conf: dict[str, Any]) -> None:
        """Starts one server and waits until it says that it is up."""
        path = self.home / f"{name}.conf"
        path.write_text("".join(f"{key}={value_of(value)}\n" for key, value in conf.items()), encoding="utf-8")
        log = self.home / f"{name}.out"
        environment = {k: v for k, v in os.environ.items() if k != "NAMESRV_ADDR"} | {"ROCKETMQ_HOME": str(self.home)}
        with log.open("wb") as out:
            command = java(main, "-c", str(path), home=self.home / name)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        self._processes.append(process)
        deadline = time.monotonic() + BOOT_SECONDS
        while b"boot success" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RocketMQError(f"the {name} is not up, exit status {process.poll()}: {tail(log)}")
            time.sleep(0.05)
