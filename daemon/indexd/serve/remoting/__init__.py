"""RocketMQ's own protocol: one port that is name server and broker in one for queries, and a way to both for the rest.

``server``      serve_remoting: connections on a socket that listens already
``hall``        Hall: what all connections of a server share
``access``      Access: networks, TLS, signatures
``connection``  Connection: frames in, answers out, and bounds on what a client may keep waiting
``command``     RemotingCommand: one frame, in both forms of its header
``processor``   RemotingProcessor: request code -> what answers it
``messages``    messages by key, by physical offset and by queue offset
``key_queries``         KeyQueries: those by key that come together, by one compiled call
``key_queries_kernel``  the same, compiled
``directory``   Directory: routes and the cluster, leading to this port
``routes``      how both are written, and made to lead here
``forward``     Forwarder: what is no query goes on, and the answer back
``places``      NameServers, Whereabouts: who is asked for routes, and where the broker is
``upstream``    LinkPool: connections to them, and what is known of those that fail
``link``        Link: one of these connections, shared by many requests
"""
