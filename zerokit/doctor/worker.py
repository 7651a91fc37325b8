"""One rank of `zerokit doctor`: collects its facts, joins the others, and measures with them.

    torchrun … -m zerokit.doctor.worker JOB.json

The job is a `Job`. All files of it lie beside it, so that the folder can be copied to a node and back:

    rank-R.json    what rank R saw by itself, written before it meets the others
    stage-R        what rank R was doing last, and on which host: it shows where a job hangs
    group.json     what the ranks measured together, written by rank 0 at the end
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from zerokit import files
from zerokit.bench.record.schema import from_plain, to_plain
from zerokit.doctor.copies import measure_copies
from zerokit.doctor.devices import Device
from zerokit.doctor.directory import TRIAL_BYTES, sees, show, take_away
from zerokit.doctor.facts import GroupFacts, RankFacts, look_around, own_seat
from zerokit.doctor.findings import Seat
from zerokit.doctor.pace import measure_paces, measure_units
from zerokit.doctor.wire import Pair, measure_all_reduce, measure_axes, measure_pairs
from zerokit.offsets import measure_offsets

T = TypeVar("T")

STAGES = (
    "looking around",
    "meeting the others",
    "comparing clocks",
    "reading neighbours' memory",
    "computing together",
    "copying to the device",
    "looking for rank 0's file",
    "all-reducing",
    "exchanging along axes",
    "exchanging in pairs",
    "done",
)
"""In order. A rank that waits for others has come further than the one that it waits for, or as far."""


@dataclass(frozen=True, slots=True)
class Job:
    """The job of the ranks.

    Attributes:
        directory: that they would write to; the same path on every node.
        token: a name for the file that rank 0 leaves there.
        pairs: whether to measure all pairs of nodes.
        timeout_s: of a single collective; who started the ranks gives up earlier.
    """

    directory: str
    token: str
    pairs: bool
    timeout_s: float


Look = Callable[[Seat, Path, int, Device | None], RankFacts]


def main(job_file: Path, look: Look = look_around, now: Callable[[], float] = time.time) -> None:
    """Run the job on this rank, which looks around by `look`, and whose clock is `now`."""
    job = from_plain(Job, json.loads(job_file.read_text()))
    seat, folder = own_seat(os.environ), job_file.parent

    def at(stage: str) -> None:
        _write(folder / f"stage-{seat.rank}", f"{stage}\n{seat.host}")

    at("looking around")
    # Importing torch is the slow part, and may itself hang on a shared file system: the stage is written before.
    import torch
    import torch.distributed as dist

    from zerokit.bench.machine.accelerator import Accelerator, choose_accelerator, device_id
    from zerokit.runtime.collectives import make_collectives

    accelerator, device = choose_accelerator(None), None
    if accelerator.device.type == "cuda":
        torch.cuda.set_device(accelerator.device)
        device = Device(
            torch.cuda.get_device_name(accelerator.device), device_id(accelerator) or str(accelerator.device)
        )
    if accelerator.backend == "gloo":
        accelerator = Accelerator(torch.device("cpu"), "gloo")
    # One rank a node times the disk, or they would time each other.
    facts = look(seat, Path(job.directory), TRIAL_BYTES if seat.local_rank == 0 else 0, device)
    _write(folder / f"rank-{seat.rank}.json", json.dumps(to_plain(facts)))

    at("meeting the others")
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    everyone = _gather(facts)
    at("comparing clocks")
    offsets = measure_offsets(group, now)
    at("reading neighbours' memory")
    collectives = make_collectives(group, torch.device("cpu"), None, units=1)
    alone = sum(one.seat.node == seat.node for one in everyone) == 1
    routes = _gather(None if alone else collectives.route.partition(" and ")[0])
    units, paces, copies = None, None, None
    if accelerator.device.type == "cpu" and group.size() > 1:
        units = measure_units(group, collectives)
        at("computing together")
        paces = measure_paces(group)
    if accelerator.device.type == "cuda":
        at("copying to the device")
        copies = measure_copies(group, accelerator.device)
    at("looking for rank 0's file")
    seen = _see(facts, job)
    at("all-reducing")
    wire = (
        group
        if accelerator.backend == "gloo"
        else dist.new_group(backend=accelerator.backend, timeout=timeout)
    )
    all_reduce = measure_all_reduce(wire, accelerator)
    at("exchanging along axes")
    axes = measure_axes(wire, accelerator, [one.seat for one in everyone], units)
    pairs: list[Pair] = []
    if job.pairs:
        at("exchanging in pairs")
        leaders: dict[int, int] = {}
        for one in everyone:
            leaders.setdefault(one.seat.node, one.seat.rank)
        pairs = measure_pairs(wire, accelerator, list(leaders.values()))
    if seat.rank == 0:
        together = GroupFacts(offsets, routes, seen, all_reduce, pairs, axes, paces, copies)
        _write(folder / "group.json", json.dumps(to_plain(together)))
    at("done")
    dist.barrier()
    dist.destroy_process_group()


def _gather(mine: T) -> list[T]:
    import torch.distributed as dist

    gathered: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _see(facts: RankFacts, job: Job) -> list[bool] | None:
    """Whether each rank finds the file that rank 0 leaves; None if it could not leave any."""
    import torch.distributed as dist

    rank, folder = dist.get_rank(), Path(facts.directory.existing)
    shown = [rank == 0 and show(folder, job.token)]
    dist.broadcast_object_list(shown, 0)
    seen = _gather(shown[0] and sees(folder, job.token))  # all have looked when it returns
    if rank == 0:
        take_away(folder, job.token)
    return seen if shown[0] else None


def _write(path: Path, text: str) -> None:
    """Whole or not at all: others read it while ranks run."""
    files.write_aside(path, text.encode(), durable=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
