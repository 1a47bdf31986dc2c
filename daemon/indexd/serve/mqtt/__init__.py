"""MQTT: status, state and events, published and never listened for: nothing that is sent here moves the daemon.

By aiomqtt, which is asyncio-mqtt under its present name. MQTT 5, everything with QoS 1.

``payload``    topics and JSON, pure
``outbox``     Outbox: the events that wait for a connection, bounded
``pace``       how often: states, tries to connect, lines of the log
``inlet``      Inlet: the little that a broker may send
``reasons``    reason: why there is no connection, in a line
``link``       Link: one connection, cut or left
``publisher``  publish: connect, publish, connect again
"""

from .publisher import publish

__all__ = ["publish"]
