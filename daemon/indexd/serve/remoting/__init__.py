"""Speaks RocketMQ's own protocol: one port that is name server and broker in one for queries, and a way to both.

``command``      RemotingCommand: one frame, in both forms of its header
``access``       who may ask: networks, TLS, signatures
``server``       serve_remoting: connections on a socket that listens already, bounds on what they hold, counts
``processor``    RemotingProcessor: passes each request to what answers it; the requests that the index answers
``routes``       routes and clusters, read, written, and made to lead here
``upstream``     Forwarder: what is no query goes to a name server or the broker, and the answer back
``key_queries``  KeyQueries: queries by key that arrive together, answered by one compiled call
``key_queries_kernel``  its compiled code
"""
