"""One rank of eight on one GPU: its part of the work and of the memory, and a wire that takes the others' time.

The other ranks do not exist. What this cannot show: the multiprocessors and the bandwidth of memory that NCCL's kernels
take from the computation, and ranks that wait for each other.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check.cells import measure_rows
from benchmarks.gpu_check.engines import ranks, row_of
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.wire import NVLINK_BYTES_PER_S, cycles_per_second, wires

WORLD = 8


def eighth(place: Place) -> dict[str, Any]:
    """Steps, exposed communication and peaks of zerokit's stages 3 and 2 and of FSDP2, on a GPT of 1.3 billion."""
    model = "gpt-tiny" if place.small else "gpt3-1.3b"
    engines = (("zerokit", 3), ("fsdp2", 3), ("zerokit", 2))
    rows = [row_of(model, engine, stage, world=WORLD) for engine, stage in engines]
    rate = cycles_per_second(place.device)
    with ranks(place, WORLD) as accelerator, wires(rate) as dress:
        found = measure_rows(place, "eighth", rows, accelerator, dress=dress)
    return {**found, "wire_bytes_per_s": NVLINK_BYTES_PER_S, "cycles_per_s": rate}
