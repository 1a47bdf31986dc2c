"""The one seam to the disk: every open, read, write, fsync and rename of indexd passes here.

``disk``   Disk and DiskFile, the calls themselves; tests replace them by a disk that fails or forgets.
``remote`` the same calls for a store behind a URI, which is only read.
``names``  which file names mean what.
``lock``   one instance per data directory.
``page_cache``   reading much without taking memory from others.
"""
