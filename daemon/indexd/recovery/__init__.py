"""From whatever a stop left behind to files that are exactly as they durably were (ARCHITECTURE.md, decision 6).

``plan``     what is on disk -> RecoveryPlan; pure
``replay``   one index file brought back to its durable prefix: chains checked, slots rebuilt
``standing`` whether the log is still the one that was indexed, and from where to compare
``against``  the kept entries compared with the log itself
``settings`` what the configuration comes to for those who read and build
``damage``   what a scrub has found, to be mended in place
``beside``   queues and sparse indexes brought to the same offset, and filled from the log
``open``     data directory -> builders and a reader at one offset
``recover``  carries a plan out
``whole``    the log to where it ends now, for commands that run once
``rebuild``  a whole data directory from the log, at full speed
"""
