"""Details of a single run: the meaning of its figures, and other facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerokit.bench.comparison.cells import Cell
from zerokit.bench.comparison.tables import in_order, usual_metrics, within_noise
from zerokit.bench.comparison.unequal import MEANING, by_rank
from zerokit.bench.record.metrics import METRICS, OPERATIONS, idle_share, measure
from zerokit.bench.record.options import ON_DEVICE
from zerokit.bench.record.record import Record
from zerokit.bench.record.statistics import FEWEST
from zerokit.text import counted, mib, ms, rate

_PLANNED = ("step/planned_ms", "memory/step_peak_mib")
_MORE = ("step/wall_mean_ms", *_PLANNED, *(f"bus/{name}_gb_per_s" for name in OPERATIONS))


def detailed_metrics(cells: Sequence[Cell]) -> list[str]:
    """The details of a single run."""
    skipped = ["skipped_steps"] if cells[0].first.skipped_steps else []
    names = {*usual_metrics(cells), *_MORE, *skipped} - {"step/skew_p50_ms"}
    return in_order(names)


def notes(record: Record) -> dict[str, str]:
    """The meaning of figures, by name; `record` must be of a successful bench."""
    settings, results, model = record.settings, record.results, record.model
    if results is None or model is None:
        return {}
    step = results.step
    each = f"{rate(results.throughput_per_rank)} a rank"
    if results.throughput_per_device is not None and results.devices != len(record.ranks):
        each = f"{rate(results.throughput_per_device)} a device ({counted(results.devices or 0, 'device')})"
    texts = {
        "step/p50_ms": f"of {counted(step.count, 'step')}, slowest rank of each; "
        f"{'95 %' if step.count >= FEWEST else 'all'} between {ms(step.median_low)} and {ms(step.median_high)}",
        "step/p90_ms": f"p10 {ms(step.p10)}, p99 {ms(step.p99)}",
        f"throughput/{model.unit}_per_s": f"{each}; "
        f"{settings.samples_per_step * model.units_per_sample:,} {model.unit} a step",
        "memory/peak_host_mib": "of the largest process, construction included",
        "comm/exposed_ms": "time in which a step only waits for communication",
        "phase/optimizer_share": f"{settings.optimizer}: clipping, its step and zeroing of these steps",
        "skipped_steps": "gradients were inf or nan",
        "loss_last": f"from {_loss(results.loss_first)}; {counted(len(record.loss), 'step')}, "
        f"{settings.warmup} of them warm-up",
    }
    if (use := results.utilisation) is not None:
        texts["mfu"] = f"of {use.peak_flops_per_s / 1e12:,.0f} TFLOP/s, dense {use.precision}"
    if (twin := record.twin) is not None and (cost := measure(METRICS["comm/cost_ms"], [record])) is not None:
        noise = within_noise("comm/cost_ms", cost)
        error = f"±{ms(cost.error)}: " if noise and cost.error is not None else ""
        longer = "not measurably longer" if noise else "longer"
        beside = f"than a compute-only one next to it, {ms(twin.step.p50)} there"
        visits = "" if settings.states == ON_DEVICE else "; visits of states are part of it"
        texts["comm/cost_ms"] = f"{error}a step is {longer} {beside}{visits}"
    if (traffic := record.traffic) is not None:
        route = f", through {traffic.route}" if traffic.route else ""
        texts["traffic/mib_per_step"] = f"predicted {mib(traffic.predicted_bytes)}: {traffic.formula}{route}"
    if any(rank.predicted_memory_bytes for rank in record.ranks):
        most = max((rank.predicted_memory_bytes or {}).get("total", 0) for rank in record.ranks)
        texts["memory/state_mib"] = f"parameters, gradients, optimizer, buckets; predicted {mib(most)}"
    texts |= _idle_notes(record)
    texts["memory/elsewhere_mib"] = f"a rank's masters and states, on {settings.states} between steps"
    texts["memory/visiting_mib"] = "of the device, while states visit it in the update"
    if (planned := record.planned) is not None and planned.total_bytes:
        texts["memory/step_peak_mib"] = f"all tensors of rank 0; planned {mib(planned.total_bytes)}"
        if planned.step_ms is not None:
            texts["step/planned_ms"] = "zerokit plan's prediction"
    for one in record.bandwidth:
        texts[f"bus/{one.operation}_gb_per_s"] = f"{one.by}'s, {mib(one.size_bytes)} in {ms(one.ms)}"
    return texts | _device_notes(record)


def _loss(value: float | None) -> str:
    """A loss with four digits; None, in a record, stands for a diverged one."""
    return "not finite" if value is None else f"{value:.4f}"


def _idle_notes(record: Record) -> dict[str, str]:
    """Which ranks wait least and most."""
    known = [(share, rank) for rank in record.ranks if (share := idle_share(rank)) is not None]
    texts = {}
    for name, choose in (("least", min), ("most", max)):
        if known:
            share, rank = choose(known, key=lambda one: one[0])
            computed = ms(rank.computed_ms or 0.0)
            texts[f"idle/{name}"] = (
                f"rank {rank.rank} waits in collectives; it computes for {computed} of a step"
            )
    return texts


def _device_notes(record: Record) -> dict[str, str]:
    """On CUDA: two clocks beside each other, and memory that torch's peak of the steps leaves out."""
    texts, rank = {}, max(record.ranks, key=lambda rank: rank.window_ms or 0.0)
    if rank.window_ms is not None:
        texts["step/wall_mean_ms"] = (
            f"{ms(rank.window_ms)} for all steps on rank {rank.rank}; its events add up to {ms(sum(rank.step_ms))}"
        )
    most = max(record.ranks, key=lambda rank: rank.peak_allocated_bytes or 0)
    if (memory := most.device_memory) is not None:
        texts["memory/peak_allocated_mib"] = (
            f"torch's peak in these steps, {mib(memory.setup_allocated_bytes)} before; "
            f"of the device {mib(memory.used_bytes)} of {mib(memory.total_bytes)} are used"
        )
    return texts


def record_rows(record: Record) -> Iterator[tuple[str, str, str]]:
    """Other facts, as a name, a value and a note: of unequal ranks, the parts of an elastic bench, its checkpoints."""
    if record.results is None:
        yield "figures", "none", "all steps were trained before the restart, so none could be measured"
    for name, values in by_rank(record).items():
        yield name, values, MEANING[name]
    if record.restarts:
        yield "restarted", f"{record.restarts}×", "all figures except losses belong to the last part"
        for part in record.parts:
            trained = part.last_step >= part.first_step
            steps = f"steps {part.first_step}–{part.last_step}" if trained else "no step"
            begun = {"copies": "from copies; ", "run": "from the run; "}.get(part.where, "")
            yield "", steps, f"{counted(part.world, 'rank')}; {begun}{part.ended.partition(chr(10))[0]}"
    done, run = record.checkpoints, record.settings.save
    if done.resumed_from is not None:
        where = "copies in memory" if done.resumed_where == "copies" else run
        yield "resumed", f"step {done.resumed_from}", f"from {where}, {ms(done.load_ms or 0.0)}"
    if done.saves:
        last = done.saves[-1]
        yield (
            "saved",
            f"step {last.step}",
            f"{counted(len(done.saves), 'checkpoint')} in {run}; the last {mib(last.size_bytes)}, {ms(last.ms)}",
        )
    if (copied := done.copies) is not None:
        most = max(copied.node_bytes, default=0)
        yield (
            "copied",
            f"{copied.count}×",
            f"each after {ms(copied.ms)}, training waited {ms(copied.held_ms)}; {mib(most)} of one on a node",
        )
