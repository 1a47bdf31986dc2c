"""argv -> Config -> one call; errors -> one line on standard error and an exit code.

``main``     parses, loads the configuration, calls, ends
``run``      run, --recover: what needs the compiler is loaded when called
``status``   status, which only then loads status_ask (whom), status_http, status_words and status_draw (rich)
``completion``  completion: the words of all commands, from completion_tree, by completion_scripts
``rebuild``  rebuild, in this process or on Spark
``query``    query-key, query-unique-key, message
``query_queue``  query-offset, query-time
``inspect``  inspect, with inspect_index, inspect_log, inspect_queue and inspect_sparse for the kinds of file
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
