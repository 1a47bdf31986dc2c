"""From written to durable, in one order: files, then checkpoint, then frontier (ARCHITECTURE.md, decision 5).

``frontier``    ours: per output the files and entry counts that are durable, and the physical offset they cover
``flusher``     the one place that syncs and then writes both down
"""
