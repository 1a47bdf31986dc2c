"""What a running daemon shows of itself and answers: read only, in a thread of its own, never in the way of indexing.

``board``       Board: the figures, as the daemon's threads write them
``events``      Events: what happened lately
``histogram``   Histogram: how long things took
``server``      ServeThread: the event loop on which the rest lives
``http``        metrics, health, queries and the page, one ASGI application
``web``         the page
``metrics``     the collector for Prometheus
``mqtt``        status, state and events, published
"""
