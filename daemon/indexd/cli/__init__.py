"""argv -> Config -> one call; errors -> one line on standard error and an exit code.

``main``     parses, loads the configuration, calls, ends; run, --recover, demo, completion, help
``output``   options of every command, words or JSON lines, tables, completion
``query``    query-key, query-unique-key, query-offset, query-time, message
``status``   status
``inspect``  inspect
``jobs``     rebuild, verify, export, stats, doctor, kafka: in this process or on Spark, and the session of Spark
``broker_index``  audit and repair: a broker's own index against its log, and mended
"""
