"""What fits on one GPU and on eight by where states are, and what it costs: the tables of docs/plan.md.

    python -m benchmarks.what_fits

Memory is that of `zerokit plan`: bf16, stage 3, AdamW, one sequence of 2048 tokens a rank, recomputing blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.measuring import read_options
from zerokit.bench.plans.subjects import subject_named
from zerokit.planning.cells import GIB, PlannedCell, Question
from zerokit.planning.efficiency import of_device
from zerokit.planning.hardware import DEVICES, Cluster
from zerokit.planning.planner import plan_cells
from zerokit.sizes import HOMES

MODELS = ("llama-1b", "llama-8b", "llama-13b", "llama-30b")
SIZES_GIB, WORLDS, TOKENS = (24, 48, 80), (1, 8), 2048
NAMES = {"host": "host, PATH", "fp8": "fp8"}
"""Homes by what a user writes; a disk takes what a host takes."""

Planned = Mapping[tuple[str, int], Mapping[str, PlannedCell]]
"""By model and number of ranks, the cell of each home."""


def plan_all() -> Planned:
    """Plan all models, on a device that is large enough for any, and whose host is behind PCIe 4."""
    large, host = DEVICES["h200"], DEVICES["l40s"].host
    found = {}
    for model in MODELS:
        subject = subject_named(model, seq_len=TOKENS)
        for world in WORLDS:
            question = Question(
                Cluster(large, world, large.inner, host=host),
                world,
                {"bf16": of_device(large, "bf16")},
                ["bf16"],
                stages=[(3, 3)],
                micro_batches=[1],
                recompute=[True],
                states=[HOMES],
            )
            found[model, world] = {one.cell.states: one for one in plan_cells(subject, question).fitting}
    return found


def table_of_fits(planned: Planned) -> str:
    """A row a model: "device" where states may stay there, else with which `states` it fits, or what it needs."""

    def cell(model: str, world: int, gib: int) -> str:
        needed = {home: one.memory.needed / GIB for home, one in planned[model, world].items()}
        if needed["device"] <= gib:
            return "device"
        fitting = [name for home, name in NAMES.items() if needed[home] <= gib]
        return ", ".join(fitting) or f"no: {needed['host']:,.0f} GiB"

    heads = [f"{world} × {gib} GB" if world > 1 else f"{gib} GB" for world in WORLDS for gib in SIZES_GIB]
    rows = [[model, *(cell(model, world, gib) for world in WORLDS for gib in SIZES_GIB)] for model in MODELS]
    return _markdown(["Model", *heads], rows)


def table_of_costs(planned: Planned) -> str:
    """A row a model: masters and states of a rank, and the seconds that a step waits for them."""
    heads = [
        f"{what}, {world} GPU{'s' if world > 1 else ''}"
        for what in ("GiB a rank", "host, s", "disk, s")
        for world in WORLDS
    ]

    def waits(model: str, world: int, home: str) -> str:
        time = planned[model, world][home].time
        assert time is not None
        return f"{time.visits_s:,.1f}" if time.visits_s < 10 else f"{time.visits_s:,.0f}"

    rows = [
        [
            model,
            *(f"{planned[model, world]['host'].memory.away / GIB:,.1f}" for world in WORLDS),
            *(waits(model, world, home) for home in ("host", "disk") for world in WORLDS),
        ]
        for model in MODELS
    ]
    return _markdown(["Model", *heads], rows, numbers=True)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    lines = [heads, ["---", *["---:" if numbers else "---"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print both tables."""
    read_options(__doc__, None)
    planned = plan_all()
    print(table_of_fits(planned), table_of_costs(planned), sep="\n\n")


if __name__ == "__main__":
    main()
