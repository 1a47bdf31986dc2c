"""Keys asked in time ranges as the broker asks, and what is true: which queries are wrong today.

``draw``          keys that are asked for, and the messages that have their hashes
``kernel``        the finding of these on the way, compiled
``broker_query``  the broker's own query, on its files
``asking``        the samples asked in time ranges of several widths
``answers``       what that came to
"""
