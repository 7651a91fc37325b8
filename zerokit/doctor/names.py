"""Host names: this host's, forward and back, and the other nodes'."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from zerokit.doctor.findings import Answers, Finding, Verdict, by_machine, by_rank, machines

T = TypeVar("T")

LOOKUP_SECONDS = 1.0
"""A name server that does not answer makes `getaddrinfo` wait for many seconds: too long for training."""


@dataclass(frozen=True, slots=True)
class OwnName:
    """The host's name, the addresses it resolves to, and the name that the first of them resolves back to."""

    host: str
    addresses: list[str]
    back: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Lookups:
    """The other nodes' names as one node resolves them: addresses by name, or errors."""

    found: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def look_at_own_name() -> OwnName:
    """Resolve the host's name, and its address back."""
    host = socket.gethostname()
    try:
        addresses = addresses_of(host)
    except OSError as error:
        return OwnName(host, [], error=_reason(error))
    try:
        back = within(lambda: socket.gethostbyaddr(addresses[0])[0])
    except OSError:
        back = None
    return OwnName(host, addresses, back)


def look_up(names: list[str]) -> Lookups:
    """Resolve other nodes' names."""
    lookups = Lookups()
    for name in dict.fromkeys(names):
        try:
            lookups.found[name] = addresses_of(name)
        except OSError as error:
            lookups.errors[name] = _reason(error)
    return lookups


def addresses_of(name: str) -> list[str]:
    """Raises OSError."""
    entries = within(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def within(question: Callable[[], T], seconds: float = LOOKUP_SECONDS) -> T:
    """The answer, or its OSError, or a TimeoutError: a lookup cannot be stopped, so its thread is left behind."""
    answers: list[T] = []
    errors: list[OSError] = []

    def ask() -> None:
        try:
            answers.append(question())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def judge_own_names(answers: Answers[OwnName]) -> list[Finding]:
    """ZD303."""
    several = len(machines(answers)) > 1
    return by_machine("ZD303", answers, lambda own: _judge_own(own, several))


def _judge_own(own: OwnName, several: bool) -> Verdict:
    if own.error is not None:
        listed = f"{own.host} cannot be looked up: {own.error}"
        meaning = "gloo falls back to loopback, and torchrun may not find its own node."
        remedy = f"add a line with this node's address and {own.host} to /etc/hosts, or to the name server"
        return Verdict.fault(listed, meaning, remedy) if several else Verdict.warning(listed, meaning, remedy)
    listed = f"{own.host} → {', '.join(own.addresses)}"
    if several and all(ipaddress.ip_address(address).is_loopback for address in own.addresses):
        return Verdict.warning(
            listed,
            "The name resolves to loopback, an address that other nodes cannot use.",
            f"give {own.host} its address on the network between the nodes in /etc/hosts",
        )
    if own.back is None:
        return Verdict.ok(f"{listed}, which has no name")
    return Verdict.ok(f"{listed} → {own.back}")


def judge_lookups(answers: Answers[Lookups], truth: Mapping[str, Sequence[str]]) -> list[Finding]:
    """ZD304, from the names that the first rank of each node resolved, and the nodes' real addresses by name."""
    return by_rank("ZD304", answers, lambda lookups: _judge_lookups(lookups, truth))


def _judge_lookups(lookups: Lookups, truth: Mapping[str, Sequence[str]]) -> Verdict:
    remedy = "add the nodes to /etc/hosts on every node, or to the name server"
    if lookups.errors:
        name, error = next(iter(lookups.errors.items()))
        more = len(lookups.errors) - 1
        return Verdict.warning(
            f"{name} cannot be looked up: {error}" + (f", nor {more} more" if more else ""),
            "torchrun and ssh fail where nodes are given by name; addresses work.",
            remedy,
        )
    for name, addresses in lookups.found.items():
        if not set(addresses) & set(truth.get(name, addresses)):
            return Verdict.warning(
                f"{name} → {', '.join(addresses)}, but it has {', '.join(truth[name])}",
                "Connections by this name reach another machine, or none.",
                remedy,
            )
    return Verdict.ok(", ".join(f"{name} → {addresses[0]}" for name, addresses in lookups.found.items()))
