"""The log as a table: the Spark data source ``rocketmq_commitlog``, in batches and as a stream, and its rows.

``columns``       the schema of a message and its version
``datasource``    the data source itself
``options``       what ``option(...)`` may say
``batch``         a DataFrame of the log: partitions, and the reader of one
``stream``        a streaming query over it: offsets, limits, what a cut or expired log means
``rows``          the messages of a split as Arrow record batches
``located``       where in the frames each value of a batch lies; ``rows_kernel``  finds it, compiled
``texts_kernel``  copies the values out, compiled; ``arrays``  Arrow arrays over buffers, without pandas
``time_range``    which part of the log can hold a time
``log_end``       where the log ends now
``explained``     errors that end up in Spark's own text keep their hint
"""
