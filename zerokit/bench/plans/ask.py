"""`zerokit.plan`: predicts which stages and meshes fit, how fast they are, and which to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from zerokit.available import available_bytes
from zerokit.bench.plans.subjects import speed_of, subject_named
from zerokit.bench.record.by_rank import parse_mesh
from zerokit.bench.record.record import Record, RecordError, read_record
from zerokit.bench.record.settings import OPTIONS
from zerokit.errors import UsageError
from zerokit.placement import Mesh, stage_of
from zerokit.planning.cells import Plan, PlannedCell, Question
from zerokit.planning.cluster_files import read_cluster
from zerokit.planning.efficiency import Efficiency, of_device
from zerokit.planning.hardware import Cluster, Device, device_named, known_device, network
from zerokit.planning.planner import plan_cells
from zerokit.planning.subject import Subject
from zerokit.sizes import HOMES

_T = TypeVar("_T")

USUAL_NODE = 8
"""Devices of a node where nobody says how many: those of DGX, HGX and the clouds' machines."""

NODE_GBIT_PER_S: Mapping[str, float] = {"a100-40": 1600, "a100-80": 1600, "h100-80": 3200, "h200": 3200}
"""What joins nodes of 8 devices where nobody says: NVIDIA's DGX have an adapter a device, of 200 Gbit/s (DGX A100 user
guide) or 400 (DGX H100 and H200 user guides). The nodes of other devices have no usual network."""


def plan(
    model: str | Subject,
    *,
    gpus: int,
    device: str | None = None,
    nodes: int | None = None,
    cluster: str | Path | None = None,
    network_gbit: float | None = None,
    record: str | Path | None = None,
    stage: int | Sequence[int] | None = None,
    outer_stage: int | Sequence[int] | None = None,
    module_stages: Mapping[str, int] | None = None,
    mesh: str | Sequence[str] | None = None,
    batch_size: int | Sequence[int] | None = None,
    accumulate: int | Sequence[int] = 1,
    samples_per_step: int | None = None,
    seq_len: int | None = None,
    precision: str | Sequence[str] | None = None,
    recompute: bool | None = None,
    bucket_mb: float | None = None,
    optimizer: str = "adamw",
    states: str | Sequence[str] | None = None,
) -> Plan:
    """Predict memory and time of every way to train `model` on `gpus` ranks, best first. No rank is started.

    The plan chooses what is None.

    Args:
        model: a catalogue name, `package.module:factory`, the path of a Hugging Face `config.json`, or a `Subject`.
        gpus: number of ranks, one per device.
        device: the devices' name, such as "h100-80"; "cpu" for ranks on CPUs.
        nodes: number of nodes.
        cluster: a file with the device and the links (`read_cluster`), or the output of `zerokit doctor --json`.
        network_gbit: bandwidth of a node to other nodes, in Gbit/s.
        record: a record of `zerokit bench` on one such device, from which its speed is taken.
        stage: stages to choose from; on a mesh those of the inner axis.
        outer_stage: stages of a mesh's outer axis to choose from.
        module_stages: stages that modules have in every cell, by path: {"backbone": 3}.
        mesh: meshes to choose from, such as "2x8"; "1xN" is one axis.
        batch_size: samples in a rank's micro-batch, to choose from.
        accumulate: micro-batches in a step, to choose from.
        samples_per_step: samples in a step over all ranks; `accumulate` follows from it.
        seq_len: tokens in a sequence.
        precision: "fp32", "bf16", "fp16".
        recompute: whether blocks are recomputed in backward.
        bucket_mb: as `ZeroOptimizer`'s.
        optimizer: "adamw", or "muon": Muon for the matrices of the blocks, AdamW for the rest.
        states: where masters and states may be between steps: "device", "host", "disk", "fp8", or "any" of these. By
            default they are on the device, if nothing fits then on the host, and if that does not fit either, on disk
            or in fp8, whichever is faster.

    Raises `UsageError` for what is unknown, contradictory, or cannot be traced.
    """
    counts: dict[str, Any] = {"gpus": gpus, "nodes": nodes, "seq_len": seq_len, "batch_size": batch_size}
    counts |= {"accumulate": accumulate, "samples_per_step": samples_per_step}
    for name, given in counts.items():
        if wrong := [one for one in _several(given) or () if not isinstance(one, int) or one < 1]:
            raise UsageError(f"{name} {wrong[0]!r}: expected a whole number above 0")
    if optimizer not in OPTIONS["optimizer"].choices:
        raise UsageError(
            f"optimizer {optimizer!r}: expected one of {', '.join(OPTIONS['optimizer'].choices)}"
        )
    if bucket_mb is not None and not 0 < bucket_mb < inf:
        raise UsageError(f"bucket_mb {bucket_mb}: expected a number above 0")
    if samples_per_step is not None and accumulate != 1 and accumulate is not None:
        raise UsageError("accumulate and samples_per_step exclude each other: give one of them")
    try:
        measured = None if record is None else read_record(Path(record))
    except RecordError as error:
        raise UsageError(str(error)) from error
    if measured is not None and ":" in measured.settings.model and measured.settings.model != model:
        raise UsageError(  # of whoever has written the record
            f"{record} is of {measured.settings.model}, a program that a plan from it would run: give a record of a "
            "model of the catalogue, or plan that one"
        )
    where, notes = _cluster(gpus, device, nodes, cluster, network_gbit, measured)
    on_cuda = bool(where.device.flops)
    subject = model if isinstance(model, Subject) else subject_named(model, seq_len=seq_len)
    usual: tuple[str, ...] = ("bf16",) if on_cuda else ("fp32",)
    precisions: tuple[str, ...] = _several(precision) or usual
    efficiencies, reasons = _efficiencies(where, gpus, precisions, measured)
    room = where.device.memory_bytes
    if not room and not on_cuda:
        room = available_bytes() // where.ranks_per_node
    question = Question(
        where,
        gpus,
        efficiencies,
        precisions,
        meshes=_meshes(_several(mesh), gpus),
        stages=_stages(_several(stage), _several(outer_stage)),
        micro_batches=_several(batch_size),
        accumulate=_several(accumulate) or (1,),
        recompute=(False, True) if recompute is None else (recompute,),
        samples_per_step=samples_per_step,
        room_bytes=room,
        on_cuda=on_cuda,
        bucket_mb=bucket_mb,
        module_stages={path: stage_of(own) for path, own in (module_stages or {}).items()},
        optimizer=optimizer,
        states=_homes(_several(states), on_cuda=on_cuda),
    )
    found = plan_cells(subject, question)
    return replace(found, assumptions=(*notes, *reasons, *found.assumptions))


def _several(value: _T | Sequence[_T] | None) -> tuple[_T, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (value,)
    return tuple(dict.fromkeys(value))


def _cluster(
    gpus: int,
    name: str | None,
    nodes: int | None,
    file: str | Path | None,
    network_gbit: float | None,
    record: Record | None,
) -> tuple[Cluster, list[str]]:
    """The devices and links, and in sentences what was assumed of them."""
    if nodes is not None and (nodes < 1 or gpus % nodes):
        raise UsageError(f"{gpus} devices cannot be divided equally among {nodes} nodes")
    device = None if name is None else Device("cpu") if name == "cpu" else device_named(name)
    if record is not None:
        device = _measured_device(record, device)
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
            if nodes > 1:
                notes.append(f"{nodes} nodes of {gpus // nodes} devices. Use --nodes to change this.")
        found = Cluster(device, gpus // nodes, device.inner)
    if network_gbit is not None:
        return replace(found, outer=network(network_gbit)), notes
    if found.outer is None and found.nodes(gpus) > 1 and (usual := NODE_GBIT_PER_S.get(found.device.name)):
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


def _efficiencies(
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


def _homes(given: Sequence[str] | None, *, on_cuda: bool) -> tuple[tuple[str, ...], ...]:
    """Homes of states to choose from, by turns."""
    if unknown := [one for one in given or () if one not in (*HOMES, "any")]:
        raise UsageError(f"states {unknown[0]!r}: expected one of {', '.join(HOMES)}, any")
    if not on_cuda and given is not None and "host" in given:
        raise UsageError("states on the host are where hosts compute: omit --states host")
    own = HOMES if on_cuda else tuple(home for home in HOMES if home != "host")
    if given is None:
        return ("device",), *((("host",),) if on_cuda else ()), ("disk", "fp8")
    return (own if "any" in given else tuple(given),)


def _meshes(given: Sequence[str] | None, world: int) -> tuple[Mesh, ...] | None:
    if given is None:
        return None
    meshes = []
    for text in given:
        outer, inner = parse_mesh(str(text))
        if inner == 1 and world > 1:
            raise UsageError(f"mesh {text} has one rank on its inner axis: write one axis as 1x{outer}")
        if outer * inner != world:
            raise UsageError(f"mesh {text} has {outer * inner} ranks on its axes, and there are {world}")
        meshes.append(Mesh(outer, inner))
    return tuple(meshes)


def _stages(inner: Sequence[int] | None, outer: Sequence[int] | None) -> tuple[tuple[int, int], ...] | None:
    if inner is None and outer is None:
        return None
    for stage in (*(inner or ()), *(outer or ())):
        if stage not in range(4):
            raise UsageError(f"stage {stage} is unknown: choose one of 0, 1, 2, 3")
    pairs = [(one, two) for two in (inner or range(4)) for one in (outer or range(two + 1)) if one <= two]
    if not pairs:
        raise UsageError(
            "every outer stage exceeds every inner one: choose an outer stage that is at most the inner one"
        )
    return tuple(dict.fromkeys((*pairs, *((two, two) for two in inner or () if outer is None))))


FORMAT = "zerokit.plan/1"


def plain(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-serialisable data."""
    question, best = plan.question, plan.best
    return {
        "format": FORMAT,
        "model": {
            "name": plan.subject.name,
            "parameters": plan.parameters,
            "unit": plan.subject.unit,
            "units_per_sample": plan.subject.units_per_sample,
            "flops_convention": plan.subject.flops_convention,
        },
        "device": question.cluster.device.name,
        "ranks": question.world,
        "nodes": question.nodes,
        "device_memory_bytes": question.room_bytes,
        "why": plan.why if best else None,
        "visits": plan.visits,
        "bench": plan.bench_line,
        "optimizer": plan.optimizer_arguments,
        "assumptions": list(plan.assumptions),
        "fitting": [plain_cell(one) for one in plan.fitting],
        "too_large": [plain_cell(one) for one in plan.too_large],
    }


def plain_cell(one: PlannedCell) -> dict[str, Any]:
    """A cell with its memory and time."""
    cell, memory, time = one.cell, one.memory, one.time
    return {
        "stage": cell.stages[1],
        "outer_stage": cell.stages[0] if cell.mesh.outer > 1 else None,
        "mesh": f"{cell.mesh.outer}x{cell.mesh.inner}" if cell.mesh.outer > 1 else None,
        "batch_size": cell.micro_batch,
        "accumulate": cell.accumulate,
        "recompute": cell.recompute,
        "precision": cell.precision,
        "states": cell.states,
        "memory": {
            "held_bytes": asdict(memory.held) | {"total": memory.held.total},
            "peak_bytes": memory.peak,
            "highest_bytes": memory.highest,
            "gathered_bytes": memory.gathered,
            "context_bytes": memory.context,
            "needed_bytes": memory.needed,
            "away_bytes": memory.away,
            "missing_bytes": one.missing_bytes,
        },
        "step_ms": time and time.total_s * 1e3,
        "compute_ms": time and time.compute_s * 1e3,
        "optimizer_ms": time and time.optimizer_s * 1e3,
        "visits_ms": time and time.visits_s * 1e3,
        "exposed_ms": time and {axis.name.lower(): s * 1e3 for axis, s in time.exposed_s.items()},
        "limit": time and time.limit,
        "units_per_s_per_device": one.units_per_s,
        "mfu": one.mfu,
        "update_balance": one.division and one.division.balance,
        "exchanged_bytes": one.division and one.division.exchanged_bytes,
    }
