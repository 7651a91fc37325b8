"""Addresses of this machine."""

from __future__ import annotations

import socket
import sys

import pytest

from zerokit.launch.network import address_towards, free_port, interface_of


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_free_port_can_be_listened_on(address: str) -> None:
    with socket.socket() as listener:
        listener.bind((address, free_port(address)))
        listener.listen()


def test_loopback_is_reached_over_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("localhost") == "127.0.0.1"


def test_a_name_that_leads_nowhere_raises() -> None:
    with pytest.raises(socket.gaierror):
        address_towards("no-such-host.invalid")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_interfaces_are_found_by_their_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # TEST-NET-1: nobody has it
