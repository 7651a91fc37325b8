"""Engines side by side on one GPU: a model that the device is busy with, and one of many small tensors."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu_check.engines import Dress, Live, Row, free, ranks, row_of, undressed
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.place import found as without_faults
from benchmarks.gpu_check.workloads import name_of
from benchmarks.measuring import in_rounds
from zerokit.bench.machine.accelerator import Accelerator

ROUNDS, STEPS = 3, 4
"""Turns of each engine, and steps of a turn."""
_ROOM = 1.1
"""Times the formula of what an engine holds: padding, and buckets."""
_PATIENCE = 1.3
"""Times what a row is expected to take: it is begun only if so much of the part's time is left."""


def measure_rows(
    place: Place,
    part: str,
    rows: Sequence[Row],
    accelerator: Accelerator,
    *,
    dress: Dress = undressed,
    steps: int = STEPS,
) -> dict[str, Any]:
    """The figures of these rows, and the names of those for which no time was left; turns take so many `steps`.

    Engines take turns (A B C, C B A, A B C) as far as all of them fit into the device's memory at once; others follow
    when these are freed. Traces come last, for which some engines are built again: a profiler that has run once may
    slow down what is launched later.

    Raises `CheckFailed` with the figures, where an engine has failed or its steps trained nothing.
    """
    steps = 1 if place.small else steps
    found: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    faults: list[str] = []
    together: list[Live] = []
    longest_s = transient_bytes = 0.0

    def has_time(begun: Sequence[Live]) -> bool:
        """Whether one more row can be built, and measured with those that wait for it."""
        measuring = [live.step_s * ROUNDS * steps for live in begun]
        return place.left_s > _PATIENCE * (longest_s + sum(measuring) + max(measuring, default=0.0))

    def measure() -> None:
        with _noting(faults, ", ".join(_label(live.row) for live in together)):
            found.update(_measure(together, steps))

    def build(row: Row) -> None:
        nonlocal longest_s, transient_bytes
        live: Live | None = None
        with contextlib.suppress(torch.OutOfMemoryError):
            live = Live(row, accelerator, dress)
        if live is None:  # and what was built of it is no more
            clear()
            live = Live(row, accelerator, dress)
        together.append(live)
        longest_s = max(longest_s, live.seconds)
        transient_bytes = max(transient_bytes, live.transient_bytes)

    def clear() -> None:
        measure()
        together.clear()
        free(accelerator)

    for row in rows:
        if not has_time(together):
            left_out[_label(row)] = "the part's time was nearly over"
            continue
        if together and not _fits(row, transient_bytes, accelerator):
            clear()
        with _noting(faults, _label(row)):
            build(row)
    measure()
    for row in [*(live.row for live in together), *rows]:
        label = _label(row)
        if label not in found or "trace" in found[label]:
            continue
        live = next((live for live in together if live.row is row), None)
        if live is None and not has_time(()):
            left_out[f"{label}, trace"] = "the part's time was nearly over"
            continue
        with _noting(faults, f"{label}, trace"):
            if live is None:
                together.clear()
                free(accelerator)
                live = Live(row, accelerator, dress)
            found[label]["trace"] = live.trace(place.out, part)
        del live
    together.clear()
    free(accelerator)
    figures = list(found.values())
    faults += [fault for one in figures for fault in _faults(one)]
    return without_faults({"row": _summary(figures, left_out), "rows": figures, "left_out": left_out}, faults)


def _faults(one: dict[str, Any]) -> Iterator[str]:
    """What makes a row's figures worthless: its steps were not those of a training."""
    if not all(map(math.isfinite, one["losses"])):
        yield f"{one['row']}, {one['model']}: losses {one['losses']}"
    if one["skipped_steps"]:
        yield f"{one['row']}, {one['model']}: {one['skipped_steps']} steps were skipped"


@contextlib.contextmanager
def _noting(faults: list[str], who: str) -> Iterator[None]:
    """What is raised here is a fault of the part, and does not cost it the figures of other rows."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        faults.append(f"{who}: {type(error).__name__}: {error}")


def _label(row: Row) -> str:
    return f"{row.name}, {name_of(row.settings.model)}"


def _fits(row: Row, transient_bytes: float, accelerator: Accelerator) -> bool:
    """Whether the device has room for this engine beside those that are there, and for a step of any of them."""
    if not accelerator.is_cuda:
        return True
    device = accelerator.device
    unused = torch.cuda.mem_get_info(device)[0]
    unused += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return unused > _ROOM * row.state_bytes + transient_bytes


def _measure(together: Sequence[Live], steps: int) -> dict[str, dict[str, Any]]:
    by_name = {_label(live.row): live for live in together}
    in_rounds(list(by_name), ROUNDS, lambda name: by_name[name].turn(steps))
    return {
        name: {"waits": live.warnings_of_waits(), **live.figures(), "beside": len(together) - 1}
        for name, live in by_name.items()
    }


def _summary(found: Sequence[dict[str, Any]], left_out: dict[str, str]) -> str:
    """The milliseconds of each row, by model, for the table of all parts."""
    models = dict.fromkeys(one["model"] for one in found)
    texts = []
    for model in models:
        cells = [f"{one['row']} {one['median_ms']:.1f}" for one in found if one["model"] == model]
        texts.append(f"{model}, ms: {', '.join(cells)}")
    return "; ".join(texts) + (f"; left out: {', '.join(left_out)}" if left_out else "")


def cells_a(place: Place) -> dict[str, Any]:
    """What bf16 costs at least, zerokit's stage 3 and FSDP2, on a GPT of 1.3 billion parameters."""
    model = "gpt-tiny" if place.small else "gpt3-1.3b"
    rows = [
        row_of(model, "compute-only", floor=True),
        row_of(model, "zerokit", 3),
        row_of(model, "fsdp2", 3),
    ]
    with ranks(place) as accelerator:
        return measure_rows(place, "cells-a", rows, accelerator)


def cells_b(place: Place) -> dict[str, Any]:
    """zerokit's other stages, DDP and plain autocast on the same model; many small tensors; states elsewhere."""
    model = "gpt-tiny" if place.small else "gpt3-1.3b"
    many = "gpt-tiny-many-layers" if place.small else "gpt-350m-100-layers"
    rows = [
        row_of(model, "compute-only", floor=True),
        row_of(model, "zerokit", 2),
        row_of(model, "zerokit", 1),
        row_of(model, "zerokit", 0),
        row_of(model, "compute-only"),
        row_of(model, "ddp"),
        row_of(many, "compute-only", floor=True),
        row_of(many, "zerokit", 3),
        row_of(many, "fsdp2", 3),
        row_of(model, "zerokit", 3, states="fp8"),
        row_of(many, "zerokit", 2),
    ]
    if place.device.type == "cuda":  # a host's states are there anyway
        rows.append(row_of(model, "zerokit", 3, states="host"))
    with ranks(place) as accelerator:
        return measure_rows(place, "cells-b", rows, accelerator)
