"""One cell of a comparison: an engine training a model in fresh processes, and what each rank measured.

    spec ──► spec.json ──► `python -m benchmarks.rank` × world ──► rank-0.json … ──► CellResult

Standard library only: the process that starts the ranks should take no memory bandwidth from them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zerokit.bench.record.statistics import slowest
from zerokit.launch.interrupts import Interrupts

ROOT = Path(__file__).resolve().parent.parent

# Whatever tunes an allocator would tune one engine more than another.
_ALLOCATOR_VARIABLES = (
    "MALLOC_",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


@dataclass(frozen=True, slots=True)
class CellSpec:
    """What to run. `bucket_mb` is zerokit's; None leaves every engine's default. `clip` bounds the gradient norm."""

    engine: str
    model: str
    world: int
    backend: str
    device: str
    precision: str
    batch_size: int
    seq_len: int
    steps: int
    warmup: int
    seed: int = 0
    learning_rate: float = 3e-4
    threads: int = 1
    bucket_mb: float | None = None
    clip: float | None = None


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank measured: times of the timed steps; losses of its own batches, warm-up included."""

    step_ms: list[float]
    losses: list[float]
    peak_rss_bytes: int
    peak_cuda_bytes: int


@dataclass(frozen=True, slots=True)
class CellResult:
    """All ranks of one cell, in rank order."""

    engine: str
    ranks: list[RankResult]

    @property
    def step_ms(self) -> list[float]:
        """Wall time of each timed step, of the slowest rank in it."""
        return slowest([rank.step_ms for rank in self.ranks])

    @property
    def median_step_ms(self) -> float:
        """The median over the timed steps."""
        return statistics.median(self.step_ms)

    @property
    def losses(self) -> list[float]:
        """The loss of each step, averaged over ranks: what the engines must agree on."""
        return [
            statistics.fmean(losses) for losses in zip(*(rank.losses for rank in self.ranks), strict=True)
        ]

    @property
    def peak_rss_bytes(self) -> int:
        """Peak resident memory of the whole process, construction included, of the largest rank."""
        return max(rank.peak_rss_bytes for rank in self.ranks)

    @property
    def peak_cuda_bytes(self) -> int:
        """Peak memory allocated on the GPU, of the largest rank; 0 on a CPU."""
        return max(rank.peak_cuda_bytes for rank in self.ranks)


class CellFailed(RuntimeError):
    """A rank did not finish; the message ends with what it printed last."""


def run_cell(spec: CellSpec, *, timeout_s: float = 600.0) -> CellResult:
    """Train in `spec.world` fresh processes and collect what they measured.

    Raises `CellFailed` when a rank fails or `timeout_s` passes, `Interrupted` after a signal; no process is
    left behind.
    """
    with Interrupts() as interrupts, tempfile.TemporaryDirectory(prefix="zerokit-cell-") as name:
        directory = Path(name)
        (directory / "spec.json").write_text(json.dumps(asdict(spec)))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(spec.world):
                with (directory / f"rank-{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "benchmarks.rank", name, str(rank)],
                            cwd=ROOT,
                            env=_environment(spec, rank),
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            failed = _wait(processes, time.monotonic() + timeout_s, interrupts)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed is not None:
            rank, reason = failed
            tail = (directory / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()[-15:]
            raise CellFailed("\n    ".join([f"{spec.engine}: rank {rank} {reason}", *tail]))
        return CellResult(spec.engine, [_read(directory / f"rank-{rank}.json") for rank in range(spec.world)])


def _environment(spec: CellSpec, rank: int) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_ALLOCATOR_VARIABLES)
    }
    threads = str(spec.threads)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.world), "PYTHONPATH": path}
    return inherited | own | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float, interrupts: Interrupts
) -> tuple[int, str] | None:
    """None when all ranks have ended well, else the first rank seen to fail and how."""
    while True:
        interrupts.check()
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank, f"ended with code {code}"
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None), "had not finished at the time limit"
        time.sleep(0.05)


def _read(path: Path) -> RankResult:
    return RankResult(**json.loads(path.read_text()))
