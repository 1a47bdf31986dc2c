"""What a machine may lack: outside CI the test is skipped, with what is missing and how to get it; in CI it fails.

A mark or fixture asks when its test starts, so that collecting never looks for anything and never builds anything::

    requires_strace = requires(lambda: need("strace"))

Nothing else in the tests skips for want of something: tests/unit/test_tidy.py looks.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

#: A program -> the Debian package it is in, where that has another name.
PACKAGES = {
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "mosquitto_passwd": "mosquitto",
    "mosquitto_sub": "mosquitto-clients",
    "mvn": "maven",
    "nsenter": "util-linux",
    "prlimit": "util-linux",
    "promtool": "prometheus",
    "ps": "procps",
    "setpriv": "util-linux",
    "stdbuf": "coreutils",
    "systemd-analyze": "systemd",
    "unshare": "util-linux",
}


def missing(reason: str) -> NoReturn:
    """End the test here: it needs what this machine does not have or allow; ``reason`` ends with what to do."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"in CI nothing may be missing: {reason}", pytrace=False)
    pytest.skip(reason)


def installing(*packages: str) -> str:
    """The remedy: the command that installs these."""
    return f"apt-get install {' '.join(packages)}"


def need(program: str) -> str:
    """The path of a program that the test cannot do without."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    return found or missing(f"there is no {program}; {installing(PACKAGES.get(program, program))}")


def need_root(what: str) -> None:
    """The test does what only root may."""
    if os.geteuid() != 0:
        missing(f"only root may {what}; run this test as root")


class _When:
    """A skipif condition that is evaluated when the test starts."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look

    def __bool__(self) -> bool:
        self._look()
        return False


def requires(look: Callable[[], object]) -> pytest.MarkDecorator:
    """Marks a test or a module whose tests start with ``look``, which ends in ``missing`` where it does."""
    return pytest.mark.skipif(_When(look), reason="said by what is missing")  # type: ignore[arg-type]  # evaluated with bool(), late
