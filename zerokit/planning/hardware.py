"""Devices, links and clusters: what a plan computes times from. Standard library only.

Peaks are dense (without sparsity), bandwidths those of one direction. A device that is not in the table has no figures:
a guess would look like a fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from zerokit.errors import UsageError

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes a second that a rank reads of the others' memory itself, when it waits for them.

    Attributes:
        gather: into memory that is there.
        fresh: into huge pages that the system has just handed out, as at stage 3.
        reduce: with the addition.
    """

    gather: float
    fresh: float
    reduce: float


@dataclass(frozen=True, slots=True)
class Link:
    """A link between the ranks of a node, or between nodes.

    Attributes:
        latency_s: of one message between neighbours.
        bytes_per_s: in one direction; of a rank inside a node, of a whole node between nodes.
        share: the part of a host's computing speed that a transfer takes while it is in flight.
        relays: whether a collective brings each byte to a node once (NCCL's rings), or once for each rank of it that
            needs the byte (zerokit's messages between hosts).
        reading: of ranks that read each other's memory; None where something else moves the bytes.
    """

    latency_s: float
    bytes_per_s: float
    share: float = 0.0
    relays: bool = True
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """The way of states that visit the device in every step.

    Attributes:
        come: bytes a second of a rank's states to the device, while all ranks' states visit.
        leave: back.
        in_turn: whether states come and leave by turns, as on a disk; else both at once at these rates.
        room_bytes: for the states of all ranks of a node; None where nobody said.
    """

    come: float
    leave: float
    in_turn: bool = False
    room_bytes: int | None = None


@dataclass(frozen=True)
class Device:
    """A device by its data sheet.

    Attributes:
        name: what `--device` calls it.
        flops: dense peaks in FLOP/s by the dtype of products, "bf16", "fp16", "fp32" (without TF32); empty for a CPU.
        memory_bytes: of the device.
        memory_bytes_per_s: peak bandwidth of its memory.
        inner: the link to the others of its node; None where it must be given.
        host: the way to its host's memory; None where it must be given.
        torch_names: parts of the name that torch gives it.
    """

    name: str
    flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    memory_bytes_per_s: float = 0.0
    inner: Link | None = None
    host: Way | None = None
    torch_names: tuple[str, ...] = ()


def _device(
    name: str,
    half: float,
    single: float,
    gib: float,
    memory: float,
    inner: Link,
    host: Way,
    *torch_names: str,
) -> Device:
    flops = {"bf16": half * TERA, "fp16": half * TERA, "fp32": single * TERA}
    return Device(name, flops, int(gib * 2**30), memory * TERA, inner, host, torch_names)


# Bandwidths are what all-gathers and reduce-scatters of large buffers reach (nccl-tests' bus bandwidth) over 600 GB/s
# of NVLink both ways (A100) or 900 (H100). Latencies are a ring step's in NCCL's own model (NVIDIA/nccl,
# src/graph/tuning.cc: hwLat, ring, Simple).
_NVLINK3 = Link(3.4e-6, 230 * GIGA)
_NVLINK4 = Link(3.4e-6, 350 * GIGA)
_PCIE4 = Link(5.7e-6, 20 * GIGA)
_PCIE5 = Link(5.7e-6, 40 * GIGA)

# Copies from and to pinned memory over sixteen lanes, as many bytes each way at the same time. An A100 copies at
# 25 GB/s alone, and at 11 and 24 while both ways are in use (NVIDIA/nvbandwidth#53), so that both are done at 16 GB/s
# each. An H100 copies at 53 alone (NVIDIA/nvbandwidth#24); the same part of that is assumed.
_HOST4, _HOST5 = Way(16 * GIGA, 16 * GIGA), Way(33 * GIGA, 33 * GIGA)
USUAL_DISK = Way(6 * GIGA, 4 * GIGA, in_turn=True)
"""A node's disk where nobody says: one NVMe drive on four lanes of PCIe 4, whose data sheets say 7 and 5 GB/s."""

# NVIDIA's data sheets of A100, H100, H200 and L40S. "h100-96-500w" is the one of torchtitan's benchmarks
# (benchmarks/llama3_h100_202412_torchtitan.md): 96 GB of HBM2e at 2.4 TB/s, limited to 500 W.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device("a100-40", 312, 19.5, 40, 1.555, _NVLINK3, _HOST4, "A100-SXM4-40GB", "A100-PCIE-40GB"),
        _device(
            "a100-80", 312, 19.5, 80, 2.039, _NVLINK3, _HOST4, "A100-SXM4-80GB", "A100 80GB PCIe", "A100"
        ),
        _device("h100-80", 989.4, 66.9, 80, 3.35, _NVLINK4, _HOST5, "H100 80GB HBM3", "H100 SXM"),
        _device("h100-96-500w", 989.4, 66.9, 96, 2.4, _NVLINK4, _HOST5),
        _device("h100-pcie", 756, 51.2, 80, 2.0, _PCIE5, _HOST5, "H100 PCIe"),
        _device("h200", 989.4, 66.9, 141, 4.8, _NVLINK4, _HOST5, "H200"),
        _device("l40s", 362, 91.6, 48, 0.864, _PCIE4, _HOST4, "L40S"),
    )
}

PAGE_BYTES, HUGE_PAGE_BYTES = 4096, 2 << 20
"""Page sizes of Linux on x86. Pieces of a huge page or more are gathered into huge pages (`zerokit.runtime.memory`)."""
NETWORK_LATENCY_S = 14e-6
"""A ring's step between nodes in NCCL's own model (src/graph/tuning.cc: hwLat, network, ring, Simple)."""
NETWORK_EFFICIENCY = 0.85
"""The part of a network's nominal speed that NCCL's collectives of large buffers reach."""


def known_device(torch_name: str) -> Device | None:
    """The device with this name in torch; None for others, and for a MIG slice, which has other figures."""
    if " MIG " in torch_name:
        return None
    found = (device for device in DEVICES.values() if any(part in torch_name for part in device.torch_names))
    return next(found, None)


def device_named(name: str) -> Device:
    """The device with this name in `--device` or torch, or with its GiB behind it, such as l40s-48.

    Raises `UsageError` for an unknown one.
    """
    short, _, gib = name.rpartition("-")
    sized = DEVICES.get(short)
    if sized is not None and gib != str(sized.memory_bytes >> 30):
        sized = None
    device = DEVICES.get(name) or sized or known_device(name)
    if device is not None:
        return device
    raise UsageError(
        f"device {name!r:.60} is unknown: choose one of {', '.join(DEVICES)}, describe it under [device] in a file for "
        "--cluster, or give a record of `zerokit bench` on such a device with --from"
    )


def network(gbit_per_s: float) -> Link:
    """The link between nodes with this nominal bandwidth per node and direction, in 10^9 bits per second.

    Raises `UsageError` for one that is no number above 0.
    """
    if not 0 < gbit_per_s < inf:
        raise UsageError(f"the bandwidth of a node is a number above 0, not {gbit_per_s!r} Gbit/s")
    return Link(NETWORK_LATENCY_S, gbit_per_s * NETWORK_EFFICIENCY / 8 * GIGA)


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a host's rank loses to the others of its machine, which compute at the same time.

    Attributes:
        threads: of each rank.
        flops: FLOP/s in fp32 that a rank reaches alone.
        passes: how many times as long forward and backward take with all ranks at work.
        memory: how many times as long moving bytes takes that no cache holds.
        page_s: what the first write to a page of memory costs that the system has just handed out.
    """

    threads: int
    flops: float
    passes: float
    memory: float
    page_s: float


@dataclass(frozen=True)
class Cluster:
    """A cluster: equal nodes of equal devices, with one rank per device.

    `inner` joins the ranks of a node and `outer` the nodes; None where nothing is known of it. `sharing` was measured
    on hosts with `ranks_per_node` ranks at work. `host` is the way of one rank's states, `disk` that of a whole node's.
    """

    device: Device
    ranks_per_node: int
    inner: Link | None = None
    outer: Link | None = None
    sharing: Sharing | None = None
    host: Way | None = None
    disk: Way | None = None

    def way(self, home: str) -> Way | None:
        """The way of a rank's states from "host" or "disk"; None where it is unknown."""
        if home == "host":
            return self.host or self.device.host
        disk = self.disk or USUAL_DISK
        return replace(disk, come=disk.come / self.ranks_per_node, leave=disk.leave / self.ranks_per_node)

    def way_of(self, home: str) -> Way:
        """As `way`. Raises `UsageError` if it is unknown."""
        found = self.way(home)
        if found is None:
            raise UsageError(
                f"the bandwidth between {self.device.name} and its host is unknown: give [host] with gb_per_s in a "
                "file for --cluster, or the output of `zerokit doctor --json` on such devices"
            )
        return found

    def nodes(self, world: int) -> int:
        """The number of nodes for `world` ranks."""
        return -(-world // self.ranks_per_node)

    def link(self, *, inside: bool) -> Link:
        """The link between ranks of a node, or between nodes. Raises `UsageError` if it is unknown."""
        found = self.inner if inside else self.outer
        if found is not None:
            return found
        if inside:
            raise UsageError(
                f"the bandwidth is unknown between the {self.ranks_per_node} ranks of a node: give [inner] with "
                "gb_per_s in a file for --cluster, or the output of `zerokit doctor --json` on two ranks of one"
            )
        raise UsageError(
            "the bandwidth is unknown between nodes: give [outer] with gbit_per_s in a file for --cluster, or the "
            "output of `zerokit doctor --json` on two nodes"
        )
