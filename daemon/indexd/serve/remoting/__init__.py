"""Speaks RocketMQ's own protocol: one port that is name server and broker in one for queries, and a way to both.

``command``      RemotingCommand: one frame, in both forms of its header
``access``       who may ask: networks, TLS, signatures
``connection``   Connection: frames in, answers out, and bounds on what a client may hold
``server``       serve_remoting: accepts connections on a socket that listens already
``processor``    RemotingProcessor: passes each request to what answers it; the requests that the index answers
``routes``       routes and clusters, read, written, and made to lead here
``forward``      Forwarder: what is no query goes to a name server or the broker, and the answer back
``link``         Link, Dialer: connections to name servers and brokers
``key_queries``  KeyQueries: queries by key that arrive together, answered by one compiled call
``key_queries_kernel``  its compiled code
"""
