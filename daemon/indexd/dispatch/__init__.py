"""From the reader to the builders: a tail loop that polls, a bounded queue, a drain every few seconds.

``queue``  DispatchQueue: bounded by rows and bytes, waits when full, drops nothing
``reput``  the tail loop (RocketMQ: ReputMessageService)
"""
