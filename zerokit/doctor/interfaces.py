"""Network interfaces: those that gloo and NCCL will use, their MTU, and InfiniBand ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import psutil

from zerokit.doctor.findings import (
    Answers,
    Finding,
    Seat,
    Verdict,
    by_machine,
    by_rank,
    finding,
    machines,
    where,
)

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

    @property
    def usable(self) -> bool:
        """Whether it is up and has an address."""
        return self.running and bool(self.addresses)

    def __str__(self) -> str:
        speed = "" if self.speed_mbit is None else f", {self.speed_mbit / 1000:g} Gbit/s"
        return f"{self.name} ({self.addresses[0]}, MTU {self.mtu}{speed})"


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

    @property
    def usable(self) -> list[Interface]:
        """The interfaces that are up and have an address."""
        return [one for one in self.interfaces if one.usable]

    @property
    def candidates(self) -> str:
        """Interfaces that lead to other nodes, for advice."""
        return ", ".join(one.name for one in self.usable if not one.loopback) or "there is none but loopback"

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


def look_at_network(own_addresses: Sequence[str]) -> Network:
    """Collect the interfaces and ports that this process sees; the host's own name resolves to these addresses."""
    return Network(
        interfaces=_interfaces(),
        gloo=os.environ.get("GLOO_SOCKET_IFNAME") or None,
        nccl=os.environ.get("NCCL_SOCKET_IFNAME") or None,
        ports=[
            Port(state.parents[2].name, state.parent.name, state.read_text().strip().partition(": ")[2])
            for state in sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
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
        _judge_mtu(answers),
        *by_machine("ZD306", answers, _judge_ports),
    ]


_UNREACHABLE = "gloo would listen where the other nodes cannot reach it."
_BRING_UP = "bring loopback up: ip link set lo up"


def _judge_gloo(network: Network, several: bool) -> Verdict:
    if network.gloo is None:
        return _judge_gloos_lookup(network, several)
    variable = f"GLOO_SOCKET_IFNAME={network.gloo}"
    by_name = {one.name: one for one in network.interfaces}
    for name in network.gloo.split(","):
        one = by_name.get(name)
        if one is None or not one.usable:
            what = "no such interface" if one is None else "has no address" if one.running else "is down"
            others = ", ".join(other.name for other in network.usable) or "there is none"
            return Verdict.fault(
                f"{variable}: {name}: {what}", "gloo fails when it starts.", f"name one that is up: {others}"
            )
        if several and one.loopback:
            return Verdict.fault(
                f"{variable}: loopback",
                _UNREACHABLE,
                f"name the interface between the nodes: {network.candidates}",
            )
    return Verdict.ok(f"{variable}: {by_name[network.gloo.split(',')[0]]}")


def _judge_gloos_lookup(network: Network, several: bool) -> Verdict:
    taken = network.gloo_takes()
    remedy = f"set GLOO_SOCKET_IFNAME to the interface between the nodes: {network.candidates}"
    own = ", ".join(network.own_addresses) or "no address"
    if not network.usable:
        return Verdict.fault("no interface is up", "gloo cannot listen, so that ranks never meet.", _BRING_UP)
    if taken is None:
        judge = Verdict.fault if several else Verdict.warning
        return judge(
            f"the host's own name resolves to {own}, which no interface has",
            "gloo falls back to loopback, so that other nodes cannot reach it.",
            remedy,
        )
    if taken.loopback and several:
        return Verdict.fault(f"the host's own name resolves to loopback ({own})", _UNREACHABLE, remedy)
    note = ": ranks of this machine only" if taken.loopback else ""
    return Verdict.ok(f"by the host's name: {taken}{note}")


def _judge_nccl(network: Network, several: bool) -> Verdict:
    taken = nccl_takes(network.interfaces, network.nccl)
    usable = [one for one in taken if one.usable]
    variable = "" if network.nccl is None else f"NCCL_SOCKET_IFNAME={network.nccl}: "
    if variable and not taken:
        return Verdict.fault(
            f"{variable}no such interface",
            "NCCL finds no interface and fails when it starts.",
            f"name one of {network.candidates}",
        )
    if variable and not usable:
        return Verdict.fault(
            f"{variable}{', '.join(one.name for one in taken)} is down or has no address",
            "NCCL cannot meet the other ranks over it.",
            f"bring it up, or name one of {network.candidates}",
        )
    if not usable:
        return Verdict.warning("no interface is up", "NCCL cannot start.", _BRING_UP)
    if several and all(one.loopback for one in usable):
        return Verdict.fault(
            f"only {usable[0].name}",
            "Other nodes cannot be reached over loopback.",
            f"set NCCL_SOCKET_IFNAME to one of {network.candidates}",
        )
    return Verdict.ok(variable + ", ".join(map(str, usable)))


def _judge_mtu(answers: Answers[Network]) -> Finding:
    seats = [seat for seat, _ in answers]
    names: dict[int, str] = {}
    groups: dict[int, list[Seat]] = {}
    for seat, network in answers:
        if (taken := _between_nodes(network)) is not None:
            names.setdefault(taken.mtu, taken.name)
            groups.setdefault(taken.mtu, []).append(seat)
    listed = "; ".join(
        f"{size} on {name}" + (f", {where(groups[size], seats)}" if len(names) > 1 else "")
        for size, name in names.items()
    )
    if not names:
        verdict = Verdict.skipped("no interface but loopback")
    elif len(names) > 1:
        verdict = Verdict.warning(
            listed,
            "Large packets of one node may be too large for another: connections open and then hang.",
            f"set one MTU on all nodes: ip link set dev INTERFACE mtu {min(names)}",
        )
    elif min(names) < SMALL_MTU:
        verdict = Verdict.warning(
            listed,
            f"Less than {SMALL_MTU}, which IPv6 needs; more packets take more processor time.",
            f"ip link set dev {names[min(names)]} mtu 1500, or 9000 where switches allow it",
        )
    else:
        verdict = Verdict.ok(listed)
    return finding("ZD305", verdict)


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
