"""`zerokit.plan`: predicts which stages and meshes fit, how fast they are, and which to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from zerokit.available import available_bytes
from zerokit.bench.plans.devices import cluster_of, efficiencies_of, kinds_with_speeds
from zerokit.bench.plans.subjects import subject_named
from zerokit.bench.record.by_rank import parse_mesh
from zerokit.bench.record.record import RecordError, read_record
from zerokit.bench.record.settings import OPTIONS
from zerokit.errors import UsageError
from zerokit.placement import Mesh, stage_of
from zerokit.planning.cells import Plan, PlannedCell, Question
from zerokit.planning.kinds import parse_devices, world_of
from zerokit.planning.memory import PlannedMemory
from zerokit.planning.mixed import Mixed
from zerokit.planning.planner import plan_cells
from zerokit.planning.subject import Subject
from zerokit.sizes import HOMES

_T = TypeVar("_T")


def plan(
    model: str | Subject,
    *,
    gpus: int | None = None,
    device: str | None = None,
    devices: str | None = None,
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
    """Predict memory and time of every way to train `model` on these devices, best first. No rank is started.

    The plan chooses what is None.

    Args:
        model: a catalogue name, `package.module:factory`, the path of a Hugging Face `config.json`, or a `Subject`.
        gpus: number of ranks, one per device.
        device: the devices' name, such as "h100-80"; "cpu" for ranks on CPUs.
        devices: kinds of devices by rank in place of `gpus` and `device`, such as "h100-80x4,l40s-48x4"; shares and
            batches are planned for them.
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
    kinds = () if devices is None else parse_devices(devices)
    if kinds and (gpus is not None or device is not None):
        raise UsageError(
            f"--devices {devices} says which devices there are and how many: omit --gpus and --device"
        )
    if len(kinds) == 1:
        gpus, device, kinds = len(kinds[0].ranks), str(kinds[0]), ()
    gpus = world_of(kinds) if kinds else gpus
    if gpus is None:
        raise UsageError(
            "no ranks: give --gpus, or --devices with kinds and numbers, such as h100-80x4,l40s-48x4"
        )
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
    where, notes = cluster_of(gpus, kinds or device, nodes, cluster, network_gbit, measured)
    on_cuda = bool(where.device.flops)
    subject = model if isinstance(model, Subject) else subject_named(model, seq_len=seq_len)
    usual: tuple[str, ...] = ("bf16",) if on_cuda else ("fp32",)
    precisions: tuple[str, ...] = _several(precision) or usual
    if kinds:
        kinds, reasons = kinds_with_speeds(kinds, where, gpus, precisions, measured)
        known = [set(kind.efficiencies) for kind in kinds]
        efficiencies = {
            name: one for name, one in kinds[0].efficiencies.items() if all(name in each for each in known)
        }
    else:
        efficiencies, reasons = efficiencies_of(where, gpus, precisions, measured)
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
        kinds=kinds,
    )
    found = plan_cells(subject, question)
    return replace(found, assumptions=(*notes, *reasons, *found.assumptions))


def _several(value: _T | Sequence[_T] | None) -> tuple[_T, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (value,)
    return tuple(dict.fromkeys(value))


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
        "kinds": [
            {"device": str(kind), "ranks": list(kind.ranks), "memory_bytes": kind.device.memory_bytes}
            for kind in question.kinds
        ],
        "ranks": question.world,
        "nodes": question.nodes,
        "device_memory_bytes": question.room_bytes,
        "why": plan.why if best else None,
        "visits": plan.visits,
        "bench": plan.bench_line,
        "optimizer": plan.optimizer_arguments,
        "batches": plan.batches_call,
        "bought": plan.bought,
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
        "memory": _plain_memory(memory, one.missing_bytes),
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
        "mixed": one.mixed and _plain_mixed(one.mixed),
    }


def _plain_memory(memory: PlannedMemory, missing_bytes: int) -> dict[str, Any]:
    return {
        "held_bytes": asdict(memory.held) | {"total": memory.held.total},
        "peak_bytes": memory.peak,
        "highest_bytes": memory.highest,
        "gathered_bytes": memory.gathered,
        "context_bytes": memory.context,
        "needed_bytes": memory.needed,
        "away_bytes": memory.away,
        "missing_bytes": missing_bytes,
    }


def _plain_mixed(mixed: Mixed) -> dict[str, Any]:
    equal = mixed.equal
    return {
        "shares": mixed.shares,
        "pace": mixed.pace,
        "batches": mixed.batches,
        "kinds": [
            {
                "device": str(part.kind),
                "share": part.share,
                "batch_size": part.samples,
                "memory": _plain_memory(part.memory, part.missing_bytes),
                "step_ms": part.time and part.time.total_s * 1e3,
                "compute_ms": part.time and part.time.compute_s * 1e3,
            }
            for part in mixed.parts
        ],
        "equal": {
            "fits": equal.tight is None,
            "missing_bytes": equal.tight.missing_bytes if equal.tight else 0,
            "device": equal.tight and str(equal.tight.kind),
            "shares_fit": equal.tight_shares is None,
            "times_as_long": equal.longer,
        },
    }
