"""``indexd verify``: everything in a data directory read again and held against everything else; nothing is written.

``records``  who works in the directory; frontier and checkpoint: sane, and what they say of one another
``whole``    composes: the records, then each output's own check, then the log if asked
``scrub``    all files once more while the daemon runs, for what the disk has changed
"""

from indexd.verify.whole import Report, verify

__all__ = ["Report", "verify"]
