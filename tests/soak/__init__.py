"""``scripts/soak``: daemon and writer beside each other under random faults, everything verified after each round."""
