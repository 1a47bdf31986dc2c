"""Keys of the remoting protocol: addresses that lead nowhere, and keys that mean nothing."""

from __future__ import annotations

import pytest

from indexd.config import OFF, load
from support.configs import HOME, no_system_file, refused

__all__ = ["no_system_file"]


def test_what_the_remoting_protocol_cannot_be_given() -> None:
    assert "127.0.0.1:10976, [::1]:10976" in str(refused({"remoting": "10976"}))
    assert "127.0.0.1:9577, [::1]:9577" in str(refused({"http": "10976"}))
    for address in ("0.0.0.0:10976", "[::]:10976", "[::ffff:0.0.0.0]:1", "0:10976"):
        assert "not where clients reach it" in str(refused({"remoting_advertise": address}))
    assert load({"remoting_advertise": "10.0.0.7:10976"}, None, HOME).remoting.remoting_advertise == "10.0.0.7:10976"


@pytest.mark.parametrize(
    ("remoting", "upstream", "is_same"),
    [
        ("127.0.0.1:10976", "127.0.0.1:10976", True),
        ("127.0.0.1:10976", "10.0.0.1:9876;127.0.0.1:10976", True),
        ("0.0.0.0:10976", "127.0.0.1:10976", True),
        ("[::]:10976", "[::1]:10976", True),
        ("[::ffff:127.0.0.1]:10976", "127.0.0.1:10976", True),
        ("Names.example:10976", "names.example:10976", True),
        ("127.0.0.1:10976", "127.0.0.1:9876", False),
        ("127.0.0.1:10976", "10.0.0.1:10976", False),
        ("0.0.0.0:10976", "10.0.0.1:10976", False),
        (OFF, "127.0.0.1:10976", False),
    ],
)
def test_the_daemon_does_not_stand_in_front_of_itself(remoting: str, upstream: str, is_same: bool) -> None:
    given = {"remoting": remoting, "upstream_namesrv": upstream}
    if is_same:
        assert "cannot stand in front of itself" in str(refused(given))
    else:
        assert load(given, None, HOME).remoting.remoting == remoting


def test_keys_that_mean_nothing_while_it_is_off() -> None:
    assert load({}, None, HOME).remoting.unused == ()
    given = {"upstream_namesrv": "10.0.0.1:9876", "remoting_idle_timeout": "60"}
    assert load(given, None, HOME).remoting.unused == ("remoting_idle_timeout", "upstream_namesrv")
    assert load(given | {"remoting": "127.0.0.1:1"}, None, HOME).remoting.unused == ()
