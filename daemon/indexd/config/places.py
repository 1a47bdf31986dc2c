"""Where indexd may keep its own files: anywhere but in the store; and whose files it may execute."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from ..errors import UnsafeStoreError
from .model import Config


def check_outside(config: Config, path: Path, flag: str) -> None:
    """Refuse a directory of ours that lies in the store or in one of its commitlog directories."""
    roots = (*((config.store.store,) if config.store.store else ()), *config.store.commit_log_directories)
    for root in roots:
        if path.resolve().is_relative_to(root.resolve()):
            raise UnsafeStoreError(
                f"{path} (from {flag}) lies inside the store, in {root}",
                f"nothing is written into a broker's store: give another {flag}",
            )


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
