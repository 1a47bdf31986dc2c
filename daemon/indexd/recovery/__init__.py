"""From whatever a stop left behind to files that are exactly as they durably were (ARCHITECTURE.md, decision 6).

``open``       data directory -> pipeline and a reader at one offset
``known_log``  what the log says today about the evidence that was kept when it was indexed
``recover``    the key index: what of it is kept, and making it so
``replay``     one index file brought back to its durable prefix: chains checked, slots rebuilt
``secondary``  the other outputs brought to the same offset, and filled from the log
``rebuild``    a whole data directory from the log, at full speed
``whole_log``  the log to where it ends now, for commands that run once
"""
