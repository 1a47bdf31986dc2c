"""RocketMQ's own protocol: one port that is name server and broker in one for queries, and a way to both for the rest.

``command``      RemotingCommand: one frame, in both forms of its header
``access``       who may ask: networks, TLS, signatures
``context``      what connections share: counters, memory budget, log, and the protocols between the modules
``connection``   Connection: frames in, answers out, and bounds on what a client may keep waiting
``server``       serve_remoting: accepts connections on a socket that listens already
``processor``    RemotingProcessor: passes each request to what answers it
``handlers``     requests that the index answers
``key_queries``  KeyQueries: queries by key that arrive together, answered by one compiled call
``key_queries_kernel``  its compiled code
``routes``       routes and clusters, read, written, and made to lead here
``directory``    Directory: requests for routes and the cluster
``forward``      Forwarder, Channel: what is no query goes on, and the answer back
``upstream``     NameServers, BrokerLocator, CircuitBreaker: who is asked, and who hangs
``link``         Link, LinkPool: connections to name servers and brokers
"""
