"""scripts/install into a tree of its own (--root): what it was told, and what is there then."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.installed import INSTALL

ETC = Path("etc/systemd/system")
SYSTEMD = INSTALL.parents[1] / "systemd"


def install(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/install with the variables ``env`` and few others; however it ends."""
    return subprocess.run(
        [INSTALL, *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home()), **env},
        timeout=600,
        check=False,
    )


def staged(root: Path, *words: object) -> str:
    """Install without a program, as a package does that brings its own."""
    root.mkdir(exist_ok=True)
    done = install("--root", root, "--no-program", *words)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def files(root: Path) -> dict[str, bytes]:
    """Path below ``root`` -> content, of all files there."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
