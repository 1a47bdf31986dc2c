"""A whole data directory from a commitlog, by tasks: splits become runs, runs become files.

``job``            the driver: stage one, the chain, stage two, the renames, the manifest
``stage_one``      a split read once, its rows written as a run
``run_format``     the drawing of a run; ``run_writer``  writes one, ``runs``  reads one, ``runs_kernel``  the loops
``build_index``    stage two of the key index: a task an index file
``build_queues``   of the ConsumeQueues: a task a few buckets of queues
``build_sparse``   of the sparse indexes: a task a few segments
"""
