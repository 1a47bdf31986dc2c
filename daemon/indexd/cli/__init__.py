"""argv -> Config -> one call; errors -> one line on standard error and an exit code.

``main``     parses, loads the configuration, calls, ends
``run``      run, --recover: what needs the compiler is loaded when called
``status``   status, which only then loads status_ask (HTTP, ssl) and status_draw (rich)
``completion``  completion, by shtab
``rebuild``  rebuild, in this process or on Spark
``query``    query-key, query-unique-key, query-offset, query-time, message
``inspect``  inspect: which file it is; inspect_records prints the records of each kind
``verify``   verify, which loads the compiler too
``audit``    audit: a broker's own index against its log; loads the compiler too
``repair``   repair: a stopped broker's own index mended; loads the compiler too
``kafka``    kafka check, kafka rebuild: loads the compiler too
``demo``     demo
``doctor``   doctor: what Spark would be started with
``stats``    stats: what is in the log, counted on Spark
``export``   export: messages as Parquet, on Spark
``output``   words or JSON lines
"""
