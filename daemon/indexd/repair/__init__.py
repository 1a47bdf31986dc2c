"""``indexd repair``: a broker's own index mended from its log, with the broker stopped.

An audit says what is wrong. What is sound stays as it is; for everything else new files are built beside, held against
the log once more, and put in the place of the old ones in one step that can be undone.

``plan``     which files stay, and which ranges of the log get new ones
``ranges``   the log between those files, cut
``build``    one range built
``run``      all of it composed, and the undo
``swap``     the exchange, the checkpoint, and the way back
``broker_stopped``  the broker's lock, held throughout
"""

from indexd.repair.build import BuiltRange, build_range, check_built, mark_end
from indexd.repair.plan import RepairPlan, RepairRange, plan_repair

__all__ = ["BuiltRange", "RepairPlan", "RepairRange", "build_range", "check_built", "mark_end", "plan_repair"]
