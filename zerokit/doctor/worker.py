"""One rank of `zerokit doctor`: collects its facts, joins the others, and measures with them.

    torchrun … -m zerokit.doctor.worker JOB.json

The job is a `Job`. All files of it lie beside it, so that the folder can be copied to a node and back:

    rank-R.json    what rank R saw by itself, written before it meets the others
    stage-R        the number and name of what rank R was doing last, and its host: it shows where a job hangs
    group.json     what the ranks measured together, written by rank 0 at the end
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from zerokit import files
from zerokit.bench.record.schema import from_plain, to_plain
from zerokit.doctor.devices import Device
from zerokit.doctor.directory import TRIAL_BYTES, seen_by_all
from zerokit.doctor.facts import GroupFacts, look_around, own_seat
from zerokit.offsets import measure_offsets


@dataclass(frozen=True, slots=True)
class Job:
    """The job of the ranks."""

    directory: str  # that they would write to; the same path on every node
    token: str  # a name for the file that rank 0 leaves there
    pairs: bool  # whether to measure all pairs of nodes
    timeout_s: float  # of a single collective; who started the ranks gives up earlier


def main(job_file: Path) -> None:
    """Run the job on this rank."""
    job = from_plain(Job, json.loads(job_file.read_text()))
    seat, folder = own_seat(os.environ), job_file.parent
    numbers = itertools.count(1)

    def at(stage: str) -> None:
        """A rank that waits for others has come further than the one that it waits for, or as far."""
        _write(folder / f"stage-{seat.rank}", f"{next(numbers)}\n{stage}\n{seat.host}")

    at("looking around")
    # Importing torch is the slow part, and may itself hang on a shared file system: the stage is written before.
    import torch
    import torch.distributed as dist

    from zerokit.bench.machine.accelerator import Accelerator, choose_accelerator, device_id, gather
    from zerokit.bench.machine.computing import measure_copies, measure_paces, measure_units
    from zerokit.bench.machine.wire import measure_all_reduce, measure_axes, measure_pairs
    from zerokit.runtime.collectives import make_collectives

    accelerator, device = choose_accelerator(None), None
    if accelerator.is_cuda:
        torch.cuda.set_device(accelerator.device)
        device = Device(
            torch.cuda.get_device_name(accelerator.device), device_id(accelerator) or str(accelerator.device)
        )
    if accelerator.backend == "gloo":
        accelerator = Accelerator(torch.device("cpu"), "gloo")
    # One rank a node times the disk, or they would time each other.
    facts = look_around(seat, Path(job.directory), TRIAL_BYTES if seat.local_rank == 0 else 0, device)
    _write(folder / f"rank-{seat.rank}.json", json.dumps(to_plain(facts)))

    at("meeting the others")
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    by_node: dict[int, list[int]] = {}
    for one in gather(seat):
        by_node.setdefault(one.node, []).append(one.rank)
    nodes = list(by_node.values())
    at("comparing clocks")
    offsets = measure_offsets(group)
    at("reading neighbours' memory")
    collectives = make_collectives(group, torch.device("cpu"), None, units=1)
    alone = len(by_node[seat.node]) == 1
    routes = gather(None if alone else collectives.route.partition(" and ")[0])
    units, paces, copies = None, None, None
    if accelerator.is_cuda:
        at("copying to the device")
        copies = measure_copies(group, accelerator)
    elif group.size() > 1:
        units = measure_units(group, collectives)
        at("computing together")
        paces = measure_paces(group)
    at("looking for rank 0's file")
    seen = seen_by_all(Path(facts.directory.existing), job.token, seat.rank, gather)
    at("all-reducing")
    wire = dist.new_group(backend=accelerator.backend, timeout=timeout) if accelerator.is_cuda else group
    all_reduce = measure_all_reduce(wire, accelerator)
    at("exchanging along axes")
    axes = measure_axes(wire, accelerator, nodes, units)
    at("exchanging in pairs")
    pairs = measure_pairs(wire, accelerator, nodes) if job.pairs else []
    if seat.rank == 0:
        together = GroupFacts(offsets, routes, seen, all_reduce, pairs, axes, paces, copies)
        _write(folder / "group.json", json.dumps(to_plain(together)))
    at("done")
    dist.barrier()
    dist.destroy_process_group()


def _write(path: Path, text: str) -> None:
    """Whole or not at all: others read it while ranks run."""
    files.write_aside(path, text.encode(), durable=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
