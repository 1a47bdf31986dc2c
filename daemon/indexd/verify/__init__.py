"""``indexd verify``: everything in a data directory read again and held against everything else; nothing is written.

``ground``   what stands in a data directory at one moment, and whether somebody works in it
``records``  frontier and checkpoint: sane in themselves, and what they say of one another
``whole``    composes: the records, then each output's own check, then the log if asked
``deep``     the log decoded again, every key against the entries and every entry against the keys
``beside``   queues and sparse indexes: their own checks, and both against the log
``scrub``    all files once more while the daemon runs, for what the disk has changed
"""

from indexd.verify.ground import Report
from indexd.verify.whole import verify

__all__ = ["Report", "verify"]
