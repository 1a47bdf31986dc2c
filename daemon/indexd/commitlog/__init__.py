"""The commitlog: segment files in, frames out. Reads only; a broker's file is never opened for writing.

``format``        the drawing of a frame, its constants, the outcomes
``decoder``       one frame -> Message, in plain Python: queries, inspection, tests
``kernel``        many frames -> arrays, compiled: the hot path
``bytes_kernel``  loads, hashes, numbers, checksums: what the compiled pieces are made of
``segments``      which segment files there are, over several directories, and how far their bytes go
``batcher``       bytes at hand -> one DispatchBatch; which of its messages a longer log may have left
``cursor``        the open segment, the buffers that are filled from it, and where inside it reading can begin
``reader``        position -> next batch or why not: end, not yet written, corrupt; who is asked how far the log goes
``lookup``        single frames: for queries and recovery, and to tell later that the log is still the same
"""
