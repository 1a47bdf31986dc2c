"""indexd as scripts/install puts it, in a machine of its own: this tree's program, small files, quick intervals."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from support.daemon import QUICK, compile_kernels
from support.own_systemd import PLACES, SHARED, OwnSystemd
from support.small_log import SIZES

if TYPE_CHECKING:
    from collections.abc import Mapping

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
