"""ConsumeQueue: per topic and queue, where each message stands in the log (spec rocketmq-store 5).

``format``        the bytes of a unit, names of files, marks
``broker_format`` the bytes of what only a broker writes beside them
``kernel``        putMessagePositionInfo over batches, and sorting units by queue; compiled
``queues``        which queues there are and how far each has come
``pending``       units that are collected before they are written
``files``         the files of all queues, written without a descriptor each, and what of them is to be synced
``expiry``        what of a queue only points before the log's begin
``progress``      what the store has come to
``store``         ConsumeQueueStore: all of them together
``folders``       what lies on the disk, and what of it nobody names
``recover``       what is left of the marks after a stop, and making the files so
``compare``       the units held against the log
``check``         the files held against the marks
``check_kernel``  every unit held against the one before it; compiled
``reader``        units by queue offset, for queries
"""
