"""ConsumeQueue: per topic and queue, where each message stands in the log (spec rocketmq-store 5).

``format``        the bytes of a unit, names of files, marks
``kernel``        putMessagePositionInfo over batches, and sorting units by queue; compiled
``store``         ConsumeQueueStore: all queues, how far each has come, their files, units that are not written yet
``check``         the files held against the marks; what of them is kept after a stop
``reader``        units by queue offset, for queries
"""
