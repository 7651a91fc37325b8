"""The content of a bench's page besides its pictures; the template has the sentences and the styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.comparison.cells import Cell, name_of, short_names, unsupported, varying
from zerokit.bench.comparison.conditions import common_words, conditions, drift_notes
from zerokit.bench.comparison.headlines import best_headlines, change_headlines, listed
from zerokit.bench.comparison.tables import (
    EXTRA_STEPS,
    INSTRUMENTED,
    OF_A_PAGE,
    columns_of,
    in_order,
    roles_of,
    usual_metrics,
)
from zerokit.bench.record import FORMAT
from zerokit.bench.record.metrics import METRICS
from zerokit.bench.record.runs import Run
from zerokit.bench.record.words import title_of
from zerokit.bench.report.pictures import Partners, having


def page_content(cells: Sequence[Cell], partners: Partners, runs: Sequence[Run]) -> dict[str, Any]:
    """The template's variables for these cells; `partners` are their baselines."""
    ran = [cell for cell in cells if cell.status != "unsupported"] or list(cells)
    well = [cell for cell in cells if cell.status == "ok"]
    differing, equal, roles = *conditions(ran), roles_of(cells)
    heads, differing = _merge(ran, differing)
    return {
        "title": _title(cells),
        "subtitle": _subtitle(cells),
        "drift": drift_notes(cells),
        "headlines": change_headlines(cells, partners) if len(runs) > 1 else best_headlines(cells),
        "single": len(cells) > 1 and any(len(cell.measured_records) == 1 for cell in cells),
        "ran": ran,
        "roles": [roles[id(cell)] for cell in ran],
        "results": columns_of(ran, partners, usual_metrics(cells, OF_A_PAGE)),
        "unsupported": unsupported(cells),
        "against": _different(one.label for one in partners.values() if one is not None),
        "differing_heads": heads,
        "differing": differing,
        "facts": equal,
        "well": well,
        "figures": columns_of(well, {id(cell): None for cell in well}, in_order(METRICS)),
        "extra": (EXTRA_STEPS, INSTRUMENTED),
        "has": {name for name in METRICS if having(cells, name)},
        "cells": cells,
        "records": [record for cell in cells for record in cell.records],
        "format": FORMAT,
    }


def _different(values: Iterable[Any]) -> list[str]:
    """Different values in order, without None, as text."""
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _title(cells: Sequence[Cell]) -> str:
    engines = []
    worlds = sorted({cell.first.settings.world for cell in cells})
    cells = [cell for cell in cells if cell.status == "ok"] or cells
    for engine in _different(cell.settings["engine"] for cell in cells):
        title = ENGINES[engine].title if engine in ENGINES else engine
        own = [cell for cell in cells if cell.settings["engine"] == engine]
        if name_of(own[0].first, ()) != title:  # an engine of several stages
            stages = sorted({int(cell.settings["stage"]) for cell in own})
            row = stages == list(range(stages[0], stages[-1] + 1)) and len(stages) > 2
            title += f" {stages[0]}–{stages[-1]}" if row else f" {listed([str(stage) for stage in stages])}"
        engines.append(title)
    models = listed(_different(cell.settings["model"] for cell in cells))
    ranks = f"{listed([str(world) for world in worlds])} rank{'' if worlds == [1] else 's'}"
    return f"{models} on {ranks}: {', '.join(engines)}"


def _subtitle(cells: Sequence[Cell]) -> str:
    machines = [cell.first.environment for cell in cells if cell.first.environment is not None]
    places = (
        f"{one.accelerators} × {one.accelerator}"
        if one.accelerator
        else f"{one.processor}, {one.cores} cores"
        for one in machines
    )
    common = (_different(places), _different(f"torch {one.torch}" for one in machines))
    days = [record.created[:10] for cell in cells for record in cell.records]
    words = [*common_words(cells), *(known[0] for known in common if len(known) == 1)]
    return " · ".join([*words, " to ".join(_different([min(days), max(days)]))])


def _merge(
    cells: Sequence[Cell], differing: list[tuple[str, list[str]]]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """One column for cells of one run, where none of the rows tells them apart; else a column a cell.

    What a label says already (the settings that vary) is left out.
    """
    told = {title_of(name) for name in varying(cell.first for cell in cells)}
    rows = [(name, values) for name, values in differing if name not in told]
    names = short_names(_different(cell.run for cell in cells))
    merged = []
    for name, values in rows:
        columns: dict[str, set[str]] = {run: set() for run in names}
        for cell, value in zip(cells, values, strict=True):
            columns[cell.run] |= {value} - {"–"}
        if any(len(column) > 1 for column in columns.values()):
            return [cell.label for cell in cells], rows
        merged.append((name, ["".join(column) or "–" for column in columns.values()]))
    return list(names.values()), merged
