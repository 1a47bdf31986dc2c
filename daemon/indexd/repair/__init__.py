"""``indexd repair``: a broker's own index mended from its log, with the broker stopped.

An audit says what is wrong. What is sound stays as it is; for everything else new files are built beside, held against
the log once more, and put in the place of the old ones in one step that can be undone.

``plan``     which files stay, and which ranges of the log get new ones
``keep``     the files that could stay, and how far the log may be indexed
``edges``    at which key of which message a file that stays meets a range
``ranges``   the log between those files, cut
``names``    names for new files, in the order of the log
``losses``   keys that a repair would take away, which it does not
``build``    one range built
``check``    what was built, audited
``run``      all of it composed, and the undo
``work``     what is done once a plan is wanted
``carry``    old files in a new index folder
``folder``   where a repair makes everything, and its manifest
``written``  files written so that they are the store's own
``place``    whether folders can be exchanged there
``settle``   what interrupted repairs have left
``swap``     the exchange, the checkpoint, and the way back
``broker_stopped``  the broker's lock, held throughout
"""

from indexd.repair.build import BuiltRange, build_range, mark_end
from indexd.repair.check import check_built
from indexd.repair.plan import RepairPlan, RepairRange, plan_repair

__all__ = ["BuiltRange", "RepairPlan", "RepairRange", "build_range", "check_built", "mark_end", "plan_repair"]
