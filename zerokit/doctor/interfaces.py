"""Network interfaces: those that gloo and NCCL will use, their MTU, and InfiniBand ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import psutil

from zerokit.doctor.findings import Answers, Finding, Verdict, by_machine, by_rank, finding, machines, where

_CLASS = Path("/sys/class")

SMALL_MTU = 1280
"""The least that IPv6 allows (RFC 8200). Ethernet has 1500, of which clouds and overlays take up to 100."""


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface of this machine; `running` if it is up with a carrier, `speed_mbit` None if unknown."""

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
        """The interface on which gloo will listen; None if it is unknown or gloo will fail."""
        if self.gloo is not None:
            wanted = self.gloo.split(",")[0]
            return next((one for one in self.interfaces if one.name == wanted), None)
        # All of 127.0.0.0/8 is this machine's; Debian gives the host's name 127.0.1.1, which no interface lists.
        own = [ip_address(address) for address in self.own_addresses]
        for one in self.interfaces:
            if one.addresses and any(
                str(address) in one.addresses or (one.loopback and address.is_loopback) for address in own
            ):
                return one
        return None


def look_at_network(own_addresses: Sequence[str], devices: Path = _CLASS) -> Network:
    """Collect the interfaces and ports that this process sees.

    Args:
        own_addresses: what the host's own name resolves to.
        devices: the kernel's folder of device classes.
    """
    return Network(
        interfaces=_interfaces(),
        gloo=os.environ.get("GLOO_SOCKET_IFNAME") or None,
        nccl=os.environ.get("NCCL_SOCKET_IFNAME") or None,
        ports=[
            Port(port.parents[1].name, port.name, _read(port / "state").partition(": ")[2] or "unknown")
            for port in sorted(devices.glob("infiniband/*/ports/*"))
        ],
        own_addresses=list(own_addresses),
    )


def _interfaces() -> list[Interface]:
    """This network's interfaces: those of a container, where there is one."""
    found = psutil.net_if_addrs()
    return [
        Interface(
            name=name,
            running=state.isup,
            loopback="loopback" in state.flags.split(","),
            # Link-local addresses carry their interface: fe80::1%eth0.
            addresses=[
                one.address.partition("%")[0]
                for one in found.get(name, [])
                if one.family in (socket.AF_INET, socket.AF_INET6)
            ],
            mtu=state.mtu,
            speed_mbit=state.speed or None,
        )
        for name, state in psutil.net_if_stats().items()
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nccl_takes(interfaces: Sequence[Interface], wanted: str | None) -> list[Interface]:
    """The interfaces that NCCL would consider, by its rules for `NCCL_SOCKET_IFNAME`.

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
            return Verdict.fault(
                f"{variable}: loopback",
                "gloo would listen where the other nodes cannot reach it.",
                f"name the interface between the nodes: {_candidates(network)}",
            )
    return Verdict.ok(f"{variable}: {_described(by_name[network.gloo.split(',')[0]])}")


_BRING_UP = "bring loopback up: ip link set lo up"


def _judge_gloos_lookup(network: Network, several: bool) -> Verdict:
    taken = network.gloo_takes()
    remedy = f"set GLOO_SOCKET_IFNAME to the interface between the nodes: {_candidates(network)}"
    if not any(one.running and one.addresses for one in network.interfaces):
        return Verdict.fault("no interface is up", "gloo cannot listen, so that ranks never meet.", _BRING_UP)
    if taken is None:
        what = ", ".join(network.own_addresses) or "no address"
        listed = f"the host's own name resolves to {what}, which no interface has"
        meaning = "gloo falls back to loopback, so that other nodes cannot reach it."
        return Verdict.fault(listed, meaning, remedy) if several else Verdict.warning(listed, meaning, remedy)
    if taken.loopback and several:
        return Verdict.fault(
            f"the host's own name resolves to loopback ({', '.join(network.own_addresses)})",
            "gloo would listen where the other nodes cannot reach it.",
            remedy,
        )
    note = ": ranks of this machine only" if taken.loopback else ""
    return Verdict.ok(f"by the host's name: {_described(taken)}{note}")


def _judge_nccl(network: Network, several: bool) -> Verdict:
    taken = nccl_takes(network.interfaces, network.nccl)
    if network.nccl is not None:
        variable = f"NCCL_SOCKET_IFNAME={network.nccl}"
        if not taken:
            return Verdict.fault(
                f"{variable}: no such interface",
                "NCCL finds no interface and fails when it starts.",
                f"name one of {_candidates(network)}",
            )
        if not any(one.running and one.addresses for one in taken):
            names = ", ".join(one.name for one in taken)
            return Verdict.fault(
                f"{variable}: {names} is down or has no address",
                "NCCL cannot meet the other ranks over it.",
                f"bring it up, or name one of {_candidates(network)}",
            )
    usable = [one for one in taken if one.running and one.addresses]
    if not usable:
        return Verdict.warning("no interface is up", "NCCL cannot start.", _BRING_UP)
    if several and all(one.loopback for one in usable):
        return Verdict.fault(
            f"only {usable[0].name}",
            "Other nodes cannot be reached over loopback.",
            f"set NCCL_SOCKET_IFNAME to one of {_candidates(network)}",
        )
    prefix = "" if network.nccl is None else f"NCCL_SOCKET_IFNAME={network.nccl}: "
    return Verdict.ok(prefix + ", ".join(map(_described, usable)))


def _unusable(variable: str, name: str, by_name: Mapping[str, Interface]) -> Verdict | None:
    one = by_name.get(name)
    if one is not None and one.running and one.addresses:
        return None
    what = "no such interface" if one is None else "has no address" if one.running else "is down"
    others = ", ".join(other.name for other in by_name.values() if other.running and other.addresses)
    return Verdict.fault(
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
        return [finding("ZD305", Verdict.skipped("no interface but loopback"))]
    if len(sizes) > 1:
        listed = "; ".join(
            f"{size} on {names[0]}, {where([seats[index] for index in by_size[size]], seats)}"
            for size, names in sizes.items()
        )
        return [
            finding(
                "ZD305",
                Verdict.warning(
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
                Verdict.warning(
                    f"{size} on {names[0]}",
                    f"Less than {SMALL_MTU}, which IPv6 needs; more packets take more processor time.",
                    f"ip link set dev {names[0]} mtu 1500, or 9000 where switches allow it",
                ),
            )
        ]
    return [finding("ZD305", Verdict.ok(f"{size} on {names[0]}"))]


def _between_nodes(network: Network) -> Interface | None:
    """What carries bytes to other nodes: gloo's interface, or on loopback the first that would."""
    taken = network.gloo_takes()
    candidates = [*([] if taken is None else [taken]), *nccl_takes(network.interfaces, network.nccl)]
    return next((one for one in candidates if one.running and not one.loopback), None)


def _judge_ports(network: Network) -> Verdict:
    if not network.ports:
        return Verdict.ok("no devices")
    listed = ", ".join(f"{port.device} port {port.port} {port.state}" for port in network.ports)
    down = [port for port in network.ports if port.state != "ACTIVE"]
    if not down:
        return Verdict.ok(listed)
    return Verdict.warning(
        listed,
        "NCCL leaves out ports that are not active: less bandwidth, or only sockets.",
        "look at the cable and the subnet manager (ibstat), or name the ports in use in NCCL_IB_HCA",
    )
