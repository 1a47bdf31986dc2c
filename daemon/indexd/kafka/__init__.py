"""Kafka's own partition directories: their indexes checked against their logs, and rebuilt (spec kafka-index 8 and 10).

``format``         the heads of record batches, partitions, the lock
``kernel``         the walk, and CRC-32C; compiled
``records``        LogWalk: the batches of one log as arrays, read in bounded buffers
``judge``          a verdict for each entry
``check``          a partition, or a whole log directory
``report``         what both come to
``rebuild``        the files made anew, in place or elsewhere
"""
