"""The commitlog: segment files in, frames out. Reads only; a broker's file is never opened for writing.

``format``      the drawing of a frame, its constants, the outcomes
``decoder``     one frame -> Message, in plain Python: queries, inspection, tests
``kernel``      many frames -> arrays, compiled: the hot path; it calls
``bytes_kernel``   loads, hashes, numbers; ``crc``  the checksum
``segments``    which segment files there are, over several directories
``batcher``     bytes at hand -> one DispatchBatch
``cursor``      the open segment and the buffer that is filled from it
``reader``      position -> next batch or why not: end, not yet written, corrupt
``split_points``   where inside a segment reading can begin
``evidence``    single frames as they were, to tell later that the log is still the same
``writer``      the built-in writer of real frames, for the demo and the tests
``tail``  the end of the log, where the writer is
"""
