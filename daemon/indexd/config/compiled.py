"""Where the compiler keeps what it compiled: under the state directory, one folder per state of the kernels' source.

Numba looks only at the file of the function it loads, not at what that function calls; so a folder named by the hash of
all kernels is the one way to be sure that what runs is what stands in the source. What lies there is executed, so
nobody but this user and root may be able to put anything there.
"""

from __future__ import annotations

import atexit
import grp
import hashlib
import os
import pwd
import shutil
import stat
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from ..errors import UsageError
from .model import state_directory

_KEPT_FOLDERS = 3


def prepare_compiler() -> None:
    """Set NUMBA_CACHE_DIR unless the user has; must run before numba is imported."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(version("numba").encode())
    # A format's constants are frozen into the kernels.
    constants = package.rglob("format.py")
    for path in sorted((*package.rglob("*kernel.py"), *constants)):
        digest.update(path.read_bytes())
    os.environ["NUMBA_CACHE_DIR"] = str(_lasting_folder(digest.hexdigest()[:16]) or _own_folder())


def _lasting_folder(name: str) -> Path | None:
    try:
        # Resolved: whoever can change a link on the way could else lead elsewhere what was looked at.
        parent = state_directory(os.environ).resolve() / "compiled"
        folder = parent / name
        why = why_not_trusted(folder)
        if why is None:
            make_private(folder)
            os.utime(folder)
            older = sorted(set(_folders(parent)) - {folder}, key=lambda path: path.stat().st_mtime)
            for old in older[: 1 - _KEPT_FOLDERS]:
                shutil.rmtree(old, ignore_errors=True)
            # Those are numba's, and as the umask has left them.
            why = next((why for path in _folders(folder) if (why := why_not_trusted(path))), None)
    except (OSError, UsageError):
        # A state directory that cannot be written, or a user without a home, as in a container, is reported by whoever
        # needs it; compile for this run alone.
        return None
    if why is None:
        return folder
    sys.stderr.write(f"indexd: what was compiled before is not used, {why}; it is compiled for this run alone\n")
    return None


def _own_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="indexd-compiled-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def needs_compiling() -> bool:
    """Whether the kernels that build an index were never compiled into the folder: that takes a minute."""
    is_compiling = "NUMBA_CACHE_DIR" in os.environ and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
    return is_compiling and not any(Path(os.environ["NUMBA_CACHE_DIR"]).glob("index_*/*.nbi"))


def _folders(path: Path) -> list[Path]:
    return [each for each in path.iterdir() if each.is_dir()]


def make_private(path: Path) -> None:
    """Make a directory and its parents as a data directory is made, whatever the umask."""
    for step in reversed((path, *path.parents)):
        if not step.exists():
            step.mkdir(mode=0o700)
            step.chmod(0o750)


def why_not_trusted(path: Path) -> str | None:
    """Who else could put something into ``path``, which is resolved, or make it; None for root and this user alone."""
    for step in (path, *path.parents):
        if not step.exists():
            continue
        status = step.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{step} belongs to user {status.st_uid}"
        others = stat.S_IWOTH | (0 if _is_of_one(status) else stat.S_IWGRP)
        # Where all may make files and nobody may touch another's, as in /tmp, a folder stays whose it is.
        if status.st_mode & others and not (status.st_mode & stat.S_ISVTX and step != path):
            return f"others may write to {step}"
    return None


def _is_of_one(status: os.stat_result) -> bool:
    # A group that is called as its one user, as many systems give to each: their umask is 002.
    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
