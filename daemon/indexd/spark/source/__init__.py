"""The log as a table: the Spark data source ``rocketmq_commitlog``, in batches and as a stream, and its rows.

``columns``       the schema of a message and its version
``datasource``    the data source itself: its readers of a DataFrame and of a streaming query, its options
``rows``          the messages of a split as Arrow record batches
``rows_kernel``   where the parts of messages stand in frames; compiled
"""
