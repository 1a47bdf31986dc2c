"""argv -> Config -> one call; errors -> one line on standard error and an exit code.

``main``     parses, loads the configuration, calls, ends; run, --recover, demo, completion, help
``output``   options of every command, words or JSON lines, tables, completion
``query``    query-key, query-unique-key, query-offset, query-time, message
``status``   status
``inspect``  inspect
``rebuild``  rebuild, in this process or on Spark; verify
``broker_index``  audit and repair: a broker's own index against its log, and mended
``kafka``    kafka check, kafka rebuild
``spark``    doctor, export, stats; the session of Spark
"""
