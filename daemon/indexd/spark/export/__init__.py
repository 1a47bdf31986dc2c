"""Messages as Parquet: one task a split, all or nothing.

``job``             the driver: what is asked for, the tasks, what it came to
``export_task``     a split written by a worker
``parquet``         the shape of files and row groups; the writer of one part
``partitions``      directories by topic and day, safe for any topic
``append``          where an export goes on behind earlier ones, if the log is still the same
``target``          the commit protocol: attempts, manifest, what a crash leaves
``outputs``         files on a local or shared disk; ``remote_outputs``  objects behind a URI
"""
