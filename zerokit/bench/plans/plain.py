"""A plan as plain data: what `zerokit plan --json` prints, and which cells its table tells of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zerokit.planning.cells import Plan, PlannedCell, best_of_each, exposed_ms

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
        "bench": plan.bench_line,
        "optimizer": plan.optimizer_arguments,
        "assumptions": list(plan.assumptions),
        "fitting": [plain_cell(one) for one in plan.fitting],
        "too_large": [plain_cell(one) for one in plan.too_large],
    }


def hopeless(plan: Plan) -> list[PlannedCell]:
    """The nearest miss of each stage, mesh and precision of which nothing fits."""

    def kind(one: PlannedCell) -> object:
        return one.cell.mesh, one.cell.stages, one.cell.precision

    fits = set(map(kind, plan.fitting))
    return [one for one in best_of_each(plan.too_large) if kind(one) not in fits]


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
        "memory": {
            "held_bytes": asdict(memory.held) | {"total": memory.held.total},
            "peak_bytes": memory.peak,
            "highest_bytes": memory.highest,
            "gathered_bytes": memory.gathered,
            "context_bytes": memory.context,
            "needed_bytes": memory.needed,
            "missing_bytes": one.missing_bytes,
        },
        "step_ms": None if time is None else time.total_s * 1e3,
        "compute_ms": None if time is None else time.compute_s * 1e3,
        "optimizer_ms": None if time is None else time.optimizer_s * 1e3,
        "exposed_ms": None if time is None else exposed_ms(time),
        "limit": None if time is None else time.limit,
        "units_per_s_per_device": one.units_per_s,
        "mfu": one.mfu,
    }
