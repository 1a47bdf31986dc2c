"""Sparse indexes: Kafka's OffsetIndex and TimeIndex, one pair per commitlog segment (spec kafka-index)."""
