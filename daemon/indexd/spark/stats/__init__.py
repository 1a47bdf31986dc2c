"""Statistics of a log: counted split by split inside the tasks, merged on the driver, shown four ways.

    parts_kernel    where a frame's parts lie, fingerprints of texts, buckets of sizes
    table_kernel    the counting table
    content_kernel  the loop over messages: topics, hours, sizes, keys, tags, hosts, the clock
    known_kernel    the loop over messages once more, for candidates alone
    chains_kernel   the loop over index entries: how long each slot's chain would be
    queries_kernel  RocketMQ's answers to queries, tried on the entries of a sample of slots
    tally           how often each text occurs, in bounded memory: the most frequent, and how many there are
    clock           steps back and silences
    content         what a stretch of the log holds, and merging two of them
    chains          the files of an index that is not built: which task counts which
    queries         what share of queries RocketMQ would answer wrongly: what that means, and the count
    verdict         is the number of slots right?
    names           from a fingerprint back to a text, by reading one message
    work            what a task does
    collect         the whole of it, on whatever runs tasks
    buckets         bounds of buckets, and quantiles
    report          everything as one plain object
    wording         what only the statistics say in words
    terminal        the report on a terminal
    tables          the report as Parquet
    plots           the page's plots
    page            the page: page.html and page.css beside it

Only ``collect.spark_run`` knows Spark. ``tables`` needs pyarrow, ``terminal`` rich, ``page`` jinja2.
"""
