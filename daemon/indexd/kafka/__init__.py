"""Kafka's own partition directories: their indexes checked against their logs, and rebuilt (spec kafka-index 8 and 10).

``format``         the heads of record batches, partitions, the lock, notes and progress
``kernel``         the walk, and CRC-32C; compiled
``records``        LogWalk: the batches of one log as arrays, read in bounded buffers
``indexes``        a verdict for each entry of a partition, or of a whole log directory; the files made anew
"""
