"""What the page about benches says beside its pictures; the sentences, and how it looks, are the template's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerokit.bench.comparison.cells import Cell, name_of, short_names, unsupported, varying
from zerokit.bench.comparison.conditions import conditions
from zerokit.bench.comparison.figures import count
from zerokit.bench.comparison.headlines import best_headlines, change_headlines, listed
from zerokit.bench.comparison.tables import figures_table, results_table, shortened
from zerokit.bench.record import FORMAT
from zerokit.bench.record.metrics import METRICS
from zerokit.bench.record.runs import Run
from zerokit.bench.record.words import ENGINE_TITLES, title_of
from zerokit.bench.report.pictures import Partners, having


def page_content(cells: Sequence[Cell], partners: Partners, runs: Sequence[Run]) -> dict[str, Any]:
    """What the template shows of these cells, by name; `partners` are their baselines."""
    differing, equal = conditions(cells)
    heads, differing = _merge(cells, differing)
    return {
        "title": _title(cells),
        "subtitle": _subtitle(cells),
        "headlines": change_headlines(cells, partners) if len(runs) > 1 else best_headlines(cells),
        "results": results_table(cells, partners),
        "unsupported": [(labels, shortened(reason)) for labels, reason in unsupported(cells)],
        "against": [
            one.label for one in {id(one): one for one in partners.values() if one is not None}.values()
        ],
        "differing_heads": heads,
        "differing": differing,
        "facts": equal,
        "figures": figures_table(cells),
        "has": {name for name in METRICS if having(cells, name)},
        "cells": cells,
        "records": [record for cell in cells for record in cell.records],
        "format": FORMAT,
    }


def _of(cells: Sequence[Cell], name: str) -> list[object]:
    """The different values of a setting, in order."""
    return list(dict.fromkeys(value for cell in cells if (value := cell.settings[name]) is not None))


def _title(cells: Sequence[Cell]) -> str:
    engines = []
    cells = [cell for cell in cells if cell.status == "ok"] or cells
    for engine in _of(cells, "engine"):
        title = ENGINE_TITLES.get(str(engine), str(engine))
        own = [cell for cell in cells if cell.settings["engine"] == engine]
        if name_of(own[0].first, ()) != title:  # an engine of several stages
            stages = sorted({int(cell.settings["stage"]) for cell in own})
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
    days = [record.created[:10] for cell in cells for record in cell.records]
    words.append(" to ".join(dict.fromkeys([min(days), max(days)])))
    return " · ".join(words)


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
