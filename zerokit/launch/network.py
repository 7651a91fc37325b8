"""Addresses of this machine: free ports, and the interface that leads to another one."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Sequence

_SIOCGIFADDR = 0x8915
_CONNECT_SECONDS = 5.0


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port of this address that no process listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def address_towards(other: str) -> str:
    """The IPv4 address of this machine that `other`, a name or an address, is reached from.

    Raises `OSError` where it cannot be resolved or no route leads there. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        address: str = probe.getsockname()[0]
        return address


def first_reached(addresses: Sequence[str], port: int) -> str | None:
    """The first of these addresses of a machine at which it takes a connection from here, if any."""
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _CONNECT_SECONDS):
            return address
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where there is none, or no way to ask."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
