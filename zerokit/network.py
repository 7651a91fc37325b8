"""Addresses of this machine: free ports, and the interface that leads to another machine."""

from __future__ import annotations

import contextlib
import random
import socket

import psutil

# Systems give ports from 32768 (Linux) or 49152 on to outgoing connections and to whoever binds port 0. A port from
# there is often taken again before its server listens: torchrun's agent needs seconds to start.
PORTS = range(20_000, 30_000)
_PORT_ATTEMPTS = 100


def free_port(address: str = "127.0.0.1") -> int:
    """A random TCP port of this address that is free at the moment and that the system gives to nobody by itself."""
    # Not the module's generator: programs that seed it alike would all draw the same ports.
    draw = random.SystemRandom()
    for port in [*draw.sample(PORTS, _PORT_ATTEMPTS), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no TCP port of {address or 'this machine'} is free")


def address_towards(other: str) -> str:
    """This machine's address on the route to `other`, a name or an address.

    Raises `OSError` where it cannot be resolved or no route leads there. Nothing is sent.
    """
    family, _, _, _, target = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """The network interface with this address, if any."""
    return next(
        (
            name
            for name, found in psutil.net_if_addrs().items()
            if any(one.address.partition("%")[0] == address for one in found)
        ),
        None,
    )
