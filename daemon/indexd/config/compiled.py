"""Where the compiler keeps what it compiled: under the state directory, one folder per state of the kernels' source.

Numba looks only at the file of the function it loads, not at what that function calls; so a folder named by the hash of
all kernels is the one way to be sure that what runs is what stands in the source. What lies there is executed, so
nobody but this user and root may be able to put anything there.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from indexd.config.load import make_private, why_not_trusted

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
