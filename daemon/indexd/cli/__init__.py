"""argv -> Config -> one call; errors -> one line on standard error and an exit code.

``main``     parses, loads the configuration, calls, ends; run, --recover, demo, completion, help
``output``   options of every command, words or JSON lines, tables, completion
``query``    query-key, query-unique-key, query-offset, query-time, message
``status``   status
``inspect``  inspect
``rebuild``  rebuild, in this process or on Spark; verify; doctor; the session of Spark
``audit``    audit: a broker's own index against its log
``repair``   repair: a stopped broker's own index mended
``kafka``    kafka check, kafka rebuild
``stats``    stats: what is in the log, counted on Spark
``export``   export: messages as Parquet, on Spark
"""
