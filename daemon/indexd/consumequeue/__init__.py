"""ConsumeQueue: per topic and queue, where each message stands in the log (spec rocketmq-store 5).

``format``        the bytes of a unit, names of files, marks
``kernel``        putMessagePositionInfo over batches, and sorting units by queue; compiled
``queues``        which queues there are and how far each has come
``store``         ConsumeQueueStore: all of them together, their files, units that are not written yet
``check``         the files held against the marks; what of them is kept after a stop
``reader``        units by queue offset, for queries
"""
