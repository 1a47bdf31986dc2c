"""Kafka's own partition directories: their indexes checked against their logs, and rebuilt (spec kafka-index 8 and 10).

``format``         the heads of record batches, and how a walk along them can end
``kernel``         the walk, and CRC-32C; compiled
``records``        LogWalk: the batches of one log as arrays, read in bounded buffers
``directory``      partitions, their segments, and what else lies there
``lock``           Kafka's lock on a log directory
``slots``          the entries of an index file as arrays
``truth``          what the log says to each entry, gathered in one pass
``judge``          a verdict for each entry
``log_findings``   what does not hold in a log
``index_findings`` what does not hold in an index
``report``         what a check or a rebuild came to
``check_segment``  one segment checked
``check``          a partition, or a whole log directory
``entries``        the entries that Kafka's recovery gives a segment
``rebuild``        the files made anew, in place or elsewhere
"""
