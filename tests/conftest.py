"""What holds for every test: where compiled kernels are kept, how many examples hypothesis tries, and warnings."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_SOURCES = Path(__file__).resolve().parent.parent / "daemon" / "indexd"
_JIT = os.environ.get("NUMBA_DISABLE_JIT") != "1"
_CHECKED = os.environ.get("NUMBA_BOUNDSCHECK") == "1"


def _numba_cache() -> Path:
    """A directory for exactly these sources: numba does not notice a change in a function of another module."""
    kernels = [*_SOURCES.rglob("*kernel.py"), _SOURCES / "commitlog/bytes_kernel.py", *_SOURCES.rglob("format.py")]
    digest = hashlib.sha256(b"bounds checked" if _CHECKED else b"")
    for path in sorted(kernels):
        digest.update(path.relative_to(_SOURCES).as_posix().encode() + path.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("INDEXD_TEST_CACHE") or home / "indexd-tests")
    return root / f"numba-{digest.hexdigest()[:16]}"


# Who starts the tests in the background of a shell has them ignore Ctrl-C, and all their children, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Read by numba when it is imported, so before any test module is.
os.environ["NUMBA_CACHE_DIR"] = str(_numba_cache())

# A test may ask for fewer examples than its profile has, never for more. All but "wide" try the same ones each time.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
_SAME: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": _QUIET}
settings.register_profile("modes", max_examples=8, **_SAME)
settings.register_profile("fast", max_examples=20, **_SAME)
settings.register_profile("full", max_examples=50, **_SAME)
settings.register_profile("wide", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "full" if _JIT and not _CHECKED else "modes"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """The profile's number of examples is the most that any test gets."""
    test = getattr(item, "obj", None)
    test = getattr(test, "__func__", test)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    most = settings.default.max_examples
    if own is not None and own.max_examples > most:
        test._hypothesis_internal_use_settings = settings(own, max_examples=most)


#: Files that take minutes, the longest first: they begin first, or one process is at work alone in the end.
_LONG = (
    *("test_broker", "test_remoting_through", "test_modes", "test_page", "test_audit_repair", "test_rewritten_real"),
    "test_spark_cluster",
    *("test_broker_alive", "test_beside_shapes", "test_mqtt", "test_real_faults"),
    *("test_daemon_limits", "test_disturbed", "test_recover", "test_simulated", "test_install", "test_kill"),
    *("test_kafka_broker", "test_soak", "test_found"),
    *("test_http", "test_live", "test_prometheus", "test_goldens", "test_rebuild"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first (scripts/test asks xdist to keep the order); the others stay as they are."""
    ranks = {name: rank for rank, name in enumerate(_LONG)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """As ``tmp_path``, on a disk: what lies in a tmpfs can never leave the page cache."""
    words = ["stat", "--file-system", "--format=%T", str(tmp_path)]
    if subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() not in ("tmpfs", "ramfs"):
        yield tmp_path
        return
    build = _SOURCES.parent.parent / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix="tests-") as name:
        yield Path(name)


if not _JIT:

    @pytest.fixture(autouse=True)
    def _kernels_wrap() -> Iterator[None]:
        """The kernels wrap modulo 2^64 on purpose; only interpreted do they get a warning for it."""
        import numpy as np

        with np.errstate(over="ignore"):
            yield
