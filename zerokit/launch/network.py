"""Addresses of this machine: free ports, and the interface that leads to another machine."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
from collections.abc import Sequence

_SIOCGIFADDR = 0x8915
_CONNECT_SECONDS = 5.0

# Systems give ports from 32768 (Linux) or 49152 on to outgoing connections and to whoever binds port 0. A port from
# there is often taken again before its server listens: torchrun's agent needs seconds to start.
_PORTS = range(20_000, 30_000)
_PORT_ATTEMPTS = 100


def free_port(address: str = "127.0.0.1") -> int:
    """A random TCP port of this address that is free at the moment and that the system gives to nobody by itself."""
    # Not the module's generator: programs that seed it alike would all draw the same ports.
    draw = random.SystemRandom()
    for port in [*draw.sample(_PORTS, _PORT_ATTEMPTS), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no TCP port of {address or 'this machine'} is free")


def address_towards(other: str) -> str:
    """This machine's IPv4 address on the route to `other`, a name or an address.

    Raises `OSError` where it cannot be resolved or no route leads there. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        address: str = probe.getsockname()[0]
        return address


def first_reached(addresses: Sequence[str], port: int) -> str | None:
    """The first of these addresses that accepts a connection from here, if any."""
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _CONNECT_SECONDS):
            return address
    return None


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address; None if there is none or it cannot be determined."""
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
