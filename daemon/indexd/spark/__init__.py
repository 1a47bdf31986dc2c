"""The pipeline on Spark: the project's own kernels and formats, run over any amount of log, on a laptop or a cluster.

Where a job runs:

    java          which Java to start, found without starting one, and the shim that makes it start Spark
    session       a Spark session with defaults for a laptop, or on a master or a Connect server
    tasks         plain Python work as Spark tasks, one task an item; errors cross the wire as themselves
    workers       what forks the Python workers on this machine, without their noise
    progress      how far a job is, in bytes, of a classic session and of Connect
    failures      what ended a job, as one of indexd's own errors

What a task reads, and the data source ``rocketmq_commitlog``:

    splits        the log in stretches that are read side by side, exact without any index
    columns       the schema of a message and its version
    rows          the messages of a split as Arrow record batches: located, rows_kernel, texts_kernel, arrays
    options       what ``option(...)`` may say
    source        the data source; a DataFrame of the log (batch), a streaming query over it (stream)
    time_range    which part of the log can hold a time
    log_end       where the log ends now
    explained     errors that end up in Spark's own text keep their hint

What a job makes:

    rebuild       a whole data directory: splits become runs, runs become files
    stage_one     a split read once, its rows written as a run: run_format, run_writer, runs, runs_kernel
    chain         each run begins where the one before it ended
    build_index   stage two of the key index; build_queues of the ConsumeQueues, build_sparse of the sparse indexes
    job_directory where a rebuild makes everything until it is renamed
    audit         the audit of a broker's index
    export        messages as Parquet: export_task, parquet, partitions; target, outputs and remote_outputs are where they go
    stats         what the log holds, counted

Only the session, the tasks and the rest of this package import pyspark: the daemon and the queries never do. Everything
but the progress of a classic session uses the DataFrame API alone, so that the same code runs on local masters, on a
standalone cluster and through Connect.
"""

from indexd.config.compiled import prepare_compiler

# Before any module here loads numba, which reads where its cache is once: an executor, or a notebook that reads the
# log by the data source's name, gets here without the command line.
prepare_compiler()
