"""Devices, links and clusters: what a plan computes times from. Standard library only.

Peaks are dense (without sparsity), bandwidths those of one direction. A device that is not in the table has no figures:
a guess would look like a fact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from zerokit.documents import parse_json, parse_toml, read_text
from zerokit.errors import UsageError

_TERA, _GIGA = 1e12, 1e9


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


@dataclass(frozen=True)
class Device:
    """A device by its data sheet.

    Attributes:
        name: what `--device` calls it.
        flops: dense peaks in FLOP/s by the dtype of products, "bf16", "fp16", "fp32" (without TF32); empty for a CPU.
        memory_bytes: of the device.
        memory_bytes_per_s: peak bandwidth of its memory.
        inner: the link to the others of its node; None where it must be given.
        torch_names: parts of the name that torch gives it.
    """

    name: str
    flops: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    memory_bytes_per_s: float = 0.0
    inner: Link | None = None
    torch_names: tuple[str, ...] = ()


def _device(
    name: str, half: float, single: float, gib: float, memory: float, inner: Link, *torch_names: str
) -> Device:
    flops = {"bf16": half * _TERA, "fp16": half * _TERA, "fp32": single * _TERA}
    return Device(name, flops, int(gib * 2**30), memory * _TERA, inner, torch_names)


# Bandwidths are what all-gathers and reduce-scatters of large buffers reach (nccl-tests' bus bandwidth) over 600 GB/s
# of NVLink both ways (A100) or 900 (H100). Latencies are a ring step's in NCCL's own model (NVIDIA/nccl,
# src/graph/tuning.cc: hwLat, ring, Simple).
_NVLINK3 = Link(3.4e-6, 230 * _GIGA)
_NVLINK4 = Link(3.4e-6, 350 * _GIGA)
_PCIE4 = Link(5.7e-6, 20 * _GIGA)
_PCIE5 = Link(5.7e-6, 40 * _GIGA)

# NVIDIA's data sheets of A100, H100, H200 and L40S. "h100-96-500w" is the one of torchtitan's benchmarks
# (benchmarks/llama3_h100_202412_torchtitan.md): 96 GB of HBM2e at 2.4 TB/s, limited to 500 W.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device("a100-40", 312, 19.5, 40, 1.555, _NVLINK3, "A100-SXM4-40GB", "A100-PCIE-40GB"),
        _device("a100-80", 312, 19.5, 80, 2.039, _NVLINK3, "A100-SXM4-80GB", "A100 80GB PCIe", "A100"),
        _device("h100-80", 989.4, 66.9, 80, 3.35, _NVLINK4, "H100 80GB HBM3", "H100 SXM"),
        _device("h100-96-500w", 989.4, 66.9, 96, 2.4, _NVLINK4),
        _device("h100-pcie", 756, 51.2, 80, 2.0, _PCIE5, "H100 PCIe"),
        _device("h200", 989.4, 66.9, 141, 4.8, _NVLINK4, "H200"),
        _device("l40s", 362, 91.6, 48, 0.864, _PCIE4, "L40S"),
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
    """The device with this name in `--device` or torch. Raises `UsageError` for an unknown one."""
    device = DEVICES.get(name) or known_device(name)
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
    return Link(NETWORK_LATENCY_S, gbit_per_s * NETWORK_EFFICIENCY / 8 * _GIGA)


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
    on hosts with `ranks_per_node` ranks at work.
    """

    device: Device
    ranks_per_node: int
    inner: Link | None = None
    outer: Link | None = None
    sharing: Sharing | None = None

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


def read_cluster(path: Path, *, device: Device | None = None) -> Cluster:
    """A cluster from a TOML or JSON file, or from the output of `zerokit doctor --json`.

    Args:
        path: a file with `device` (a name, or a table), `gpus_per_node`, and the tables `inner` (`gb_per_s` of a rank)
            and `outer` (`gbit_per_s` of a node), both with an optional `latency_us`.
        device: takes the place of the file's.

    Raises `UsageError` that names the first thing that is wrong or missing.
    """
    try:
        text = read_text(path)
        value = parse_json(text) if text.lstrip().startswith("{") else parse_toml(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a cluster file: {error}") from error
    try:
        return _from_doctor(value["facts"], device) if "facts" in value else _from_table(value, device)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is not what `zerokit doctor --json` of this version prints: run it anew"
        ) from error


_MOST, _MOST_RANKS = 1e18, 1 << 20
"""Limits of a figure in a file, and of the ranks of a node: whatever is computed from them stays finite."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST


def _measured(table: Mapping[str, Any], key: str, *, zero: bool = True) -> float:
    """A figure of the doctor's; raises `ValueError` for what cannot be one, or 0 where there is no `zero`."""
    value = table[key]
    if not _is_number(value) or not (value or zero):
        raise ValueError(f"{key} is {value!r:.60}")
    return float(value)


def _speed(table: Mapping[str, Any], key: str) -> float:
    return _measured(table, key, zero=False) * _GIGA


def _figures(given: Any, name: str, keys: Mapping[str, bool]) -> dict[str, float]:
    """The numbers of the table `name`; `keys` are those it may have, and whether it must."""
    table = given if isinstance(given, dict) else {}
    if unknown := [key for key in table if key not in keys]:
        raise UsageError(f"{unknown[0]!r:.60} in [{name}] is unknown: expected {', '.join(keys)}")
    found: dict[str, Any] = {key: table.get(key) for key, needed in keys.items() if needed or key in table}
    for key, value in found.items():
        if not _is_number(value) or value == 0:
            raise UsageError(
                f"[{name}] needs {key}, a number above 0 and below {_MOST:g}, and has {value!r:.60}"
            )
    return found


def _from_table(value: Mapping[str, Any], device: Device | None) -> Cluster:
    known = ("device", "gpus_per_node", "inner", "outer")
    if unknown := [name for name in value if name not in known]:
        raise UsageError(f"{unknown[0]!r:.60} is unknown: expected {', '.join(known)}")
    if device is None:
        given = value.get("device")
        if given is None:
            raise UsageError('no device: write device = "h100-80", or give --device')
        device = device_named(given) if isinstance(given, str) else _described(given)
    count = value.get("gpus_per_node")
    if type(count) is not int or not 1 <= count <= _MOST_RANKS:
        raise UsageError(f"gpus_per_node is {count!r:.60}: expected the devices of a node, such as 8")
    links = {"inner": device.inner, "outer": None}
    for name, key in (("inner", "gb_per_s"), ("outer", "gbit_per_s")):
        if name in value:
            figures = _figures(value[name], name, {key: True, "latency_us": False})
            if name == "outer":
                link = network(figures[key])
            else:
                link = replace(device.inner or Link(0.0, 1.0), bytes_per_s=figures[key] * _GIGA)
            latency_s = figures["latency_us"] * 1e-6 if "latency_us" in figures else link.latency_s
            links[name] = replace(link, latency_s=latency_s)
    return Cluster(device, count, links["inner"], links["outer"])


def _described(given: Any) -> Device:
    """A device by its figures: `name`, `tflops` by dtype, `memory_gb`, `memory_gb_per_s`."""
    peaks = given.get("tflops") if isinstance(given, dict) else None
    if not isinstance(peaks, dict) or not peaks:
        raise UsageError("[device] needs its dense peaks, such as tflops = { bf16 = 989, fp32 = 67 }")
    flops = _figures(peaks, "device.tflops", dict.fromkeys(("bf16", "fp16", "fp32"), False))
    rest = {key: value for key, value in given.items() if key not in ("name", "tflops")}
    sizes = _figures(rest, "device", dict.fromkeys(("memory_gb", "memory_gb_per_s"), True))
    return Device(
        str(given.get("name", "device")),
        {dtype: peak * _TERA for dtype, peak in flops.items()},
        int(sizes["memory_gb"] * _GIGA),
        sizes["memory_gb_per_s"] * _GIGA,
    )


def _from_doctor(facts: Any, device: Device | None) -> Cluster:
    group = (facts.get("group") if isinstance(facts, dict) else None) or {}
    axes = {axis["axis"]: axis for axis in group.get("axes", ())}
    if not axes:
        raise UsageError(
            "the doctor measured no link: run `zerokit doctor --json` with two ranks or more, such as "
            "--nproc-per-node 2"
        )
    ranks = axes["inner"]["ranks"] if "inner" in axes else 1
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"ranks is {ranks!r:.60}")
    if device is not None and device.flops:
        if group.get("paces") is not None:
            raise UsageError(
                f"the doctor's ranks computed on hosts, and {device.name} is planned: run it on those devices, or "
                "describe their links in a TOML file"
            )
        links = {
            name: Link(
                _measured(axis, "latency_s"), _speed(axis, "gb_per_s") * (ranks if name == "outer" else 1)
            )
            for name, axis in axes.items()  # all exchanged at once
        }
        return Cluster(device, ranks, links.get("inner"), links.get("outer"))
    paces = group.get("paces")
    if paces is None:
        raise UsageError("the doctor did not see how fast ranks compute together: run it anew on these hosts")
    alone, together = paces["alone"], paces["together"]
    sharing = Sharing(
        int(_measured(paces, "threads")),
        _speed(alone, "gflops"),
        max(1.0, _measured(together, "block_ms") / _measured(alone, "block_ms", zero=False)),
        max(1.0, _speed(alone, "gb_per_s") / _speed(together, "gb_per_s")),
        _measured(together, "page_s"),
    )
    links = {name: _host_link(axis, ranks if name == "outer" else 1) for name, axis in axes.items()}
    return Cluster(device or Device("cpu"), ranks, links.get("inner"), links.get("outer"), sharing)


def _host_link(axis: Mapping[str, Any], at_once: int) -> Link:
    """An axis of hosts, along which so many ranks of a node exchanged at once."""
    speed, units = _speed(axis, "gb_per_s") * at_once, axis.get("units")
    if units is None:
        share = min(0.9, _measured(axis, "slowdown"))
        return Link(_measured(axis, "latency_s"), speed, share=share, relays=False)
    gather, fresh, reduce = (_speed(units, f"{name}_gb_per_s") for name in ("gather", "fresh", "reduce"))
    return Link(_measured(units, "latency_s"), gather, relays=False, reading=Reading(gather, fresh, reduce))
