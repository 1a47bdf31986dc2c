"""A machine of its own: a real systemd as process 1 over this root file system, of which it changes nothing.

::

    with OwnSystemd(tmp_path) as machine:
        machine.run("systemctl", "start", "indexd")
        machine.shared                                   # /srv/shared in there

Everything that is written there goes into memory and is gone with it. Needs root; what a kernel refuses is missing
(support.missing).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import pytest

from support.daemon import QUICK, compile_kernels
from support.missing import installing, missing, need, need_root
from support.small_log import SIZES

T = TypeVar("T")
WAIT_SECONDS = 60.0
SHARED = Path("/srv/shared")
_REPOSITORY = Path(__file__).resolve().parents[2]
#: What has to be there as it is: this tree, its environment, and the Python that was made from.
PLACES = tuple(dict.fromkeys((_REPOSITORY, Path(sys.prefix), Path(sys.base_prefix))))
_SYSTEMD = "/lib/systemd/systemd"
_WHERE = "run this test on a machine of its own, not in a container"
_TARGET = "[Unit]\nDefaultDependencies=no\nWants=systemd-journald.service\n"
# $1 the work directory, $2 what is shared; the rest are directories that have to be there as they are.
_BOOT = f"""
set -e
work=$1 shared=$2 root=$1/root
shift 2
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$root"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do cp -a "/dev/$node" "$root/dev/$node"; done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mknod -m 0666 "$root/dev/ptmx" c 5 2
mount -t proc proc "$root/proc"
# What belongs to the whole kernel is not for this systemd to change.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
# Nothing starts but what a test starts: no sysctl, no udev, no mounts of this machine's fstab.
rm -rf "$root"/usr/lib/systemd/system/*.wants "$root"/etc/systemd/system/*.wants
rm -rf "$root/usr/lib/systemd/system-generators"
: > "$root/etc/fstab"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for place; do
    # On another device, or below what is covered by a directory in memory.
    if [ "$(stat -c %d "$place")" != "$(stat -c %d /)" ] || [ ! -e "$root$place" ]; then
        mkdir -p "$root$place"
        mount --rbind "$place" "$root$place"
    fi
    # The service's user has to get there; only the copy in memory is changed.
    while [ "$place" != / ]; do chmod o+rx "$root$place"; place=$(dirname "$place"); done
done
mkdir -p "$root{SHARED}" "$root/run/systemd/system"
mount --bind "$shared" "$root{SHARED}"
printf '{_TARGET!r}' > "$root/run/systemd/system/test.target"
mkdir -p "$root/run/systemd/journald.conf.d"
printf '[Journal]\\nReadKMsg=no\\nAudit=no\\nRateLimitIntervalSec=0\\n' > "$root/run/systemd/journald.conf.d/test.conf"
ln -s /dev/null "$root/run/systemd/system/systemd-journald-audit.socket"
rm -f "$root/etc/machine-id"
printf '%032d\\n' 1 > "$root/etc/machine-id"
exec chroot "$root" env -i container=indexd-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    {_SYSTEMD} --system --unit=test.target --log-target=journal --show-status=no
""".replace(repr(_TARGET), _TARGET.replace("\n", "\\n"))


class OwnSystemd:
    """For use in a ``with`` block; ``work`` is a directory for it alone."""

    def __init__(self, work: Path) -> None:
        need_root("start a systemd")
        need("ps")
        if not Path(_SYSTEMD).exists():
            missing(f"there is no {_SYSTEMD}; {installing('systemd')}")
        self._work, self.shared = work / "machine", work / "shared"
        for path in (self._work, self.shared):
            path.mkdir(parents=True)
        self.shared.chmod(0o755)
        self._errors = work / "machine.log"
        self._cgroup = _cgroup_root() / f"indexd-test-{os.getpid()}"
        try:
            self._cgroup.mkdir()
        except OSError as error:
            missing(f"no cgroup can be made for a systemd, {error}; {_WHERE}")
        # Dies with this process, and everything in it then.
        words = [need("setpriv"), "--pdeathsig", "KILL", need("unshare"), "--kill-child"]
        words += ["--propagation", "private", "-m", "-p", "-f", "-C", "-u", "-i", "-n", "sh", "-c", _BOOT, "sh"]
        enter = f'echo $$ > "{self._cgroup}/cgroup.procs" && exec "$@"'
        with self._errors.open("wb") as errors:
            self._holder = subprocess.Popen(
                ["sh", "-c", enter, "sh", *words, str(self._work), str(self.shared), *map(str, PLACES)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        self._inside: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        try:
            pid = self.wait_for(self._first_process, "systemd to start", end=missing)
            self._inside = (need("nsenter"), "-t", pid, "-m", "-p", "-u", "-i", "-n", "-C", "-r", "-w")
            self.wait_for(
                lambda: self._ask("systemctl", "is-active", "test.target").returncode == 0 or None, "its target"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.wait(30)
        folders = sorted((path for path in self._cgroup.rglob("*") if path.is_dir()), reverse=True)
        deadline = time.monotonic() + 30
        for folder in (*folders, self._cgroup):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:  # the last of its processes is still going
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)

    def run(self, *words: object, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside; unless ``ok`` is False, it must end well."""
        done = self._ask(*words)
        if ok and done.returncode:
            pytest.fail(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}\n{self.log()}", pytrace=False)
        return done

    def show(self, unit: str) -> dict[str, str]:
        """What systemd knows of a unit."""
        lines = self.run("systemctl", "show", unit).stdout.splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def journal(self, *matches: str) -> list[dict[str, Any]]:
        """Entries of the daemon that match; ``EVENT=running``: whose line begins so."""
        events = [match.removeprefix("EVENT=") for match in matches if match.startswith("EVENT=")]
        others = [match for match in matches if not match.startswith("EVENT=")]
        lines = self.run("journalctl", "--no-pager", "-o", "json", "-u", "indexd", *others).stdout.splitlines()
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if all(str(row["MESSAGE"]).startswith(event) for event in events)]

    def log(self) -> str:
        """The last lines of the journal, for people."""
        return self._ask("journalctl", "--no-pager", "-n", "40").stdout

    def wait_for(
        self,
        look: Callable[[], T | None],
        what: str,
        timeout: float = WAIT_SECONDS,
        end: Callable[[str], NoReturn] = pytest.fail,
    ) -> T:
        """What ``look`` returns, as soon as that is not None; in vain, ``end`` is called with why."""
        deadline = time.monotonic() + timeout
        while (found := look()) is None:
            if self._holder.poll() is not None or time.monotonic() > deadline:
                errors = self._errors.read_text("utf-8", "replace")
                end(f"waited for {what}: {errors}{self.log() if self._inside else ''}")
            time.sleep(0.05)
        return found

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process by the number that it has inside."""
        self.run("kill", f"-{number.name.removeprefix('SIG')}", pid)

    def _ask(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._inside, *map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            timeout=WAIT_SECONDS,
            check=False,
        )

    def _first_process(self) -> str | None:
        # The holder's one child, once it is systemd and not the shell any more.
        holder = self._holder.pid
        children = Path(f"/proc/{holder}/task/{holder}/children").read_text("ascii").split()
        for pid in children:
            try:
                if Path(f"/proc/{pid}/exe").readlink().name == "systemd":
                    return pid
            except OSError:
                continue
        return None


def _cgroup_root() -> Path:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text("utf-8").splitlines()]
    found = next((Path(place) for _, place, kind, *_ in mounts if kind == "cgroup2"), None)
    return found or missing(f"there is no cgroup2 here, which a systemd needs; {_WHERE}")


INSTALL = Path(__file__).resolve().parents[2] / "scripts" / "install"
STORE = SHARED / "store"
COMMAND = Path(sysconfig.get_path("scripts")) / "indexd"
_CACHE = Path("/var/cache/indexd-test")
# The drop-in of a test: what is compiled already, this tree wherever it is (below /tmp the unit sees nothing), and less
# patience.
_TREE = " ".join(map(str, PLACES))
_DROP_IN = f"[Service]\nReadWritePaths={_CACHE}\nBindReadOnlyPaths={_TREE}\nRestartSec=1\n"


def install(machine: OwnSystemd, instance: str = "", env: Mapping[str, str] | None = None) -> None:
    """Install unit, configuration and user, and a link to this tree's program in place of a program of its own."""
    compile_kernels()
    machine.run(INSTALL, "--no-program", "--store", STORE, *(("--instance", instance) if instance else ()))
    machine.run("mkdir", "-p", "/opt/indexd/bin")
    machine.run("ln", "-sfn", COMMAND, "/opt/indexd/bin/indexd")
    machine.run("cp", "-a", "-T", os.environ["NUMBA_CACHE_DIR"], _CACHE)
    machine.run("chown", "-R", "indexd", _CACHE)
    sizes = {
        f"INDEXD_{flag[2:].upper().replace('-', '_')}": value
        for flag, value in zip(SIZES[::2], SIZES[1::2], strict=True)
    }
    environment = {**QUICK, **sizes, "NUMBA_CACHE_DIR": str(_CACHE), **(env or {})}
    set_environment(machine, environment, instance)
    unit = f"indexd@{instance}" if instance else "indexd"
    write(machine, f"/etc/systemd/system/{unit}.service.d/test.conf", _DROP_IN)
    machine.run("systemctl", "daemon-reload")


def set_environment(machine: OwnSystemd, environment: Mapping[str, str], instance: str = "") -> None:
    """The whole of /etc/default/indexd."""
    path = f"/etc/default/indexd-{instance}" if instance else "/etc/default/indexd"
    write(machine, path, "".join(f"{name}={value}\n" for name, value in environment.items()))


def write(machine: OwnSystemd, path: str, text: str) -> None:
    """Write a file inside, with its folders."""
    machine.run("sh", "-c", 'mkdir -p "${1%/*}" && printf %s "$2" > "$1"', "sh", path, text)


class ServiceManager:
    """A datagram socket in a ``with`` block, an abstract one; ``messages`` keeps (monotonic seconds, fields)."""

    def __init__(self, name: str, watchdog_seconds: float | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0indexd-test-{os.getpid()}-{name}")
        self.environment = {"NOTIFY_SOCKET": f"@indexd-test-{os.getpid()}-{name}"}
        if watchdog_seconds is not None:
            self.environment["WATCHDOG_USEC"] = str(int(watchdog_seconds * 1_000_000))
        self.messages: list[tuple[float, dict[str, str]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def listen(self) -> None:
        """Take in what has come; the time is that of taking."""
        while True:
            try:
                text = self._socket.recv(65536).decode()
            except BlockingIOError:
                return
            self.messages.append((time.monotonic(), dict(line.split("=", 1) for line in text.split("\n"))))

    def heard(self, key: str) -> list[str]:
        """The values of a key so far, oldest first."""
        self.listen()
        return [fields[key] for _, fields in self.messages if key in fields]

    def seen(self, key: str, test: Callable[[str], bool] = lambda _: True) -> Callable[[], bool | None]:
        """For ``Daemon.wait_for``: true once a value of the key passes."""
        return lambda: any(test(value) for value in self.heard(key)) or None

    def pings_within(self, seconds: float) -> int:
        """How many watchdog pings come from now on."""
        self.listen()
        before = len(self.heard("WATCHDOG"))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.listen()
            time.sleep(0.02)
        return len(self.heard("WATCHDOG")) - before
