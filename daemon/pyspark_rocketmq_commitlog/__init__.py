"""Registers the data source ``rocketmq_commitlog`` with Spark, without any code.

Spark looks for top-level modules named ``pyspark_*`` and takes their ``DefaultSource``. This one is imported for every
session that looks, so it loads no more than the schema.
"""

from indexd.spark.source.datasource import CommitLogSource as DefaultSource

__all__ = ["DefaultSource"]
