"""MQTT: status, state and events, published and never listened for: nothing that is sent here moves the daemon.

By aiomqtt, which is asyncio-mqtt under its present name. MQTT 5, everything with QoS 1.

``link``       Link: one connection, cut or left
``publisher``  publish: connect, publish, connect again
"""

from .publisher import publish

__all__ = ["publish"]
