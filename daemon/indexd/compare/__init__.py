"""The log held against what was built from it: one comparator an output. Nothing is written.

``index``      the key index: every key of every message against the entries, every entry against the messages, in
               columns; for recovery, verify, audit and repair
``secondary``  ConsumeQueues: every unit; OffsetIndex and TimeIndex of each segment: every entry
``log``        finds the first entry or unit that disagrees with the log, for recovery

A comparator takes the log's batches in order and yields differences; what one means is for the caller to decide.
"""
