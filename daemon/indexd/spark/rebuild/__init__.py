"""A whole data directory from a commitlog, by tasks: splits become runs, runs become files.

``job``            the driver: stage one, the chain, stage two, the renames, the manifest
``stage_one``      a split read once, its rows written as a run
``build_index``    stage two of the key index: a task an index file
``build_queues``   of the ConsumeQueues: a task a few buckets of queues
``build_sparse``   of the sparse indexes: a task a few segments
``run_writer``  runWriter
``runs_kernel``  rows sorted by queue bucket, and the first row of each queue; compiled
"""
