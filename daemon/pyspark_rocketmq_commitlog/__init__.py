"""Registers the data source ``rocketmq_commitlog`` with Spark, without any code.

Spark looks for top-level modules named ``pyspark_*`` and takes their ``DefaultSource``.
"""

from indexd.spark.source.datasource import CommitLogSource as DefaultSource

__all__ = ["DefaultSource"]
