"""RocketMQ's own protocol: one port that is name server and broker in one for queries, and a way to both for the rest.

``server``      serve_remoting: connections on a socket that listens already
``inflow``      Inflow: what has come to a connection and is not taken yet
``outflow``     Outflow: what leaves a connection, and whether it is taken
``hall``        Hall: what all connections of a server share
``room``        Room: what they all may hold of this process's memory
``counts``      RemotingCounts: what they did, as metrics show it
``sparing``     SparingLog: lines that others can bring about, each seldom
``access``      Access: networks, TLS, signatures
``connection``  Connection: frames in, answers out, and bounds on what a client may keep waiting
``command``     RemotingCommand: one frame, in both forms of its header
``codes``       the numbers of requests, answers, languages and versions
``client``      Client, Processor: what connections and those who answer ask of each other
``processor``   RemotingProcessor: request code -> what answers it
``asked``       what a request asks for, read as the broker reads it
``messages``    messages by key, by physical offset and by queue offset
``key_queries``         KeyQueries: those by key that come together, by one compiled call
``key_queries_kernel``  the same, compiled
``offsets``     queue offsets by time, least and largest; the earliest store time
``runtime``     the index's own figures, as a broker's
``directory``   Directory: routes and the cluster, leading to this port
``routes``      how both are written, and made to lead here
``forward``     Forwarder: what is no query goes on, and the answer back
``lanes``       Lane, OwnLane: by which connection a client's requests go to the broker
``places``      NameServers, Whereabouts: who is asked for routes, and where the broker is
``doubt``       Doubt: whether those who did not answer are waited for
``upstream``    LinkPool: connections to them, and what is known of those that fail
``link``        Link: one of these connections, shared by many requests
"""
