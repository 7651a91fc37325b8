"""Network interfaces: which ones gloo and NCCL will take, their MTU, and InfiniBand ports.

The kernel is asked by ioctl and not by /sys/class/net, which in a container may be another network's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from zerokit.doctor.findings import (
    Answers,
    Finding,
    Verdict,
    by_machine,
    by_rank,
    fault,
    finding,
    machines,
    ok,
    skipped,
    warning,
    where,
)

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFMTU = 0x8913, 0x8915, 0x8921
"""Linux's sockios.h."""
_SIOCETHTOOL, _ETHTOOL_GSET, _ETHTOOL_CMD_BYTES = 0x8946, 0x1, 44
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_CLASS = Path("/sys/class")

SMALL_MTU = 1280
"""The least that IPv6 allows (RFC 8200). Ethernet has 1500, of which clouds and overlays take up to 100."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One of this machine's; `running`: it is up and has a carrier, `speed_mbit` is None where unknown."""

    name: str
    running: bool
    loopback: bool
    addresses: list[str]
    mtu: int
    speed_mbit: int | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an InfiniBand or RoCE device, with the state that the kernel reports: "ACTIVE" where it works."""

    device: str
    port: str
    state: str


@dataclass(frozen=True, slots=True)
class Network:
    """Interfaces and ports, and the variables that choose among them: `GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`."""

    interfaces: list[Interface]
    gloo: str | None = None
    nccl: str | None = None
    ports: list[Port] = field(default_factory=list)
    own_addresses: list[str] = field(default_factory=list)
    """Addresses of the host's own name: gloo's choice where no interface is given."""

    def gloo_takes(self) -> Interface | None:
        """The interface that gloo will listen on; None where that cannot be answers, or where it will fail."""
        if self.gloo is not None:
            wanted = self.gloo.split(",")[0]
            return next((one for one in self.interfaces if one.name == wanted), None)
        # All of 127.0.0.0/8 is this machine's; Debian gives the host's name 127.0.1.1, which no interface lists.
        own = [ip_address(address) for address in self.own_addresses]
        for one in self.interfaces:
            if any(
                str(address) in one.addresses or (one.loopback and address.is_loopback) for address in own
            ):
                return one
        return None


def look_at_network(own_addresses: Sequence[str], devices: Path = _CLASS) -> Network:
    """What this process sees.

    Args:
        own_addresses: what the host's own name resolves to.
        devices: the kernel's folder of device classes.
    """
    return Network(
        interfaces=[_interface(name) for _, name in socket.if_nameindex()],
        gloo=os.environ.get("GLOO_SOCKET_IFNAME") or None,
        nccl=os.environ.get("NCCL_SOCKET_IFNAME") or None,
        ports=[
            Port(port.parents[1].name, port.name, _read(port / "state").partition(": ")[2] or "unknown")
            for port in sorted(devices.glob("infiniband/*/ports/*"))
        ],
        own_addresses=list(own_addresses),
    )


def _interface(name: str) -> Interface:
    flags = struct.unpack_from("H", _ask(name, _SIOCGIFFLAGS) or bytes(32), 16)[0]
    mtu = struct.unpack_from("i", _ask(name, _SIOCGIFMTU) or bytes(32), 16)[0]
    address = _ask(name, _SIOCGIFADDR)
    addresses = [socket.inet_ntoa(address[20:24])] if address else []
    return Interface(
        name=name,
        running=flags & _UP != 0 and flags & _RUNNING != 0,
        loopback=flags & _LOOPBACK != 0,
        addresses=addresses + _addresses_6().get(name, []),
        mtu=mtu,
        speed_mbit=_speed(name),
    )


def _ask(name: str, request: int) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        return fcntl.ioctl(asking, request, struct.pack("256s", name.encode()[:15]))
    return None


def _speed(name: str) -> int | None:
    """Mbit/s, by ethtool's oldest request: the driver fills a `struct ethtool_cmd`."""
    answer = ctypes.create_string_buffer(struct.pack("I", _ETHTOOL_GSET), _ETHTOOL_CMD_BYTES)
    request = struct.pack("16sP", name.encode()[:15], ctypes.addressof(answer)).ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            fcntl.ioctl(asking, _SIOCETHTOOL, request)
        except OSError:
            return None
    low, high = struct.unpack_from("H", answer, 12)[0], struct.unpack_from("H", answer, 28)[0]
    speed = int(high << 16 | low)
    return None if speed in (0, 0xFFFF, 0xFFFFFFFF) else speed


def _addresses_6() -> dict[str, list[str]]:
    addresses: dict[str, list[str]] = {}
    for line in _read(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, name = line.split()
        addresses.setdefault(name, []).append(str(IPv6Address(int(digits, 16))))
    return addresses


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nccl_takes(interfaces: Sequence[Interface], wanted: str | None) -> list[Interface]:
    """Those that NCCL would consider, by its rules for `NCCL_SOCKET_IFNAME`.

    A list of prefixes; "=" asks for whole names, "^" for all but these. Without it everything but Docker's bridges
    and loopback, and loopback if there is nothing else (NCCL's documentation, environment variables).
    """
    with_address = [one for one in interfaces if one.addresses]
    if wanted is None:
        others = [one for one in with_address if not one.loopback and not one.name.startswith("docker")]
        return [one for one in others if one.running] or with_address
    without, names = wanted.startswith("^"), wanted.removeprefix("^")
    whole, listed = names.startswith("="), names.removeprefix("=").split(",")
    return [
        one
        for one in interfaces
        if any(one.name == name if whole else one.name.startswith(name) for name in listed) != without
    ]


def judge_network(answers: Answers[Network]) -> list[Finding]:
    """ZD301, ZD302, ZD305, ZD306."""
    several = len(machines(answers)) > 1
    return [
        *by_rank("ZD301", answers, lambda network: _judge_gloo(network, several)),
        *by_rank("ZD302", answers, lambda network: _judge_nccl(network, several)),
        *_judge_mtu(answers),
        *by_machine("ZD306", answers, _judge_ports),
    ]


def _judge_gloo(network: Network, several: bool) -> Verdict:
    if network.gloo is None:
        return _judge_gloos_lookup(network, several)
    variable = f"GLOO_SOCKET_IFNAME={network.gloo}"
    by_name = {one.name: one for one in network.interfaces}
    for name in network.gloo.split(","):
        if (bad := _unusable(variable, name, by_name)) is not None:
            return bad
        if several and by_name[name].loopback:
            return fault(
                f"{variable}: loopback",
                "gloo would listen where the other nodes cannot reach it.",
                f"name the interface between the nodes: {_candidates(network)}",
            )
    return ok(f"{variable}: {_described(by_name[network.gloo.split(',')[0]])}")


def _judge_gloos_lookup(network: Network, several: bool) -> Verdict:
    taken = network.gloo_takes()
    remedy = f"set GLOO_SOCKET_IFNAME to the interface between the nodes: {_candidates(network)}"
    if taken is None:
        what = ", ".join(network.own_addresses) or "no address"
        listed = f"the host's own name resolves to {what}, which no interface has"
        meaning = "gloo falls back to loopback, so that other nodes cannot reach it."
        return fault(listed, meaning, remedy) if several else warning(listed, meaning, remedy)
    if taken.loopback and several:
        return fault(
            f"the host's own name resolves to loopback ({', '.join(network.own_addresses)})",
            "gloo would listen where the other nodes cannot reach it.",
            remedy,
        )
    note = ": ranks of this machine only" if taken.loopback else ""
    return ok(f"by the host's name: {_described(taken)}{note}")


def _judge_nccl(network: Network, several: bool) -> Verdict:
    taken = nccl_takes(network.interfaces, network.nccl)
    if network.nccl is not None:
        variable = f"NCCL_SOCKET_IFNAME={network.nccl}"
        if not taken:
            return fault(
                f"{variable}: no such interface",
                "NCCL finds no interface and fails when it starts.",
                f"name one of {_candidates(network)}",
            )
        if not any(one.running and one.addresses for one in taken):
            names = ", ".join(one.name for one in taken)
            return fault(
                f"{variable}: {names} is down or has no address",
                "NCCL cannot meet the other ranks over it.",
                f"bring it up, or name one of {_candidates(network)}",
            )
    usable = [one for one in taken if one.running and one.addresses]
    if not usable:
        return warning("no interface is up", "NCCL cannot start.", "bring loopback up: ip link set lo up")
    if several and all(one.loopback for one in usable):
        return fault(
            f"only {usable[0].name}",
            "Other nodes cannot be reached over loopback.",
            f"set NCCL_SOCKET_IFNAME to one of {_candidates(network)}",
        )
    prefix = "" if network.nccl is None else f"NCCL_SOCKET_IFNAME={network.nccl}: "
    return ok(prefix + ", ".join(map(_described, usable)))


def _unusable(variable: str, name: str, by_name: Mapping[str, Interface]) -> Verdict | None:
    one = by_name.get(name)
    if one is not None and one.running and one.addresses:
        return None
    what = "no such interface" if one is None else "has no address" if one.running else "is down"
    others = ", ".join(other.name for other in by_name.values() if other.running and other.addresses)
    return fault(
        f"{variable}: {name}: {what}",
        "gloo fails when it starts.",
        f"name one that is up: {others or 'there is none'}",
    )


def _candidates(network: Network) -> str:
    usable = [one for one in network.interfaces if one.running and one.addresses]
    return ", ".join(one.name for one in usable if not one.loopback) or "there is none but loopback"


def _described(one: Interface) -> str:
    speed = "" if one.speed_mbit is None else f", {one.speed_mbit / 1000:g} Gbit/s"
    return f"{one.name} ({one.addresses[0]}, MTU {one.mtu}{speed})"


def _judge_mtu(answers: Answers[Network]) -> list[Finding]:
    sizes: dict[int, list[str]] = {}
    seats = [seat for seat, _ in answers]
    by_size: dict[int, list[int]] = {}
    for index, (_, network) in enumerate(answers):
        if (taken := _between_nodes(network)) is not None:
            sizes.setdefault(taken.mtu, []).append(taken.name)
            by_size.setdefault(taken.mtu, []).append(index)
    if not sizes:
        return [finding("ZD305", skipped("no interface but loopback"))]
    if len(sizes) > 1:
        listed = "; ".join(
            f"{size} on {names[0]}, {where([seats[index] for index in by_size[size]], seats)}"
            for size, names in sizes.items()
        )
        return [
            finding(
                "ZD305",
                warning(
                    listed,
                    "Large packets of one node may be too large for another: connections open and then hang.",
                    f"set one MTU on all nodes: ip link set dev INTERFACE mtu {min(sizes)}",
                ),
            )
        ]
    size, names = next(iter(sizes.items()))
    if size < SMALL_MTU:
        return [
            finding(
                "ZD305",
                warning(
                    f"{size} on {names[0]}",
                    f"Less than {SMALL_MTU}, which IPv6 needs; more packets take more processor time.",
                    f"ip link set dev {names[0]} mtu 1500, or 9000 where switches allow it",
                ),
            )
        ]
    return [finding("ZD305", ok(f"{size} on {names[0]}"))]


def _between_nodes(network: Network) -> Interface | None:
    """What carries bytes to other nodes: gloo's interface, or on loopback the first that would."""
    taken = network.gloo_takes()
    candidates = [*([] if taken is None else [taken]), *nccl_takes(network.interfaces, network.nccl)]
    return next((one for one in candidates if one.running and not one.loopback), None)


def _judge_ports(network: Network) -> Verdict:
    if not network.ports:
        return ok("no devices")
    listed = ", ".join(f"{port.device} port {port.port} {port.state}" for port in network.ports)
    down = [port for port in network.ports if port.state != "ACTIVE"]
    if not down:
        return ok(listed)
    return warning(
        listed,
        "NCCL leaves out ports that are not active: less bandwidth, or only sockets.",
        "look at the cable and the subnet manager (ibstat), or name the ports in use in NCCL_IB_HCA",
    )
