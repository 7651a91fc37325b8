"""What a step costs the host: one of eight ranks, whose device computes faster than the host launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.gpu_check.cells import measure_rows
from benchmarks.gpu_check.engines import ranks, row_of
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.wire import wires
from benchmarks.gpu_check.workloads import SIZES

WORLD = 8
STEPS = 20


def host(place: Place) -> dict[str, Any]:
    """Steps of plain PyTorch, FSDP2 and zerokit's stages: 24 layers of width 256, each a unit of its own."""
    model = "gpt-tiny" if place.small else "gpt-24-narrow-layers"
    config = SIZES[model].config
    block = replace(config, layers=config.layers + 1).parameters - config.parameters
    bucket_mb = block * 4 / 2**20
    rows = [row_of(model, "compute-only", floor=True), row_of(model, "fsdp2", 3, world=WORLD)]
    rows += [
        row_of(model, "zerokit", stage, world=WORLD, bucket_mb=round(bucket_mb + 1e-3, 3))
        for stage in (3, 2, 1, 0)
    ]
    # What is gathered has to be finite: zerokit skips steps whose gradients are not.
    with ranks(place, WORLD) as accelerator, wires(None) as dress:
        return measure_rows(place, "host", rows, accelerator, dress=dress, steps=STEPS)
