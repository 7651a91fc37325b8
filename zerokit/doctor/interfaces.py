"""Network interfaces: those that gloo and NCCL are told to use, their MTU, and what the host's own name leads to."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

import psutil

from zerokit.doctor.findings import Answers, Seat, Verdict, fault, ok, skipped, warning, where
from zerokit.patience import within

LOOKUP_SECONDS = 1.0
"""A name server that does not answer makes `getaddrinfo` wait for many seconds: too long for training."""
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
class Network:
    """Interfaces, the variables that choose among them, and the host's own name."""

    interfaces: list[Interface]  # of this network: those of a container, where there is one
    gloo: str | None = None  # GLOO_SOCKET_IFNAME
    nccl: str | None = None  # NCCL_SOCKET_IFNAME
    # Addresses of the host's own name: gloo's choice where no interface is given.
    own: list[str] = field(default_factory=list)
    own_error: str | None = None  # why there are none

    @property
    def between_nodes(self) -> Interface | None:
        """What carries bytes to other nodes: the interface that gloo is given, else the first that leads there."""
        named = (self.gloo or "").split(",")
        usable = sorted(filter(_leads_out, self.interfaces), key=lambda one: one.name not in named)
        return usable[0] if usable else None

    @property
    def candidates(self) -> str:
        """Interfaces that lead to other nodes, for advice."""
        return ", ".join(one.name for one in self.interfaces if _leads_out(one)) or "none but loopback is up"


def _leads_out(interface: Interface) -> bool:
    return interface.usable and not interface.loopback and not interface.name.startswith("docker")


def look_at_network() -> Network:
    """Collect the interfaces that this process sees, and the addresses of the host's own name."""
    own, own_error, host = list[str](), None, socket.gethostname()
    try:
        entries = within(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), LOOKUP_SECONDS)
        own = list(dict.fromkeys(_address(str(entry[4][0])) for entry in entries))
    except (OSError, UnicodeError) as error:  # the latter where it is no name, with 64 letters without a dot
        own_error = getattr(error, "strerror", None) or str(error)
    gloo, nccl = (os.environ.get(f"{name}_SOCKET_IFNAME") or None for name in ("GLOO", "NCCL"))
    return Network(_interfaces(), gloo, nccl, own, own_error)


def _address(address: str) -> str:
    """The address alone: link-local ones carry their interface, fe80::1%eth0."""
    return address.partition("%")[0]


def _interfaces() -> list[Interface]:
    found = psutil.net_if_addrs()
    return [
        Interface(
            name=name,
            running=state.isup,
            loopback="loopback" in state.flags.split(","),
            addresses=[
                _address(one.address)
                for one in found.get(name, [])
                if one.family in (socket.AF_INET, socket.AF_INET6)
            ],
            mtu=state.mtu,
            speed_mbit=state.speed or None,
        )
        for name, state in psutil.net_if_stats().items()
    ]


def nccl_takes(interfaces: Sequence[Interface], wanted: str) -> list[Interface]:
    """The interfaces that NCCL would consider, by its rules for `NCCL_SOCKET_IFNAME`.

    A list of prefixes; "=" asks for whole names, "^" for all but these.
    """
    without, names = wanted.startswith("^"), wanted.removeprefix("^")
    whole, listed = names.startswith("="), names.removeprefix("=").split(",")
    return [
        one
        for one in interfaces
        if any(one.name == name if whole else one.name.startswith(name) for name in listed) != without
    ]


def judge_gloo(network: Network, several: bool) -> Verdict:
    """ZD301; `several` is whether there are several machines."""
    if not any(one.usable for one in network.interfaces):
        return fault(
            "no interface is up",
            "gloo cannot listen, so that ranks never meet.",
            "bring loopback up: ip link set lo up",
        )
    if network.gloo is None:
        return ok("by the host's own name")
    names = network.gloo.split(",")
    taken = [one for name in names for one in network.interfaces if one.name == name]
    variable = f"GLOO_SOCKET_IFNAME={network.gloo}"
    return _judge_taken(network, variable, taken if len(taken) == len(names) else [], several)


def judge_nccl(network: Network, several: bool) -> Verdict:
    """ZD302."""
    if network.nccl is None:
        return ok("NCCL's own choice")
    taken = nccl_takes(network.interfaces, network.nccl)
    usable = [one for one in taken if one.usable]
    return _judge_taken(network, f"NCCL_SOCKET_IFNAME={network.nccl}", usable or taken, several)


def _judge_taken(network: Network, variable: str, taken: Sequence[Interface], several: bool) -> Verdict:
    """The interfaces that a variable names."""
    if not taken:
        what, meaning = "no such interface", "The ranks' backend finds no interface and fails when it starts."
    elif down := [one.name for one in taken if not one.usable]:
        what, meaning = f"{', '.join(down)} is down or has no address", "Ranks cannot meet over it."
    elif several and all(one.loopback for one in taken):
        what, meaning = "loopback", "Other nodes cannot be reached over loopback."
    else:
        return ok(f"{variable}: {', '.join(map(str, taken))}")
    return fault(
        f"{variable}: {what}", meaning, f"name one that leads to the other nodes: {network.candidates}"
    )


def judge_own_name(network: Network, several: bool) -> Verdict:
    """ZD303."""
    known = {address for one in network.interfaces for address in one.addresses}
    loopback = [address for address in network.own if ip_address(address).is_loopback]
    listed = ", ".join(network.own)
    if network.own_error is not None:
        found = f"it cannot be looked up: {network.own_error}"
    elif not known & set(network.own) and not loopback:
        found = f"{listed}, which no interface has"
    elif several and len(loopback) == len(network.own):
        found = f"loopback ({listed}), which other nodes cannot reach"
    else:
        return ok(listed)
    remedy = "give the name its address on the network between the nodes, in /etc/hosts or the name server"
    if network.gloo is None:
        remedy += f"; or set GLOO_SOCKET_IFNAME to an interface: {network.candidates}"
    verdict = fault if several and network.gloo is None else warning
    return verdict(found, "gloo listens on loopback, and torchrun may not find its own node.", remedy)


def judge_mtu(answers: Answers[Network]) -> Verdict:
    """ZD305."""
    by_mtu: dict[int, list[tuple[Seat, str]]] = {}
    for seat, network in answers:
        if (taken := network.between_nodes) is not None:
            by_mtu.setdefault(taken.mtu, []).append((seat, taken.name))
    if not by_mtu:
        return skipped("no interface but loopback")
    least, seats = min(by_mtu), [seat for seat, _ in answers]
    listed = [f"{mtu} on {users[0][1]}" for mtu, users in by_mtu.items()]
    if len(by_mtu) > 1:
        places = [where([seat for seat, _ in users], seats) for users in by_mtu.values()]
        return warning(
            "; ".join(map(", ".join, zip(listed, places, strict=True))),
            "Large packets of one node may be too large for another: connections open and then hang.",
            f"set one MTU on all nodes: ip link set dev INTERFACE mtu {least}",
        )
    if least < SMALL_MTU:
        return warning(
            listed[0],
            f"Less than {SMALL_MTU}, which IPv6 needs; more packets take more processor time.",
            f"ip link set dev {by_mtu[least][0][1]} mtu 1500, or 9000 where switches allow it",
        )
    return ok(listed[0])
