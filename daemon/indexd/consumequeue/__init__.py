"""ConsumeQueue: per topic and queue, where each message stands in the log (spec rocketmq-store 5).

``format``        the bytes of a unit, names of files, marks
``kernel``        putMessagePositionInfo over batches, and sorting units by queue; compiled
``files``         the files of all queues, written without a descriptor each, and what of them is to be synced
``queues``        which queues there are, how far each has come, units that are not written yet
``store``         ConsumeQueueStore: all of them together
``recover``       what is left of the marks after a stop, and making the files so
``check``         the files held against the marks
``reader``        units by queue offset, for queries
"""
