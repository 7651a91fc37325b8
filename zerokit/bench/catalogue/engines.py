"""The engines by name: what each does, its ZeRO stages, and what it requires. Standard library only."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: one way to train on several ranks.

    `stages` are the ZeRO stages that it amounts to, `default_stage` the one it has when none is asked for. `package`
    has to be importable, and `install` says how to make it so. `fp16` says whether it is benched so, `wires` on which.
    """

    summary: str
    stages: tuple[int, ...]
    default_stage: int
    package: str = "torch"
    install: str = "pip install torch"
    fp16: bool = False
    wires: tuple[str, ...] = ()
    local_steps: bool = False
    """Whether islands can train by themselves (`--every`)."""

    @property
    def missing(self) -> str | None:
        """How to install the engine's package."""
        if importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed here; {self.install}"


_DEEPSPEED = "pip install deepspeed --no-build-isolation (its build looks for torch)"
ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "zerokit": Engine(
            "this package's ZeroOptimizer",
            (0, 1, 2, 3),
            2,
            fp16=True,
            wires=("bf16", "int8", "int4"),
            local_steps=True,
        ),
        "ddp": Engine("torch's DistributedDataParallel", (0,), 0, wires=("bf16", "powersgd")),
        "post-local-sgd": Engine(
            "DDP with torch's PostLocalSGDOptimizer: ranks average their weights once in --every steps",
            (0,),
            0,
            local_steps=True,
        ),
        "zero-redundancy-optimizer": Engine("DDP with torch's ZeroRedundancyOptimizer", (1,), 1),
        "fsdp2": Engine(
            "torch's fully_shard; stage 2 keeps parameters between forward and backward", (2, 3), 3
        ),
        "deepspeed": Engine("DeepSpeed's ZeRO", (0, 1, 2, 3), 2, "deepspeed", _DEEPSPEED, fp16=True),
        "parameter-server": Engine("gradients pushed to rank 0, parameters pulled from it", (0,), 0),
        # The floor, and the twin that a cell's communication is measured against. At stages 1 to 3 each rank steps the
        # optimizer for a 1/N share of the parameters only, as the engines with these stages do.
        "compute-only": Engine("every rank alone, without communication", (0, 1), 0, fp16=True),
    }
)
