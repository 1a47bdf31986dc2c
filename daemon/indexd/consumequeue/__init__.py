"""ConsumeQueue: per topic and queue, where each message stands in the log (spec rocketmq-store 5).

``format``  the bytes of a unit, names of files, marks
"""
