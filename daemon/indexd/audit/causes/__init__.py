"""Why the keys of a hole are not findable: its likely cause, and what in the store speaks for it.

``around``   what stands before and behind a hole
``judge``    the cause of each hole
``tail``     the same of a hole that goes on to the end of the log
``log_cut``  where a broker that starts cuts its log
``words``    causes by their names
"""
