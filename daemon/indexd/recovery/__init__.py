"""From whatever a stop left behind to files that are exactly as they durably were (ARCHITECTURE.md, decision 6).

``replay``   one index file brought back to its durable prefix: chains checked, slots rebuilt
``beside``   queues and sparse indexes brought to the same offset, and filled from the log
``open``     data directory -> builders and a reader at one offset
``recover``  carries a plan out
``rebuild``  a whole data directory from the log, at full speed
``compare``  the kept entries against the log itself
"""
