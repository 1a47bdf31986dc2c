"""The broker's ConsumeQueues as they stand, and a stretch of their units beside its messages; knows no audit.

``ground``   the queues: files, and which part of the log each points into
``kernel``   every unit looked at once, compiled
``units``    the units of a queue that point into a stretch
``compare``  messages and units of a queue side by side
``seen``     what one stretch came to
"""
