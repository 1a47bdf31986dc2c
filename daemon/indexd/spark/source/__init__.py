"""The log as a table: the Spark data source ``rocketmq_commitlog``, in batches and as a stream, and its rows.

``datasource``    the data source itself
``options``       what ``option(...)`` may say
``batch``         a DataFrame of the log: partitions, and the reader of one
``rows``          the messages of a split as Arrow record batches
``rows_kernel``  from frames to Arrow's buffers
"""
