"""A whole data directory from a commitlog, by tasks: splits become runs, runs become files.

``job``            the driver and its tasks: stage one reads splits into runs, stage two builds the files from them
``runs``           the files of a run: their columns, writer and readers
"""
