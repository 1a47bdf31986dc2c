"""Statistics of a log: what it holds and what an index of it would be like, as aggregates of Spark DataFrames.

report    the result as one object, and how Spark makes it; is the number of slots right?
show      the object on a terminal, and as a page
"""
