"""The conditions under which cells were measured: equal and differing settings and machine properties."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from zerokit.bench.comparison.cells import Cell, environment_rows, varying
from zerokit.bench.comparison.differences import PACE
from zerokit.bench.comparison.figures import count
from zerokit.bench.record.metrics import METRICS, values_of
from zerokit.bench.record.words import title_of, unusual, value_in_words

_SHOWN_APART = ("model", "precision", "nodes", "nproc_per_node", "batch_size", "seq_len", "bucket_mb")
DRIFT = 0.1
"""A larger change of the machine's pace is noted above all figures."""


def conditions(cells: Sequence[Cell]) -> tuple[list[tuple[str, list[str]]], list[tuple[str, str]]]:
    """Differing conditions with one value per cell ("–" if it has none), and equal ones, as names and values."""
    rows = [_rows(cell) for cell in cells]
    names = list(dict.fromkeys(name for row in rows for name in row))
    differing, equal = [], []
    for name in names:
        values = [row.get(name, "") for row in rows]
        known = {value for value in values if value}
        if len(known) > 1:
            differing.append((title_of(name), [value or "–" for value in values]))
        elif known:
            equal.append((title_of(name), known.pop()))
    return differing, equal


def common_words(cells: Sequence[Cell]) -> list[str]:
    """What all cells have in common, for the line above their table."""
    names = varying(cell.first for cell in cells)
    first = next((cell.first for cell in cells if cell.status == "ok"), cells[0].first)
    settings, words = first.settings, []
    if "model" not in names:
        size = f" ({count(first.model.parameters)} parameters)" if first.model else ""
        words.append(settings.model + size)
    if len(cells) == 1:
        words.append(f"{settings.engine} stage {settings.stage}")
    if "precision" not in names and settings.precision:
        words.append(settings.precision)
    words += unusual(settings, without=(*names, *_SHOWN_APART))
    if not {"nodes", "nproc_per_node"} & set(names):
        ranks = f"{settings.world} rank{'' if settings.world == 1 else 's'}"
        words.append(f"{ranks} on {value_in_words('nodes', settings.nodes)}")
    if "batch_size" not in names:
        words.append(f"batch {settings.batch_size}")
    if first.environment is not None:
        words.append(first.environment.backend)
    rounds = sorted({len(cell.measured_records) for cell in cells if cell.measured_records})
    if rounds and rounds != [1]:
        words.append(f"means of {' or '.join(map(str, rounds))} rounds")
    return words


def drift_notes(cells: Sequence[Cell]) -> list[str]:
    """Warnings if the machine's speed changed by more than `DRIFT` between runs or during one.

    The pace is that of the compute-only twins, else that of equal cells in several rounds.
    """
    found = []
    paces: dict[tuple[object, ...], list[float]] = {}
    for cell in cells:
        work = tuple(cell.settings[name] for name in PACE)
        for record in cell.measured_records:
            if record.twin is not None and record.twin.pace_ms:
                paces.setdefault(work, []).append(median(record.twin.pace_ms))
            else:
                paces.setdefault((id(cell), *work), []).extend(values_of(METRICS["step/p50_ms"], [record]))
    if (
        change := max((max(one) / min(one) - 1 for one in paces.values() if min(one) > 0), default=0)
    ) > DRIFT:
        found.append(
            f"The machine's speed changed between runs: the same work took up to {change:.0%} longer."
        )
    drifts = [
        record.results.step.drift for cell in cells for record in cell.measured_records if record.results
    ]
    if not found and (most := max(map(abs, drifts), default=0.0)) > DRIFT:
        found.append(f"The machine's speed changed during a run, by up to {most:.0%} of a step.")
    if found and any(len(cell.measured_records) == 1 for cell in cells):
        found.append("Run several rounds (--repeats 3), and do not compare single runs.")
    return [note.replace("%", " %") for note in found]


def _rows(cell: Cell) -> dict[str, str]:
    record = cell.first
    rows = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in cell.settings.items()
        if value is not None
    }
    if (model := record.model) is not None:
        rows["parameters"] = count(model.parameters)
        if model.flops_per_unit is not None:
            rows["model FLOPs"] = f"{count(model.flops_per_unit)} a {model.unit.removesuffix('s')}"
            rows["FLOPs counted as"] = model.flops_convention or ""
    if record.results is not None:
        rows["measured steps"] = ", ".join(
            dict.fromkeys(
                str(one.results.step.count) for one in cell.measured_records if one.results is not None
            )
        )
        if any(one.restarts for one in cell.records):
            rows["restarted"] = ", ".join(f"{one.restarts}×" for one in cell.records)
        if len(cell.measured_records) > 1:
            rows["repetitions"] = str(len(cell.measured_records))
        if (use := record.results.utilisation) is not None:
            rows["peak of MFU"] = f"{use.peak_flops_per_s / 1e12:g} TFLOP/s ({use.device}, {use.precision})"
    machine = environment_rows(record)
    if "memory_bytes" in machine and record.environment is not None:
        machine["memory_bytes"] = f"{record.environment.memory_bytes / 2**30:.1f} GiB"
    if machine.get("accelerators") == "0":
        del machine["accelerators"]
    return rows | machine
