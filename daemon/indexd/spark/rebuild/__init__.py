"""A whole data directory from a commitlog, by tasks: splits become runs, runs become files.

``job``            the driver: stage one, the chain, stage two, the renames, the manifest
``stage_one``      a split read once, its rows written as a run; runs chained to one log
``runs``           the file of a run: its drawing, writer and reader
``stage_two``      tasks that build an index file, a few buckets of queues, or the sparse indexes of a few segments
"""
