"""Kafka's own partition directories: their indexes checked against their logs, and rebuilt (spec kafka-index 8)."""
