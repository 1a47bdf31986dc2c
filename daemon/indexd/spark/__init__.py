"""The pipeline on Spark: the project's own kernels and formats, run over any amount of log, on a laptop or a cluster.

Where a job runs:

    session       a Spark session with defaults for a laptop, or on a master or a Connect server; which Java starts it
    tasks         plain Python work as Spark tasks, their progress, and what ended a job as one of indexd's own errors

What a task reads:

    splits        the log in parts that are read side by side, exact without any index; and where it ends now
    source        the log as a table and as a stream, the data source ``rocketmq_commitlog``

What a job makes:

    rebuild       a whole data directory: splits become runs, runs become files
    audit         the audit of a broker's index
    export        messages as Parquet
    stats         what the log holds, counted

Only the session, the tasks and the rest of this package import pyspark: the daemon and the queries never do. Everything
but the progress of a classic session, and the files of an export, uses the DataFrame API alone, so that the same code
runs on local masters, on a standalone cluster and through Connect.
"""

from indexd.config.compiled import prepare_compiler

# Before any module here loads numba, which reads where its cache is once: an executor, or a notebook that reads the
# log by the data source's name, gets here without the command line.
prepare_compiler()
