"""A whole data directory from a commitlog, by tasks: splits become runs, runs become files.

``job``            the driver, and stage one: a split read once, its rows written as a run; runs chained to one log
``runs``           the files of a run: their columns, writer and readers
``stage_two``      tasks that build an index file, a few buckets of queues, or the sparse indexes of a few segments
"""
