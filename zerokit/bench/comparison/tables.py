"""Tables of cells as text, a column a metric, drawn by the command line and the page; colours of cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.comparison.cells import Cell
from zerokit.bench.comparison.differences import Difference, difference, steps_of
from zerokit.bench.comparison.figures import percent, scale_of, within_noise
from zerokit.bench.record.metrics import METRICS, PACED, UNITS, instrumented

WITHIN_NOISE = "within noise"
EXTRA_STEPS = "in extra steps"
INSTRUMENTED = "with a wait after each part, so parts take longer than in measured steps"
_RUNS = ("first", "second", "third", "fourth")
FEW = 4
"""Up to so many cells are compared in detail."""
_DETAILS = (
    "step/p90_ms",
    "step/skew_p50_ms",
    "memory/state_mib",
    "comm/exposed_ms",
    *("phase/forward_ms", "phase/backward_ms", "phase/optimizer_ms", "traffic/mib_per_step", "loss_last"),
)
OF_A_PAGE = ("memory/state_mib", "loss_last")


def usual_metrics(cells: Sequence[Cell], details: Sequence[str] | None = None) -> list[str]:
    """The main metrics; with `details`, which is the default for few cells, more of them."""
    if details is None:
        details = _DETAILS if len(cells) <= FEW else ()
    wanted = {"step/p50_ms", "mfu", memory_metric(cells)[0], "comm/cost_ms", *details}
    if len(cells) > 1:
        wanted.add(PACED)
    wanted |= {f"throughput/{unit}_per_s" for unit in UNITS} | {f"to_target/{unit}" for unit in UNITS}
    if len(steps_of(cells)) > 1:
        wanted.discard("loss_last")
    return in_order(wanted)


def in_order(names: Iterable[str]) -> list[str]:
    """Figures of the measured steps, then figures of the extra profiled steps."""
    wanted = set(names)
    return sorted((name for name in METRICS if name in wanted), key=instrumented)


@dataclass(frozen=True, slots=True)
class Entry:
    """A metric of a cell: the value, "±" and its error, and the difference from the baseline; "" if unknown.

    `verdict`: "better" or "worse" where the difference exceeds the noise, else "".
    """

    value: str
    error: str = ""
    change: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A metric with its unit and one entry per cell."""

    metric: str
    title: str
    unit: str
    entries: tuple[Entry, ...]

    @property
    def instrumented(self) -> bool:
        """Whether it is not of the measured steps."""
        return instrumented(self.metric)

    @property
    def looks(self) -> list[str]:
        """What stands beside its values: "error", "change"."""
        return [look for look in ("error", "change") if any(getattr(entry, look) for entry in self.entries)]


def columns_of(
    cells: Sequence[Cell], partners: Mapping[int, Cell | None], names: Sequence[str]
) -> list[Column]:
    """A column for each of these metrics that any cell has; a column has one unit and equal decimals."""
    columns = []
    for name in names:
        values = [cell.value(name) for cell in cells]
        if any(value is not None for value in values):
            scale = scale_of(name, METRICS[name].unit, values)
            rate, entries = name.startswith("throughput"), []
            for cell in cells:
                measured, partner = cell.measure(name), partners[id(cell)]
                if measured is not None and within_noise(name, measured):
                    entries.append(Entry(WITHIN_NOISE))
                    continue
                error = measured.error if measured else None
                entries.append(
                    Entry(
                        scale.text(measured.value if measured else None),
                        f"±{scale.text(error)}" if error and not rate else "",
                        # That of a throughput is that of the step beside it, the other way round.
                        *_change(
                            None if rate and "step/p50_ms" in names else difference(cell, partner, name)
                        ),
                    )
                )
            columns.append(Column(name, METRICS[name].title, scale.unit, tuple(entries)))
    return columns


def _change(change: Difference | None) -> tuple[str, str]:
    if change is None:
        return "", ""
    text = percent(change)
    if change.verdict == "within noise":
        return f"≈ {text}" if change.relative else text, ""
    if change.verdict == "noise unknown":
        return f"{text} ?", ""
    return text, change.verdict


def roles_of(cells: Sequence[Cell]) -> dict[int, str]:
    """Each cell's colour by `id(cell)`: its engine's, or its run's if all engines are equal."""
    runs = list(dict.fromkeys(cell.run for cell in cells))
    engines = {cell.first.settings.engine for cell in cells}
    if len(engines) == 1 and len(runs) > 1:
        return {id(cell): _RUNS[runs.index(cell.run) % len(_RUNS)] for cell in cells}
    return {
        id(cell): engine if (engine := cell.first.settings.engine) in ENGINES else "compute-only"
        for cell in cells
    }


def memory_metric(cells: Sequence[Cell]) -> tuple[str, str]:
    """The metric that limits the model's size here, and its display name."""
    if any(cell.value("memory/peak_allocated_mib") is not None for cell in cells):
        return "memory/peak_allocated_mib", "peak CUDA memory"
    return "memory/peak_host_mib", "peak host memory"
