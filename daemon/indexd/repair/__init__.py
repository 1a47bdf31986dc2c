"""``indexd repair``: a broker's own index mended from its log, with the broker stopped.

An audit says what is wrong. What is sound stays as it is; for everything else new files are built beside, held against
the log once more, and put in the place of the old ones in one step that can be undone.

``plan``     which files stay, and which ranges of the log get new ones
``ranges``   the log between those files, cut
``build``    one range built
``broker``   the broker stopped, and the store a place for a repair
``run``      all of it composed, and the undo
``swap``     the folder of a repair, the exchange, the checkpoint, the way back, and the end of interrupted repairs
"""

from indexd.repair.build import BuiltRange, build_range, check_built, mark_end
from indexd.repair.plan import RepairPlan, plan_repair
from indexd.repair.ranges import RepairRange

__all__ = ["BuiltRange", "RepairPlan", "RepairRange", "build_range", "check_built", "mark_end", "plan_repair"]
