"""The data source ``rocketmq_commitlog``: a broker's log as a DataFrame, in batches and as a stream.

``spark.read.format("rocketmq_commitlog").load(STORE)``; ``columns`` has the schema, ``options`` what else may be said.
Spark finds it by its name without any code (``pyspark_rocketmq_commitlog``), wherever indexd is installed with pyspark.

What is filtered is pruned by options alone. A reader that takes filters from Spark (``pushFilters``) gives wrong rows
in 4.3.0: what was pushed for one query is used for the next on the same DataFrame (spec spark 0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from indexd.spark.source.columns import arrow_schema, parse_columns
from indexd.spark.source.explained import explained
from indexd.spark.source.options import FORMAT, check_names

if TYPE_CHECKING:
    from collections.abc import Sequence


def spark_schema(columns: Sequence[str]) -> StructType:
    """The schema of these columns as Spark has it; the same as the batches', nullability included."""
    return from_arrow_schema(arrow_schema(columns))


class CommitLogSource(DataSource):
    """What Spark makes of ``format("rocketmq_commitlog")`` and its options."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns that the options ask for; nothing of the log is looked at."""
        with explained():
            check_names(self.options)
            return spark_schema(parse_columns(self.options.get("columns")))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For one DataFrame."""
        from indexd.spark.source.batch import CommitLogReader  # noqa: PLC0415 - numba: who lists sources does without

        with explained():
            return CommitLogReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For one streaming query."""
        from indexd.spark.source.stream import CommitLogStreamReader  # noqa: PLC0415 - the same

        with explained():
            return CommitLogStreamReader(self.options, schema)
