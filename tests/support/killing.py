"""Trainings with copies on simulated nodes, whose nodes are killed at any moment; what is left is gone on with."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.distributed import server_context

EVERY, LAST = 3, 400


class Job:
    """The processes of a training, a rank each; `nodes` has each rank's."""

    def __init__(self, root: Path, nodes: Sequence[int], name: str, **options: Any) -> None:
        self.root, self.nodes = root, tuple(nodes)
        self.folder = root / name
        self.folder.mkdir(parents=True)
        context = server_context()
        self.processes = [
            context.Process(
                target=_rank, args=(str(root), str(self.folder), rank, self.nodes, options), daemon=True
            )
            for rank in range(len(nodes))
        ]
        for process in self.processes:
            process.start()

    def progress(self, rank: int) -> list[list[int]]:
        """By line, the steps that a rank has made, and the newest copy that it knows of."""
        path = self.folder / f"progress-{rank}"
        if not path.exists():
            return []
        return [[int(word) for word in line.split()] for line in path.read_text().splitlines()]

    def wait_for_progress(self, lines: int = 1) -> None:
        while not all(len(self.progress(rank)) >= lines for rank in range(len(self.nodes))):
            if not all(process.is_alive() for process in self.processes):
                raise AssertionError(self.errors())
            time.sleep(0.005)

    def kill(self, node: int) -> None:
        """All ranks of a node, at once; then the others, as an agent that begins anew does."""
        for others in (False, True):
            for process, its in zip(self.processes, self.nodes, strict=True):
                if (its != node) == others and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
            if not others:
                time.sleep(0.02)
        self.end()

    def end(self) -> str:
        """Wait for all processes; what they have failed with."""
        for process in self.processes:
            process.join()
        return self.errors()

    def errors(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("error-*")))


def _rank(root: str, folder: str, rank: int, nodes: tuple[int, ...], options: dict[str, Any]) -> None:
    try:
        _run(Path(root), Path(folder), rank, nodes, **options)
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def _run(
    root: Path,
    folder: Path,
    rank: int,
    nodes: tuple[int, ...],
    *,
    steps: int = LAST,
    waits: bool = False,
    load: str = "",
    then: int = 0,
    shots: Any = None,
) -> None:
    """Train, and save at the end. `load`: go on from there, for `then` steps.

    `waits`: each step is so slow that a copy ends before the next one. `shots` may change what a rank does.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    import zerokit
    from tests.support.nodes import Training, place

    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), len(nodes))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=len(nodes), timeout=timedelta(seconds=300)
    )
    training = Training()
    own, first = place(root, nodes[rank]), 0
    if load:
        extra, said = training.load([own] if load == "nodes" else Path(load))
        first = extra["n"]
        (folder / f"loaded-{rank}").write_text("\n".join([str(first), *said]))
        zerokit.save(folder / "loaded", training.optimizer, step=first, extra=extra)
        if not then:
            return
        steps = first + then
    copies = zerokit.Copies(training.optimizer, own, every=EVERY, extra=lambda n: {"n": n}, step=first)
    if shots is not None:
        shots(copies, folder, rank)
    with open(folder / f"progress-{rank}", "w", buffering=1) as progress:
        for number in range(first, steps):
            training.step(number)
            if waits:
                copies.wait()
            progress.write(f"{copies.step} {copies.saved or 0}\n")
    copies.wait()
    zerokit.save(folder / "end", training.optimizer, step=copies.step, extra={"n": copies.step})
    dist.barrier()
