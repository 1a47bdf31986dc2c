"""``scripts/bench``: indexd and RocketMQ's own classes measured side by side."""
