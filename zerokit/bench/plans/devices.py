"""The devices and links that a plan is for, and their speeds: from names, files and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zerokit.bench.plans.subjects import speed_of
from zerokit.bench.record.record import Record
from zerokit.errors import UsageError
from zerokit.planning.cluster_files import read_cluster
from zerokit.planning.efficiency import Efficiency, of_device
from zerokit.planning.hardware import TERA, Cluster, Device, device_named, known_device, network
from zerokit.planning.kinds import Kind, stand_in

USUAL_NODE = 8
"""Devices of a node where nobody says how many: those of DGX, HGX and the clouds' machines."""

NODE_GBIT_PER_S: Mapping[str, float] = {"a100-40": 1600, "a100-80": 1600, "h100-80": 3200, "h200": 3200}
"""What joins nodes of 8 devices where nobody says: NVIDIA's DGX have an adapter a device, of 200 Gbit/s (DGX A100 user
guide) or 400 (DGX H100 and H200 user guides). The nodes of other devices have no usual network."""


def cluster_of(
    gpus: int,
    named: str | tuple[Kind, ...] | None,
    nodes: int | None,
    file: str | Path | None,
    network_gbit: float | None,
    record: Record | None,
) -> tuple[Cluster, list[str]]:
    """The devices and links, and in sentences what was assumed of them.

    Devices are `named`, or kinds of them; without a name they are those of the file or the record.

    Raises `UsageError` for what is unknown, contradictory, or does not divide into nodes.
    """
    if nodes is not None and (nodes < 1 or gpus % nodes):
        raise UsageError(f"{gpus} devices cannot be divided equally among {nodes} nodes")
    if isinstance(named, tuple):
        device: Device | None = stand_in(named)
        names = [str(kind) for kind in named]
    else:
        device = None if named is None else Device("cpu") if named == "cpu" else device_named(named)
        if record is not None:
            device = _measured_device(record, device)
        names = []
    notes = []
    if file is not None:
        found = read_cluster(Path(file), device=device)
        per_node = min(gpus, found.ranks_per_node) if nodes is None else gpus // nodes
        if gpus % per_node:
            raise UsageError(
                f"{gpus} devices do not fill nodes of {per_node}, as {file} has them: give --nodes"
            )
        if per_node > found.ranks_per_node:
            raise UsageError(
                f"{gpus} devices on {nodes} nodes are {per_node} a node, and {file} has {found.ranks_per_node}: give "
                "more nodes, or another file"
            )
        if found.sharing is not None and gpus > 1 and per_node != found.ranks_per_node:
            raise UsageError(
                f"{file} was measured with {found.ranks_per_node} ranks a node, and {per_node} are planned: run "
                f"zerokit doctor --json with --nproc-per-node {per_node}"
            )
        found = replace(found, ranks_per_node=per_node)
    elif device is None:
        raise UsageError("no device: give --device, such as h100-80, or a file for --cluster that names one")
    else:
        if nodes is None:
            nodes = _usual_nodes(gpus)
            if nodes > 1 or names:
                notes.append(
                    f"{nodes} node{'s' * (nodes > 1)} of {gpus // nodes} devices. Use --nodes to change this."
                )
        found = Cluster(device, gpus // nodes, device.inner)
    if network_gbit is not None:
        return replace(found, outer=network(network_gbit)), notes
    usual = min(NODE_GBIT_PER_S.get(name, 0.0) for name in names or [found.device.name])
    if found.outer is None and found.nodes(gpus) > 1 and usual:
        speed = usual * found.ranks_per_node / USUAL_NODE
        notes.append(
            f"Nodes are joined by {speed:,.0f} Gbit/s each, {usual / USUAL_NODE:,.0f} a device as in NVIDIA's "
            "DGX. Use --network or --cluster to change this."
        )
        found = replace(found, outer=network(speed))
    return found, notes


def _usual_nodes(gpus: int) -> int:
    """The fewest nodes of at most `USUAL_NODE` devices that all have as many."""
    for nodes in range(-(-gpus // USUAL_NODE), gpus // 2 + 1):
        if gpus % nodes == 0:
            return nodes
    if gpus <= USUAL_NODE:
        return 1
    raise UsageError(f"{gpus} devices cannot be divided among nodes of 2 to {USUAL_NODE}: give --nodes")


def _measured_device(record: Record, given: Device | None) -> Device:
    """The device that the record is of. Raises `UsageError` where another one is planned."""
    name = record.ranks[0].device if record.ranks else "cpu"
    found = Device("cpu") if name.startswith("cpu") else known_device(name)
    if given is None:
        return found or device_named(name)
    # A host is no device, and what the table knows by another name is another device.
    if bool(given.flops) != (not name.startswith("cpu")) or (found is not None and found.name != given.name):
        raise UsageError(
            f"the record was measured on {name}, and {given.name} is planned: give a record of one"
        )
    return given


def kinds_with_speeds(
    kinds: Sequence[Kind], cluster: Cluster, gpus: int, precisions: Sequence[str], record: Record | None
) -> tuple[tuple[Kind, ...], list[str]]:
    """The kinds with their speeds by precision, and why some have none. A record gives the speed of its own device.

    Raises `UsageError` for a record of another device.
    """
    own = None if record is None else _measured_device(record, None).name
    if own is not None and own not in map(str, kinds):
        raise UsageError(
            f"the record was measured on {own}, and {', '.join(map(str, kinds))} are planned: give a record of one"
        )
    found, reasons = [], list[str]()
    for kind in kinds:
        measured = record if own == str(kind) else None
        alone = replace(cluster, device=kind.device)
        efficiencies, why = efficiencies_of(alone, gpus, precisions, measured)
        found.append(replace(kind, efficiencies=efficiencies))
        reasons += [text.replace("The device's speed", f"The speed of {kind}") for text in why]
    for precision in precisions:
        if any(precision not in kind.efficiencies for kind in found):
            peaks = ", ".join(
                f"{kind.device.flops.get(precision, 0) / TERA:,.0f} of {kind}" for kind in kinds
            )
            reasons.append(
                f"Batches in {precision} follow the peaks of data sheets, in TFLOP/s {peaks}. zerokit.Pace "
                "measures what ranks reach."
            )
    return tuple(found), reasons


def efficiencies_of(
    cluster: Cluster, gpus: int, precisions: Sequence[str], record: Record | None
) -> tuple[dict[str, Efficiency], list[str]]:
    """The speed of the device by precision, and why it has none for some."""
    found, reasons = {}, []
    for precision in precisions:
        if record is not None and precision == (record.settings.precision or "fp32"):
            found[precision] = speed_of(record, cluster, gpus)
            reasons.append(f"The device's speed is that of record {record.id[:8]}, {record.settings.model}.")
            continue
        if record is not None:
            reasons.append(
                f"No times in {precision}: record {record.id[:8]} is of {record.settings.precision or 'fp32'}."
            )
            continue
        if not cluster.device.flops:
            reasons.append(
                f"No times in {precision}: a host's speed comes from a record of `zerokit bench` on one rank, "
                "--from RECORD."
            )
            continue
        try:
            found[precision] = of_device(cluster.device, precision)
        except UsageError as error:
            reasons.append(f"No times in {precision}: {error}.")
    return found, reasons
