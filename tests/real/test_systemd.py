"""The installed units under a real systemd, and what the daemon tells a service manager's socket.

OwnSystemd is a machine of its own: a real systemd as process 1 over this root file system, of which it changes nothing.
Everything that is written there goes into memory and is gone with it. Needs root; what a kernel refuses is missing
(support.missing).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import pytest

from support.daemon import QUICK, Daemon, compile_kernels
from support.missing import installing, missing, need, need_root
from support.service_manager import ServiceManager
from support.small_log import SIZES, Growing, write_log

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


INSTALL = _REPOSITORY / "scripts" / "install"
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
    path = f"/etc/default/indexd-{instance}" if instance else "/etc/default/indexd"
    write(machine, path, "".join(f"{name}={value}\n" for name, value in environment.items()))
    unit = f"indexd@{instance}" if instance else "indexd"
    write(machine, f"/etc/systemd/system/{unit}.service.d/test.conf", _DROP_IN)
    machine.run("systemctl", "daemon-reload")


def write(machine: OwnSystemd, path: str, text: str) -> None:
    """Write a file inside, with its folders."""
    machine.run("sh", "-c", 'mkdir -p "${1%/*}" && printf %s "$2" > "$1"', "sh", path, text)


DATA = "/var/lib/indexd"
# Holds the lock as a broker does, on byte 0 for the whole life of its process.
_BROKER = (
    "import fcntl, struct, sys, time; file = open(sys.argv[1], 'r+b'); "
    "fcntl.fcntl(file, fcntl.F_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 1, 0)); time.sleep(600)"
)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[OwnSystemd]:
    """A machine with a store of 2000 messages and indexd installed beside it."""
    with OwnSystemd(tmp_path) as started:
        write_log(started.shared / "store", 2000)
        install(started)
        yield started


def state(machine: OwnSystemd, data: str = DATA) -> dict[str, Any]:
    """What DATA/state says."""
    text = machine.wait_for(lambda: machine.run("cat", f"{data}/state", ok=False).stdout or None, f"{data}/state")
    row: dict[str, Any] = json.loads(text)
    return row


def main_pid(machine: OwnSystemd) -> int:
    return int(machine.show("indexd")["MainPID"])


def test_it_starts_tells_reloads_and_stops(machine: OwnSystemd) -> None:
    machine.run("systemctl", "start", "indexd")
    shown = machine.show("indexd")
    assert (shown["ActiveState"], shown["SubState"], shown["User"]) == ("active", "running", "indexd")
    assert (shown["WatchdogUSec"], shown["WatchdogTimestampMonotonic"] != "0") == ("2min", True)
    assert "behind" in shown["StatusText"]
    machine.wait_for(lambda: state(machine).get("caughtUp") or None, "catching up")
    # The log goes on where journald is started again meanwhile.
    machine.run("systemctl", "restart", "systemd-journald")
    machine.run("systemctl", "reload", "indexd")
    machine.wait_for(lambda: machine.journal("EVENT=reloaded") or None, "the reload")
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "active" or None, "the end of the reload")
    assert machine.show("indexd")["NRestarts"] == "0"
    machine.run("systemctl", "stop", "indexd")
    shown = machine.show("indexd")
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]) == ("inactive", "success", "0")
    names = set(machine.run("ls", DATA).stdout.split())
    assert names & {"abort", "index", "frontier", "checkpoint"} == {"index", "frontier", "checkpoint"}


def test_the_journal_has_priorities(machine: OwnSystemd) -> None:
    machine.run("systemctl", "start", "indexd")
    (running,) = machine.journal("_SYSTEMD_UNIT=indexd.service", "EVENT=running phy_offset=")
    assert (running["PRIORITY"], running["SYSLOG_IDENTIFIER"]) == ("6", "indexd")
    assert not machine.journal("_SYSTEMD_UNIT=indexd.service", "PRIORITY=3"), machine.log()
    (machine.shared / "store").rename(machine.shared / "away")
    degraded = machine.wait_for(lambda: machine.journal("EVENT=degraded") or None, "degraded")
    assert {row["PRIORITY"] for row in degraded} == {"3"}
    assert re.match(r"degraded stage=(read|build) .*commitlog", degraded[0]["MESSAGE"])
    assert machine.run("journalctl", "--no-pager", "-u", "indexd", "-p", "err").stdout.count("degraded")


def test_a_process_that_hangs_is_ended_and_started_again(machine: OwnSystemd) -> None:
    write(machine, "/etc/systemd/system/indexd.service.d/watchdog.conf", "[Service]\nWatchdogSec=2\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "indexd")
    pid, begun = main_pid(machine), int(machine.show("indexd")["WatchdogTimestampMonotonic"])
    fed = "WatchdogTimestampMonotonic"
    machine.wait_for(lambda: int(machine.show("indexd")[fed]) > begun + 4_000_000 or None, "twice the watchdog's time")
    assert main_pid(machine) == pid, "a healthy one was ended"
    machine.run("kill", "-STOP", pid)
    machine.wait_for(lambda: machine.show("indexd")["NRestarts"] != "0" or None, "a restart")
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "active" or None, "the next process")
    assert main_pid(machine) != pid
    assert "Watchdog timeout" in machine.run("journalctl", "--no-pager", "-u", "indexd").stdout  # behind a long trace
    machine.wait_for(lambda: machine.journal("EVENT=recovered") or None, "its recovery")


@pytest.mark.parametrize(("status", "line"), [(2, "did you mean"), (3, "the store /srv/shared/store")])
def test_what_another_start_would_not_mend_is_not_started_again(machine: OwnSystemd, status: int, line: str) -> None:
    if status == 2:
        write(machine, "/etc/indexd/indexd.toml", '[store]\nstor = "/srv"\n')
    else:
        (machine.shared / "store").rename(machine.shared / "away")
    assert machine.run("systemctl", "start", "indexd", ok=False).returncode != 0
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "failed" or None, "its end")
    shown = machine.show("indexd")
    assert (shown["ActiveState"], shown["ExecMainStatus"], shown["NRestarts"]) == ("failed", str(status), "0")
    # The reason is one line, and an error for the journal.
    (said,) = machine.journal("_SYSTEMD_UNIT=indexd.service", "PRIORITY=3", "_TRANSPORT=stdout")
    assert re.match(f"indexd: .*{line}", said["MESSAGE"])


def test_a_directory_that_somebody_holds_is_tried_again(machine: OwnSystemd) -> None:
    machine.run("systemctl", "start", "indexd")
    machine.run("systemctl", "stop", "indexd")
    machine.run("systemd-run", "--unit=holder", "flock", f"{DATA}/lock", "sleep", "600")
    machine.wait_for(
        lambda: machine.run("flock", "-n", f"{DATA}/lock", "true", ok=False).returncode or None, "the lock"
    )
    assert machine.run("systemctl", "start", "indexd", ok=False).returncode != 0
    machine.run("systemctl", "stop", "holder")
    machine.wait_for(lambda: machine.show("indexd")["ActiveState"] == "active" or None, "its turn")


def test_it_can_write_nothing_but_its_data_and_sees_the_broker_and_serves(machine: OwnSystemd) -> None:
    install(machine, env={"INDEXD_HTTP": "127.0.0.1:9577"})
    (machine.shared / "store/lock").write_bytes(b"lock")
    machine.run("systemd-run", "--unit=broker", sys.executable, "-c", _BROKER, STORE / "lock")
    broker = int(machine.show("broker")["MainPID"])
    machine.run("systemctl", "start", "indexd")
    pid = main_pid(machine)
    status = dict(line.split(":\t", 1) for line in machine.run("cat", f"/proc/{pid}/status").stdout.splitlines())
    assert status["CapEff"] == status["CapBnd"] == "0" * 16
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert machine.run("cat", f"/proc/{pid}/oom_score_adj").stdout == "500\n"
    assert machine.run("ps", "-o", "ni=,user=", "-p", pid).stdout.split() == ["5", "indexd"]
    inside = ("nsenter", "-t", pid, "-m", "-r")
    for path in (STORE / "abort", STORE / "commitlog/x", "/etc/x", "/opt/indexd/x", "/usr/x", "/root/x", "/home/x"):
        assert "Read-only file system" in machine.run(*inside, "touch", path, ok=False).stderr, path
    machine.run(*inside, "touch", f"{DATA}/x")
    found = machine.wait_for(lambda: state(machine)["broker"] or None, "a look at the broker")
    assert (found["alive"], found["pid"]) == (True, broker)
    ask = "import sys, urllib.request as u; [u.urlopen(f'http://127.0.0.1:9577/{path}') for path in sys.argv[1:]]"
    words = (sys.executable, "-c", ask, "livez", "readyz", "metrics", "api/v1/status")
    machine.wait_for(lambda: machine.run(*words, ok=False).returncode == 0 or None, "all that it serves")


def test_instances_have_their_own_data(machine: OwnSystemd) -> None:
    install(machine, instance="a")
    machine.run("systemctl", "start", "indexd", "indexd@a")
    machine.wait_for(lambda: state(machine, f"{DATA}/a").get("caughtUp") or None, "the instance")
    assert state(machine)["pid"] != state(machine, f"{DATA}/a")["pid"]


def test_an_address_that_comes_late_is_waited_for_and_indexing_goes_on(machine: OwnSystemd) -> None:
    address = "192.0.2.7"
    install(machine, env={"INDEXD_HTTP": f"{address}:9577"})
    machine.run("systemctl", "start", "indexd")
    machine.wait_for(lambda: state(machine).get("caughtUp") or None, "catching up")
    assert state(machine)["http"] is None
    machine.run(need("ip"), "link", "set", "lo", "up")
    machine.run(need("ip"), "address", "add", f"{address}/32", "dev", "lo")
    machine.wait_for(lambda: state(machine)["http"], "listening")
    assert machine.show("indexd")["NRestarts"] == "0"


def test_all_of_it_goes_again_and_data_only_when_told(machine: OwnSystemd) -> None:
    machine.run("systemctl", "enable", "--now", "indexd")
    machine.run("sh", "-c", "echo '# mine' >> /etc/indexd/indexd.toml")
    said = machine.run(INSTALL, "--uninstall").stdout
    assert "kept     /etc/indexd/indexd.toml" in said
    assert machine.run("systemctl", "is-active", "indexd", ok=False).stdout == "inactive\n"
    assert machine.run("systemctl", "list-unit-files", "--no-legend", "indexd*", ok=False).stdout == ""
    machine.run("test", "!", "-L", "/usr/local/bin/indexd", "-a", "-f", f"{DATA}/frontier")
    machine.run("id", "indexd")
    machine.run(INSTALL, "--uninstall", "--purge")
    found = machine.run("find", "/etc", "/opt", "/usr/local", "/var/lib", "-name", "indexd*").stdout
    assert found == ""
    assert machine.run("id", "indexd", ok=False).returncode != 0
    assert machine.run(INSTALL, "--uninstall").returncode == 0


WATCHDOG = 2.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    """A service manager that wants to hear of it every two seconds."""
    with ServiceManager(tmp_path.name, WATCHDOG) as opened:
        yield opened


def daemon(tmp_path: Path, manager: ServiceManager, **env: str) -> Daemon:
    return Daemon(tmp_path / "store", tmp_path / "data", *SIZES, env={**manager.environment, **env})


def test_ready_comes_with_tailing_and_stopping_with_the_signal(tmp_path: Path, manager: ServiceManager) -> None:
    with Growing(tmp_path / "store", 1), daemon(tmp_path, manager) as running:
        running.wait_for(manager.seen("READY"), "READY")
        # Tailing, not caught up: the data was opened before, and the first look at the log is over.
        assert running.events("created")
        assert running.events("running")
        assert not manager.heard("STOPPING")
        running.wait_for(manager.seen("STATUS", lambda text: "behind" in text), "a lag in the status")
        running.wait_for(lambda: len(manager.heard("WATCHDOG")) >= 3 or None, "pings")
        assert running.terminate() == 0
    manager.listen()
    order = [key for _, fields in manager.messages for key in fields if key in ("READY", "STOPPING")]
    assert order == ["READY", "STOPPING"]
    gaps = [later[0] - earlier[0] for earlier, later in zip(manager.messages, manager.messages[1:], strict=False)]
    assert max(gaps) < WATCHDOG * 5, "nothing was heard for long"


def test_recovery_asks_for_time_and_says_how_far_it_is(tmp_path: Path, manager: ServiceManager) -> None:
    write_log(tmp_path / "store", 40_000)
    with daemon(tmp_path, manager) as first:
        first.wait_caught_up()
        first.kill()
    manager.heard("READY")
    manager.messages.clear()
    with daemon(tmp_path, manager) as again:
        again.wait_for(manager.seen("READY"), "READY")
        assert again.events("recovered")
    before = list(takewhile(lambda fields: "READY" not in fields, (fields for _, fields in manager.messages)))
    extended = [int(fields["EXTEND_TIMEOUT_USEC"]) for fields in before if "EXTEND_TIMEOUT_USEC" in fields]
    assert max(extended, default=0) >= 60_000_000, manager.messages
