"""``indexd verify``: everything in a data directory read again and held against everything else; nothing is written.

``whole``    frontier and checkpoint, then each output's own check, then the log if asked
``scrub``    all files once more while the daemon runs, for what the disk has changed
"""

from indexd.verify.whole import VerifyReport, verify

__all__ = ["VerifyReport", "verify"]
