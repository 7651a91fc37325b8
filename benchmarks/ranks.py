"""A function on ranks, each a fresh process.

run_ranks(measure, …) ──► `python -m benchmarks.ranks JOB` × world ──► measure(…) ──► its results, by rank
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT
from benchmarks.slow_link import on_hosts
from tests.support.namespaces import Hosts
from zerokit.interrupts import Interrupts
from zerokit.launch.local import launch


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world: int = 2,
    threads: int = 1,
    group: bool = True,
    backend: str = "gloo",
    hosts: Hosts | None = None,
) -> list[Any]:
    """What a function of a script here returned on each rank; arguments and results go through JSON.

    Args:
        function: is found again by its name, in `benchmarks`.
        arguments: of it.
        world: ranks.
        threads: of each.
        group: whether the ranks are in a process group when they call it.
        backend: of that group; with "nccl" each rank has a GPU of its own.
        hosts: where the ranks are, one on each; else on this machine.

    Raises `zerokit.launch.failures.WorkerFailed`, which tells of the rank that failed and why.
    """
    code, module = function.__code__, function.__module__
    job = {
        "module": f"benchmarks.{Path(code.co_filename).stem}" if module == "__main__" else module,
        "function": code.co_name,
        "arguments": arguments,
        "threads": threads,
        "backend": backend if group else None,
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    folder = Path(
        tempfile.mkdtemp(prefix="zerokit-ranks-")
    )  # stays where a rank failed: its error names the logs
    (folder / "job.json").write_text(json.dumps(job))
    if hosts is not None:
        on_hosts(hosts, "benchmarks.ranks", str(folder))
    else:
        with Interrupts() as interrupts:
            launch(
                "benchmarks.ranks",
                [str(folder)],
                nodes=1,
                nproc_per_node=world,
                log_dir=folder,
                interrupts=interrupts,
                environment={"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path},
            )
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
    shutil.rmtree(folder)
    return results


def main(folder: Path) -> None:
    """This rank's part."""
    import torch
    import torch.distributed as dist

    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["threads"])
    if job["backend"] == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if job["backend"] is not None:
        dist.init_process_group(job["backend"])
    result = getattr(importlib.import_module(job["module"]), job["function"])(*job["arguments"])
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()  # a peer may still read this rank's memory


if __name__ == "__main__":
    main(Path(sys.argv[1]))
