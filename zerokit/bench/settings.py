"""What a bench is asked to do: one value that the command line makes, ranks obey and the record keeps."""

from __future__ import annotations

from dataclasses import dataclass

from zerokit.bench.data import STANDARD_LIBRARY
from zerokit.bench.models.configs import MODELS
from zerokit.errors import UsageError

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one bench.

    `precision`, `device` and `bucket_mb` are None until a rank has looked at its machine: the record holds
    what was chosen. `batch_size` counts sequences a rank and micro-batch; a step takes `accumulate`
    micro-batches. `steps` are measured, after `warmup` that are not. `clip` bounds the gradient norm, None
    leaves it alone (and unmeasured). `save` is a run directory for checkpoints, written every `save_every` steps and
    at the end; `resume` goes on from its newest.
    """

    model: str = "gpt-5m"
    stage: int = 2
    precision: str | None = None
    device: str | None = None
    batch_size: int = 4
    seq_len: int = 128
    steps: int = 30
    warmup: int = 5
    accumulate: int = 1
    bucket_mb: float | None = None
    seed: int = 0
    data: str = STANDARD_LIBRARY
    lr: float = 1e-3
    clip: float | None = 1.0
    nodes: int = 1
    nproc_per_node: int = 1
    save: str | None = None
    save_every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("model", tuple(MODELS)), ("stage", STAGES)):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: choose one of {choices}")
        for name, allowed in (("precision", PRECISIONS), ("device", DEVICES)):
            if getattr(self, name) not in (None, *allowed):
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: choose one of {allowed}")
        for name in ("batch_size", "seq_len", "steps", "accumulate", "nodes", "nproc_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.save is None and (self.resume or self.save_every is not None):
            raise UsageError("save_every and resume need a run directory: give --save as well")
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(f"save_every must be at least 1, not {self.save_every}")
        if self.warmup < 0:
            raise UsageError(f"warmup must be at least 0, not {self.warmup}")
        positions = MODELS[self.model].positions
        if self.seq_len > positions:
            raise UsageError(f"seq_len {self.seq_len} exceeds the {positions} positions of {self.model}")

    @property
    def world(self) -> int:
        """Ranks."""
        return self.nodes * self.nproc_per_node

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks and micro-batches."""
        return self.world * self.batch_size * self.seq_len * self.accumulate
