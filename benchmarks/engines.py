"""The engines that are compared: those of `zerokit bench`, by the names of the comparison.

Each builds the whole model in memory, so that all have the same start; "zerokit-3-meta" alone builds it on meta.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.cells import CellSpec
from zerokit.bench.engines.trainer import make
from zerokit.bench.machine.place import Place
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import load

Step = Callable[[Tensor, Tensor], Tensor]

META = "zerokit-3-meta"
# Engine and stage of each name.
ENGINES: dict[str, tuple[str, int]] = {
    "compute-only": ("compute-only", 0),
    "ddp": ("ddp", 0),
    "zero-redundancy-optimizer": ("zero-redundancy-optimizer", 1),
    "fsdp2": ("fsdp2", 3),
    **{f"zerokit-{stage}": ("zerokit", stage) for stage in range(4)},
    META: ("zerokit", 3),
}


def make_step(spec: CellSpec, place: Place) -> Step:
    """One training step: a function of tokens and targets that returns this rank's loss, detached."""
    engine, stage = ENGINES[spec.engine]
    settings = Settings(
        engine=engine,
        stage=stage,
        model=spec.model,
        precision=spec.precision,
        device=spec.device,
        batch_size=spec.batch_size,
        seq_len=spec.seq_len,
        bucket_mb=spec.bucket_mb if engine == "zerokit" else None,
        seed=spec.seed,
        data="synthetic",
        lr=spec.learning_rate,
        clip=spec.clip,
        nproc_per_node=spec.world,
    )
    loaded = load(settings)
    if spec.engine != META:
        loaded.init_fn = None
    trainer = make(loaded, settings, place)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses, _ = trainer.step([(tokens, targets)])
        return losses[0]

    return step
