"""From the reader to the builders: a tail loop that polls, a bounded queue, a drain every few seconds.

``reput``  the tail loop (RocketMQ: ReputMessageService), the queue and its drains; bounds on rate, memory and disk
"""
