"""The commitlog: segment files in, frames out. Reads only; a broker's file is never opened for writing.

``format``      the drawing of a frame, its constants, the outcomes
``properties``  the property text and Java's UTF-8
``decoder``     one frame -> Message, in plain Python: queries, inspection, tests
``kernel``      many frames -> arrays, compiled: the hot path
``crc``         the checksum, compiled
``dispatch``    DispatchBatch (arrays) and DispatchRequest (the view of one row)
``segments``    which segment files there are, over several directories
``reader``      position -> next batch or why not: end, not yet written, corrupt
``writer``      the built-in writer of real frames, for the demo and the tests
"""
