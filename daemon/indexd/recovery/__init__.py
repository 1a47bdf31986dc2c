"""From whatever a stop left behind to files that are exactly as they durably were (ARCHITECTURE.md, decision 6).

``open``     data directory -> pipeline and a reader at one offset; a range of the log, with what cannot be read passed
             over, for audit, verify and repair
``recover``  what of each output is kept, held against the log, and making it so; the log to where it ends now
``rebuild``  a whole data directory from the log, at full speed
"""
