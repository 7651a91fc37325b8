"""Addresses of this machine."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

import pytest

from zerokit.launch.network import address_towards, free_port, interface_of


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_an_interface_is_found_by_the_address_that_leads_there() -> None:
    assert interface_of(address_towards("localhost")) == "lo"
    assert interface_of("192.0.2.1") is None  # TEST-NET-1: nobody has it


def test_a_free_port_is_none_that_the_system_gives_away() -> None:
    """Between the search and the server's start, outgoing connections take ports of the system's range."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, given.read_text().split()) if given.exists() else (49_152, 65_535)
    ports = []
    for _ in range(20):
        random.seed(0)  # as programs do on every rank
        ports.append(free_port())
        with socket.socket() as server:
            server.bind(("127.0.0.1", ports[-1]))
    assert not [port for port in ports if first <= port <= last]
    assert len(set(ports)) > 10
