"""What a running daemon shows of itself and answers: read only, in a thread of its own, never in the way of indexing.

``daemon_status``  DaemonStatus: the figures, as the daemon's threads write them; Status: each with metric and words
``events``         what happened lately
``server``         ServeThread: the event loop on which the rest lives
``queries``        Queries: questions to the data directory, and the threads in which they are answered
``access_files``   what decides who may ask, as every outlet reads it
``http``           metrics, health, queries and the page, one ASGI application
``web``            the page
``metrics``        the collector for Prometheus
``mqtt``           status, state and events, published
``remoting``       RocketMQ's own protocol: queries for its tools and clients
"""
