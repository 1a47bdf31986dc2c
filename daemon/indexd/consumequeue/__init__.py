"""ConsumeQueue: per topic and queue, where each message stands in the log (spec rocketmq-store 5).

``format``        the bytes of a unit, names of files, marks
``kernel``        putMessagePositionInfo over batches, and sorting units by queue; compiled
``queues``        which queues there are and how far each has come
``files``         the files of all queues, written without a descriptor each, and what of them is to be synced
``store``         ConsumeQueueStore: all of them together
``recover``       what is left of the marks after a stop, and making the files so
``check``         the files held against the marks
``reader``        units by queue offset, for queries
"""
