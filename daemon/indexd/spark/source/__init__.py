"""The log as a table: the Spark data source ``rocketmq_commitlog``, in batches and as a stream, and its rows.

``columns``       the schema of a message and its version
``datasource``    the data source itself
``options``       what ``option(...)`` may say
``batch``         a DataFrame of the log: partitions, and the reader of one
``rows``          the messages of a split as Arrow record batches
``log_end``       where the log ends now
``rows_kernel``  from frames to Arrow's buffers
"""
