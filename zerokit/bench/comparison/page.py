"""What the page about benches says, as text and tables; how it looks is the template's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.comparison.cells import ENGINE_TITLES, Cell, short_names, unsupported, varying
from zerokit.bench.comparison.charts import memory_metric
from zerokit.bench.comparison.conditions import conditions, title_of
from zerokit.bench.comparison.differences import Difference, comparable, difference
from zerokit.bench.comparison.figures import count, percent, scale_of
from zerokit.bench.comparison.runs import Run
from zerokit.bench.comparison.tables import Table, figures_table, results_table, shortened
from zerokit.bench.record import FORMAT
from zerokit.bench.record.metrics import METRICS, UNITS


@dataclass(frozen=True, slots=True)
class Tile:
    """One thing that a reader wants to know first."""

    title: str
    who: str
    what: str
    also: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart as elements, for a wide and for a narrow page; `legend` has roles and names."""

    name: str
    title: str
    note: str
    legend: tuple[tuple[str, str], ...]
    wide: str
    narrow: str


@dataclass(frozen=True, slots=True)
class Page:
    """What the template shows."""

    title: str
    subtitle: str
    tiles: list[Tile]
    results: Table
    notes: list[str]
    pictures: Sequence[Picture]
    differing_heads: list[str]
    differing: list[tuple[str, list[str]]]
    facts: list[tuple[str, str]]
    figures: Table
    method: list[str]
    footer: str


def make_page(
    cells: Sequence[Cell],
    partners: Mapping[int, Cell | None],
    runs: Sequence[Run],
    pictures: Sequence[Picture],
) -> Page:
    """The page about these cells; `partners` are their baselines."""
    differing, equal = conditions(cells)
    heads, differing = _merge(cells, differing)
    return Page(
        title=_title(cells),
        subtitle=_subtitle(cells),
        tiles=_change_tiles(cells, partners) if len(runs) > 1 else _best_tiles(cells),
        results=results_table(cells, partners),
        notes=_notes(cells, partners),
        pictures=pictures,
        differing_heads=heads,
        differing=differing,
        facts=equal,
        figures=figures_table(cells),
        method=_method(cells),
        footer=_footer(cells),
    )


def listed(words: Sequence[str]) -> str:
    """As in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _of(cells: Sequence[Cell], name: str) -> list[object]:
    """The different values of a setting, in order."""
    return list(dict.fromkeys(value for cell in cells if (value := cell.settings[name]) is not None))


def _title(cells: Sequence[Cell]) -> str:
    engines = []
    cells = [cell for cell in cells if cell.status == "ok"] or cells
    for engine in _of(cells, "engine"):
        title = ENGINE_TITLES.get(str(engine), str(engine))
        own = [cell for cell in cells if cell.settings["engine"] == engine]
        stages = sorted({int(cell.settings["stage"]) for cell in own})
        if engine in ENGINES and len(ENGINES[str(engine)].stages) > 1:
            row = stages == list(range(stages[0], stages[-1] + 1)) and len(stages) > 2
            title += f" {stages[0]}–{stages[-1]}" if row else f" {listed([str(stage) for stage in stages])}"
        engines.append(title)
    worlds = sorted({cell.first.settings.world for cell in cells})
    ranks = f"{listed([str(world) for world in worlds])} rank{'' if worlds == [1] else 's'}"
    return f"{listed([str(model) for model in _of(cells, 'model')])} on {ranks}: {', '.join(engines)}"


def _subtitle(cells: Sequence[Cell]) -> str:
    well = [cell.first for cell in cells if cell.first.results is not None]
    words = []
    if len(models := {record.model.parameters for record in well if record.model}) == 1:
        words.append(f"{count(models.pop())} parameters")
    for name in ("precision", "device"):
        if len(values := _of(cells, name)) == 1:
            words.append(str(values[0]))
    if len(batches := _of(cells, "batch_size")) == 1:
        words.append(f"batch {batches[0]} a rank")
    machines = {
        f"{one.processor}, {one.cores} cores"
        if one.accelerator is None
        else f"{one.accelerators} × {one.accelerator}"
        for record in well
        if (one := record.environment) is not None
    }
    if len(machines) == 1:
        words.append(machines.pop())
    if len(torches := {record.environment.torch for record in well if record.environment}) == 1:
        words.append(f"torch {torches.pop()}")
    words.append(" to ".join(dict.fromkeys([min(_days(cells)), max(_days(cells))])))
    return " · ".join(words)


def _days(cells: Sequence[Cell]) -> list[str]:
    return [record.created[:10] for cell in cells for record in cell.records]


def _best(cells: Sequence[Cell], name: str) -> Cell | None:
    found = [cell for cell in cells if cell.value(name) is not None]
    sign = 1.0 if METRICS[name].better == "lower" else -1.0
    return min(found, key=lambda cell: sign * (cell.value(name) or 0.0), default=None)


def _figure(cell: Cell, name: str) -> str:
    """A value with its unit."""
    scale = scale_of(name, METRICS[name].unit, [cell.value(name)])
    return f"{scale.text(cell.value(name))} {scale.unit}".rstrip()


def _best_tiles(cells: Sequence[Cell]) -> list[Tile]:
    """Who is best at what. Nobody is where different models, or units, were measured."""
    units = [
        unit for unit in UNITS if any(cell.value(f"throughput/{unit}_per_s") is not None for cell in cells)
    ]
    if len(units) != 1 or len({cell.settings["model"] for cell in cells}) > 1:
        return []
    speed, (memory, memory_words) = f"throughput/{units[0]}_per_s", memory_metric(cells)
    fastest, smallest = _best(cells, speed), _best(cells, memory)
    if fastest is None:
        return []
    several = sum(cell.value(speed) is not None for cell in cells) > 1
    tiles = [
        Tile(
            "Fastest" if several else "Throughput",
            fastest.label,
            f"{_figure(fastest, speed)}, {_figure(fastest, 'step/p50_ms')} a step",
            _equals(cells, fastest, speed),
        )
    ]
    if smallest is not None:
        tiles.append(
            Tile(
                "Least memory" if several else "Memory",
                smallest.label,
                f"{_figure(smallest, memory)} a rank ({memory_words.removesuffix(' memory')})",
                _trade(smallest, fastest, memory, speed),
            )
        )
    if (
        cheapest := min((cell for cell in cells if cell.measure("comm/cost_ms")), key=_share, default=None)
    ) is not None:
        cost = cheapest.measure("comm/cost_ms")
        what = f"{_figure(cheapest, 'comm/cost_ms')} a step, {_share(cheapest):.0%} of it".replace("%", " %")
        if cost is not None and cost.value <= (cost.error or 0.0):
            what = "costs nothing beyond the noise"
        tiles.append(
            Tile(
                "Cheapest communication" if several else "Communication",
                cheapest.label,
                what,
                _equals(cells, cheapest, "comm/cost_ms"),
            )
        )
    if (busiest := _best(cells, "mfu")) is not None and busiest.first.results is not None:
        use = busiest.first.results.utilisation
        peak = f"of {use.peak_flops_per_s / 1e12:g} TFLOP/s" if use is not None else ""
        tiles.append(
            Tile("Model FLOPs utilisation", busiest.label, f"{_figure(busiest, 'mfu')} {peak}".rstrip())
        )
    return tiles


def _share(cell: Cell) -> float:
    """Of communication in the step."""
    return (cell.value("comm/cost_ms") or 0.0) / (cell.value("step/p50_ms") or 1.0)


def _equals(cells: Sequence[Cell], best: Cell, name: str) -> str:
    """Who cannot be told from the best."""
    measured = best.measure(name)
    labels = [
        cell.label
        for cell in cells
        if cell is not best
        and measured is not None
        and (other := cell.measure(name)) is not None
        and comparable(cell, best, name)
        and Difference.of(METRICS[name], measured, other).verdict == "within noise"
    ]
    return f"within the noise of it: {listed(labels)}" if labels else ""


def _trade(smallest: Cell, fastest: Cell, memory: str, speed: str) -> str:
    if smallest is fastest:
        return ""
    less = 1.0 - (smallest.value(memory) or 0.0) / (fastest.value(memory) or 1.0)
    share = (smallest.value(speed) or 0.0) / (fastest.value(speed) or 1.0)
    if less <= 0.0 or share == 0.0:
        return ""
    return f"{less:.0%} less than {fastest.label}, at {share:.0%} of its throughput".replace("%", " %")


def _change_tiles(cells: Sequence[Cell], partners: Mapping[int, Cell | None]) -> list[Tile]:
    """How many cells changed against the first run, and the largest change."""
    tiles = []
    for title, name in (
        ("Step time", "step/p50_ms"),
        ("Memory", memory_metric(cells)[0]),
        ("Communication", "comm/cost_ms"),
    ):
        changes = [
            (change, cell)
            for cell in cells
            if (change := difference(cell, partners[id(cell)], name)) is not None
        ]
        if not changes:
            continue
        worse = sum(change.worsening > 0 and change.verdict != "within noise" for change, _ in changes)
        better = sum(change.worsening < 0 and change.verdict != "within noise" for change, _ in changes)
        same = len(changes) - worse - better
        words = [
            f"{number} {word}"
            for number, word in ((worse, "worse"), (better, "better"), (same, "within the noise"))
            if number
        ]
        change, cell = max(changes, key=lambda item: abs(item[0].relative))
        noise = "" if change.noise is None else f", noise ±{change.noise:.1%}".replace("%", " %")
        most = f"{'most: ' if len(changes) > 1 else ''}{percent(change)}{noise}"
        tiles.append(
            Tile(
                f"{title} against the baseline",
                ", ".join(words),
                most,
                cell.label if len(changes) > 1 else "",
            )
        )
    return tiles


def _notes(cells: Sequence[Cell], partners: Mapping[int, Cell | None]) -> list[str]:
    notes = []
    if missing := [f"{labels} ({shortened(reason)})" for labels, reason in unsupported(cells)]:
        notes.append(f"Unsupported, so not run: {'; '.join(missing)}.")
    against = list(
        {id(partner): partner.label for partner in partners.values() if partner is not None}.values()
    )
    if against:
        whose = against[0] if len(against) == 1 else "the same cell of the first run"
        notes.append(
            f"Percentages are against {whose}. Green is better and red is worse by more than the noise; ≈ is within "
            "it; grey: one run cannot tell the noise."
        )
    notes.append(
        "± is half of the 95 % interval of the median"
        + (
            ", or of the repetitions' spread where that is wider."
            if any(len(cell.measured_records) > 1 for cell in cells)
            else "."
        )
    )
    broken = [
        f"{cell.label}: {len(cell.records) - len(cell.measured_records)} of {len(cell.records)} repetitions "
        "came to nothing"
        for cell in cells
        if cell.status == "ok" and len(cell.measured_records) < len(cell.records)
    ]
    return notes + [f"{listed(broken)}."] * bool(broken)


def _merge(
    cells: Sequence[Cell], differing: list[tuple[str, list[str]]]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """One column for cells of one run, where none of the rows tells them apart; else a column a cell.

    What a label says already (the settings that vary) is left out.
    """
    told = {title_of(name) for name in varying(cell.first for cell in cells)}
    rows = [(name, values) for name, values in differing if name not in told]
    runs = list(dict.fromkeys(cell.run for cell in cells))
    places = [[place for place, cell in enumerate(cells) if cell.run == run] for run in runs]
    merged = []
    for name, values in rows:
        columns = [{values[place] for place in own} - {"–"} for own in places]
        if any(len(column) > 1 for column in columns):
            return [cell.label for cell in cells], rows
        merged.append((name, [column.pop() if column else "–" for column in columns]))
    names = short_names(runs)
    return [names[run] for run in runs], merged


def _method(cells: Sequence[Cell]) -> list[str]:
    has = {name for name in METRICS if any(cell.value(name) is not None for cell in cells)}
    paragraphs = [
        "A step is forward, backward, clipping, optimizer step and zeroing, timed on every rank after warm-up; its "
        "time is that of its slowest rank. The batch is ready before the clock starts. p50 is the median, p90 what "
        "nine of ten steps stay below, skew the difference between the slowest and the fastest rank. Every cell ran in "
        "processes of its own.",
        "The interval of a median lies between two of the measured values and makes no assumption about their "
        "distribution; of other quantiles it is a bootstrap of the raw steps. A difference is called one only if it "
        "exceeds the root of the sum of both intervals' squares.",
    ]
    if "comm/cost_ms" in has:
        paragraphs.append(
            "Communication is the median step minus that of a compute-only twin: the same number of processes, model "
            "and batches, nothing sent in a step. It holds transfers that nothing hides, waiting for other ranks, and "
            "what transfers take from computing where both share cores."
        )
    if "phase/forward_ms" in has:
        paragraphs.append(
            "Phases are medians over a few extra steps after the measured ones, of the slowest rank, each part waited "
            "for by itself; exposed communication is how long a step waits with nothing else to do."
        )
    if "memory/state_mib" in has:
        paragraphs.append(
            "State is parameters, gradients, optimizer and buckets as zerokit counts them at the end of backward; it "
            "is part of the peak. Moved a step is the payload that all ranks together received."
        )
    if "mfu" in has:
        paragraphs.append(
            "MFU is the model's FLOPs, without recomputation, over the dense peak of the device at this precision; a "
            "device with no published peak has none."
        )
    return paragraphs


def _footer(cells: Sequence[Cell]) -> str:
    records = [record for cell in cells for record in cell.records]
    sweeps = list(dict.fromkeys(record.sweep for record in records if record.sweep))
    versions = list(dict.fromkeys(record.environment.zerokit for record in records if record.environment))
    words = [f"{len(records)} record{'' if len(records) == 1 else 's'} ({FORMAT})"]
    words += [f"sweep {sweep}" for sweep in sweeps]
    if len(records) <= 4 and not sweeps:
        words += [record.id for record in records]
    words += [f"zerokit {version}" for version in versions]
    return " · ".join(words)
