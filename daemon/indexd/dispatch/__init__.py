"""From the reader to the builders: a tail loop that polls, a bounded queue, a drain every few seconds.

``queue``  DispatchQueue: bounded by rows and bytes, waits when full, drops nothing
``reput``  the tail loop (RocketMQ: ReputMessageService)
``throttle``  reading slowed for the broker's sake: by rate, and by memory
``drain``  the drain loop, as IndexService.buildIndex of old drained its queue
"""
