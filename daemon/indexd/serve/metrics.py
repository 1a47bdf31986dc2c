"""Metrics: one collector for Prometheus, which reads the board's figures when it is asked."""
