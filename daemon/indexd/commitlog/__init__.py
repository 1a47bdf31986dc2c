"""The commitlog: segment files in, frames out. Reads only; a broker's file is never opened for writing.

``format``      the drawing of a frame, its constants, the outcomes
``properties``  the property text and Java's UTF-8
``decoder``     one frame -> Message, in plain Python: queries, inspection, tests
``kernel``      many frames -> arrays, compiled: the hot path; it calls
``heads_kernel``   what a head says; ``fields_kernel``  what is inside a frame;
``bytes_kernel``   loads, hashes, numbers; ``crc``  the checksum
``dispatch``    DispatchBatch (arrays) and DispatchRequest (the view of one row)
``segments``    which segment files there are, over several directories
``log_end``     how far a log goes, without reading it: for figures
``ahead``       large stretches at a time, for catching up
``batcher``     bytes at hand -> one DispatchBatch
``cursor``      the open segment and the buffer that is filled from it
``reader``      position -> next batch or why not: end, not yet written, corrupt
``reading``     what a reader is told, counts and returns
``gaps``        where no segment is: expired, missing, not there yet
``log_limit``   how far the broker vouches for its log
``suspects``    messages older than one before them: a clock, or a longer log that was cut
``settle``      the end of the log, where the writer is
``split_points``   where inside a segment reading can begin
``salvage``     behind damage: the next frame that proves itself
``evidence``    single frames as they were, to tell later that the log is still the same
``lookup``      the message at an offset, for queries
``writer``      the built-in writer of real frames, for the demo and the tests
"""
