"""From written to durable, in one order: files, then checkpoint, then frontier (ARCHITECTURE.md, decision 5).

``checkpoint``  RocketMQ's 4096 bytes
``frontier``    ours: per output the files and entry counts that are durable, and the physical offset they cover
``abort``       the flag that says a stop was not clean
``outputs``     all builders behind one call, and what they have come to
``building``    the steps of a daemon: apply, persist, persisted, finish
``witness``     what stood in the log when it was indexed, and whether it still does
``flusher``     the one place that syncs and then writes both down
"""
