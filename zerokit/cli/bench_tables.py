"""The tables of one bench."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zerokit.bench.comparison.figures import count, within_noise
from zerokit.bench.record import Rank, Record
from zerokit.bench.record.metrics import METRICS, measure
from zerokit.bench.record.statistics import quantile
from zerokit.cli.columns import Column, annotate, fitting, make_table
from zerokit.cli.numbers import loss, mib, ms, rate
from zerokit.cli.text import counted
from zerokit.text import printable

# More ranks than this are shown as those with the least and the most memory only.
RANKS_SHOWN = 16
Row = tuple[str, str, str]


def result_tables(record: Record, width: int) -> list[RenderableType]:
    """What was trained, the figures, a row a rank; `record` is of a bench that succeeded.

    Args:
        record: the bench.
        width: of the terminal, in characters.
    """
    rows = [
        ((Text(printable(name), "bold"), Text(printable(value))), Text(printable(note), "dim"))
        for name, value, note in _rows(record)
    ]
    if record.results is None:
        return [headline(record), annotate(rows, width, right=1)]
    note = "state: parameters, gradients, optimizer, buckets; part of the peak"
    has_state = any(rank.memory_bytes for rank in record.ranks)
    return [
        headline(record),
        annotate(rows, width, right=1),
        Text(),
        _rank_table(record.ranks, width),
        *([Text(note, style="dim")] if has_state else []),
    ]


def headline(record: Record) -> Text:
    """What was trained, by whom, where."""
    settings = record.settings
    parameters = f" ({count(record.model.parameters)} parameters)" if record.model else ""
    wire = "" if settings.wire == "own" else f", {settings.wire} wire"
    backend = f", {printable(record.environment.backend)}" if record.environment else ""
    return Text.assemble(
        (settings.model, "bold"),
        f"{parameters}, {settings.engine} stage {settings.stage}, {settings.precision}{wire}, "
        f"{counted(settings.world, 'rank')} on {counted(settings.nodes, 'node')}{backend}",
    )


def _rows(record: Record) -> Iterator[Row]:
    settings, results, model = record.settings, record.results, record.model
    if results is None or model is None:
        yield "figures", "none", "a restart found all steps trained, and had none to measure"
        yield from _part_rows(record)
        yield from _checkpoint_rows(record)
        return
    step = results.step
    yield (
        "loss",
        f"{loss(results.loss_first)} → {loss(results.loss_last)}",
        f"first and last of {len(record.loss)} steps, {settings.warmup} of them warm-up",
    )
    yield from _part_rows(record)
    yield (
        "step p50",
        ms(step.p50),
        f"of {step.count} steps, slowest rank of each; 95 % between {ms(step.median_low)} and {ms(step.median_high)}",
    )
    yield "step p90", ms(step.p90), f"p10 {ms(step.p10)}, p99 {ms(step.p99)}"
    yield from _device_rows(record)
    each = f"{rate(results.throughput_per_rank)} a rank"
    if results.throughput_per_device is not None and results.devices != len(record.ranks):
        each = f"{rate(results.throughput_per_device)} a device ({counted(results.devices or 0, 'device')})"
    yield (
        f"{model.unit}/s",
        rate(results.throughput),
        f"{each}; {settings.samples_per_step * model.units_per_sample:,} {model.unit} a step",
    )
    if (utilisation := results.utilisation) is not None:
        peak = utilisation.peak_flops_per_s / 1e12
        yield "MFU", f"{utilisation.mfu:.1%}", f"of {peak:,.0f} TFLOP/s, dense {utilisation.precision}"
    if record.twin is not None and (cost := measure(METRICS["comm/cost_ms"], [record])) is not None:
        known = not within_noise("comm/cost_ms", cost)
        error = "" if cost.error is None else f"± {ms(cost.error)}: "
        beside = f"longer than the {ms(record.twin.step.p50)} of compute-only steps beside it"
        yield (
            "communication",
            ms(cost.value) if known else "within noise",
            f"{error}a step is {'' if known else 'not measurably '}{beside}",
        )
    if (phases := record.phases) is not None:
        parts = f"forward {ms(phases.forward_ms)}, backward {ms(phases.backward_ms)}"
        if phases.exposed_communication_ms is not None:
            yield "exposed", ms(phases.exposed_communication_ms), "a step waits for communication alone"
        yield "phases", "", f"{parts}, optimizer {ms(phases.optimizer_ms)}; each waited for"
    if (traffic := record.traffic) is not None:
        route = f", through {traffic.route}" if traffic.route else ""
        yield (
            "moved a step",
            mib(traffic.bytes),
            f"predicted {mib(traffic.predicted_bytes)}: {traffic.formula}{route}",
        )
    for one in record.bandwidth:
        yield (
            one.operation.replace("_", "-"),
            f"{one.bus_gb_per_s:.2f} GB/s",
            f"bus bandwidth of {one.by}'s, {mib(one.size_bytes)} in {ms(one.ms)}",
        )
    if record.skipped_steps:
        yield "skipped steps", str(record.skipped_steps), "gradients overflowed in fp16"
    yield from _checkpoint_rows(record)


def _device_rows(record: Record) -> Iterator[Row]:
    """On CUDA: two clocks beside each other, and memory that torch's peak of the steps leaves out."""
    rank = max(record.ranks, key=lambda rank: rank.window_ms or 0.0)
    if rank.window_ms is not None:
        yield (
            "by wall clock",
            ms(rank.window_ms / len(rank.step_ms)),
            f"a step of {ms(rank.window_ms)} for all on rank {rank.rank}; its events add up to {ms(sum(rank.step_ms))}",
        )
    most = max(record.ranks, key=lambda rank: rank.peak_allocated_bytes or 0)
    if (memory := most.device_memory) is not None:
        yield (
            "CUDA memory",
            mib(most.peak_allocated_bytes or 0),
            f"torch's peak in these steps, {mib(memory.setup_allocated_bytes)} before; "
            f"of the device {mib(memory.used_bytes)} of {mib(memory.total_bytes)} are used",
        )


def _part_rows(record: Record) -> Iterator[Row]:
    """Of an elastic bench that was restarted: what each part trained and why it ended."""
    if not record.restarts:
        return
    yield "restarted", f"{record.restarts}×", "all figures but the losses are of the last part"
    for part in record.parts:
        steps = (
            f"steps {part.first_step}–{part.last_step}" if part.last_step >= part.first_step else "no step"
        )
        yield "", steps, f"{counted(part.world, 'rank')}; {part.ended.partition(chr(10))[0]}"


def _checkpoint_rows(record: Record) -> Iterator[Row]:
    done, run = record.checkpoints, record.settings.save
    if done.resumed_from is not None:
        yield "resumed", f"step {done.resumed_from}", f"from {run}, {ms(done.load_ms or 0.0)}"
    if done.saves:
        last = done.saves[-1]
        yield (
            "saved",
            f"step {last.step}",
            f"{counted(len(done.saves), 'checkpoint')} in {run}; the last {mib(last.size_bytes)}, {ms(last.ms)}",
        )


def _rank_table(ranks: list[Rank], width: int) -> Table:
    """A row a rank: its steps, its peak memory, its state as counted and as predicted."""
    shown = ranks if len(ranks) <= RANKS_SHOWN else _extremes(ranks)

    def state(memory: dict[str, int] | None) -> str:
        return "" if memory is None else mib(memory["total"])

    columns = [
        Column("rank", [str(rank.rank) for rank in shown]),
        Column("node", [str(rank.node) for rank in shown], 1),
        Column("step p50", [ms(quantile(rank.step_ms, 0.5)) for rank in shown]),
        Column("peak host", [mib(rank.peak_host_bytes) for rank in shown]),
        Column("peak CUDA", [mib(rank.peak_allocated_bytes or 0) for rank in shown]),
        Column("state", [state(rank.memory_bytes) for rank in shown], 2),
        Column("predicted", [state(rank.predicted_memory_bytes) for rank in shown], 3),
    ]
    if ranks[0].peak_allocated_bytes is None:
        del columns[4]
    told = [column for column in columns if any(column.values)]
    return make_table(fitting(told, width) or told)


def _extremes(ranks: list[Rank]) -> list[Rank]:
    """The ranks with the least and the most memory."""

    def peak(rank: Rank) -> int:
        return rank.peak_allocated_bytes or rank.peak_host_bytes

    return [min(ranks, key=peak), max(ranks, key=peak)]
