"""reason: why there is no connection, in one line, with what to look at where that is known."""

from __future__ import annotations

import aiomqtt
from paho.mqtt.reasoncodes import ReasonCode

from indexd.errors import DiskError

# MQTT 5, 2.4: what the package calls an end that nobody has given a reason for, a packet that is none, and silence.
_CODES = {
    0x80: "the connection was lost",
    0x82: "protocol error: a packet that is no MQTT 5, as the broker says or as it sent one; check mqtt_port",
    0x8D: "the connection was lost: the broker has been silent for too long",
}
_TIMED_OUT = "Operation timed out"
_ACCESS = "; check mqtt_username, mqtt_password_file and the broker's access list"
_VOUCHING = "; check mqtt_ca_file, and that mqtt_host is a name in the broker's certificate"
_SIZE = "; check the broker's limit for a packet (mosquitto: max_packet_size)"
# Bad user name or password, not authorized, topic name invalid, packet too large, quota exceeded, retain, QoS.
_HINTS = {
    0x86: _ACCESS,
    0x87: _ACCESS,
    0x90: "; check mqtt_topic_prefix, and which topics the broker allows",
    0x95: _SIZE,
    0x97: "; check the broker's quotas",
    0x9A: "; the broker has to allow retained messages (mosquitto: retain_available true)",
    0x9B: "; the broker has to allow QoS 1 (mosquitto: max_qos 1)",
}


class RefusedError(aiomqtt.MqttError):
    """The broker does not take what is published; the message is the whole reason, with the topic."""

    @classmethod
    def by_code(cls, topics: str, code: ReasonCode) -> RefusedError:
        """As the broker said; ``topics`` is what it was about, as far as that is known."""
        return cls(f"the broker says about {topics}: {code}{_HINTS.get(code.value, '')}")

    @classmethod
    def by_size(cls, topic: str, size_max: int) -> RefusedError:
        """Nothing was sent: the broker has said before that it takes ``size_max`` bytes."""
        # Without the size, which is another at each try: the same reason is said once.
        return cls(f"the broker says about {topic}: Packet too large, more than {size_max} bytes{_SIZE}")


def is_about_topics(code: object) -> bool:
    """Whether a broker that ends the connection so means what was being published."""
    return isinstance(code, ReasonCode) and code.value in _HINTS


def reason(error: BaseException) -> str:
    """One line for the log."""
    if isinstance(error, DiskError):
        return error.line()
    cause = error.__cause__ or error
    code = getattr(cause, "rc", None)
    if isinstance(code, ReasonCode):
        return _CODES.get(code.value) or f"the broker says: {code}{_HINTS.get(code.value, '')}"
    if isinstance(error, TimeoutError) or str(error) == _TIMED_OUT:
        return "the broker does not answer; check mqtt_port and mqtt_tls"
    text = " ".join(str(cause).split())
    return f"{text}{_VOUCHING}" if "certificate" in text.lower() else text
