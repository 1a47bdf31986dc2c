"""Where the compiler keeps what it compiled: under the state directory, one folder per state of the kernels' source.

Numba looks only at the file of the function it loads, not at what that function calls; so a folder named by the hash of
all kernels is the one way to be sure that what runs is what stands in the source.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
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
    constants = (package / "commitlog" / "crc.py", *package.rglob("format.py"))
    for path in sorted((*package.rglob("*kernel.py"), *constants)):
        digest.update(path.read_bytes())
    try:
        parent = state_directory(os.environ) / "compiled"
        folder = parent / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        _remove_old(parent, folder)
    except (OSError, UsageError):
        # A state directory that cannot be written, or a user without a home, as in a container, is reported by whoever
        # needs it; compile for this run alone.
        folder = Path(tempfile.mkdtemp(prefix="indexd-compiled-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)


def needs_compiling() -> bool:
    """Whether the daemon's kernels were never compiled into the folder, as far as is known: that takes a minute."""
    is_compiling = "NUMBA_CACHE_DIR" in os.environ and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
    return is_compiling and not _mark().exists()


def mark_compiled() -> None:
    """They are there now; where that cannot be written down, the next start says again that it compiles."""
    with suppress(OSError):
        os.close(os.open(_mark(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _mark() -> Path:
    return Path(os.environ["NUMBA_CACHE_DIR"]) / "compiled"


def _remove_old(parent: Path, current: Path) -> None:
    folders = sorted((path for path in parent.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_KEPT_FOLDERS]:
        if folder != current:
            shutil.rmtree(folder, ignore_errors=True)
