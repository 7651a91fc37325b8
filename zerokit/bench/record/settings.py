"""What a bench is asked to do: one value that the command line makes, ranks obey and the record keeps."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

from zerokit.errors import UsageError

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("cpu", "cuda")
WIRES = ("own", "bf16")
"""In what gradients cross between ranks: as the engine has it, or in bf16."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one bench.

    `precision`, `device`, `bucket_mb`, `data` and `image_size` are None until a rank has looked at its machine and its
    model: the record holds what was chosen. `batch_size` counts samples (sequences, images) a rank and micro-batch; a
    step takes `accumulate` micro-batches. `wire` "bf16" rounds gradients on their way between ranks: zerokit sums them
    in fp32, DDP in bf16, by torch's hook. `steps` are measured, after `warmup` that are not; `warmup` None warms up
    until steps take a steady time. `clip` bounds the gradient norm, None leaves it alone (and unmeasured). `twin` also
    runs the compute-only twin that communication is measured against. `save` is a run directory for checkpoints,
    written every `save_every` steps, `background` beside the steps that follow, and at the end; `resume` goes on
    from its newest. `elastic` does so too, with as many ranks as there are; `steps` is then the step at which the
    run ends, whatever was trained before and warm-up included, and `save_every` None saves ten times on the way.
    `mesh` "MxS" is M groups of S ranks, `stage` that of the inner axis and `outer_stage` that of the outer one, by
    default the same. `repeat` numbers equal cells of a sweep.

    Raises `UsageError` for values that contradict each other; `zerokit.bench.catalogue.check` knows engines and models.
    """

    engine: str = "zerokit"
    model: str = "gpt-5m"
    stage: int = 2
    mesh: str | None = None
    outer_stage: int | None = None
    precision: str | None = None
    device: str | None = None
    batch_size: int = 4
    seq_len: int = 128
    image_size: int | None = None
    steps: int = 30
    warmup: int | None = None
    accumulate: int = 1
    wire: str = "own"
    bucket_mb: float | None = None
    seed: int = 0
    data: str | None = None
    lr: float = 1e-3
    clip: float | None = 1.0
    nodes: int = 1
    nproc_per_node: int = 1
    twin: bool = True
    save: str | None = None
    save_every: int | None = None
    background: bool = False
    resume: bool = False
    elastic: bool = False
    repeat: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("stage", STAGES), ("wire", WIRES)):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: choose one of {choices}")
        for name, allowed in (("precision", PRECISIONS), ("device", DEVICES)):
            if getattr(self, name) not in (None, *allowed):
                raise UsageError(f"{name} {getattr(self, name)!r} is unknown: choose one of {allowed}")
        self._check_mesh()
        for name in ("batch_size", "seq_len", "steps", "accumulate", "nodes", "nproc_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.save is None and (self.resume or self.save_every is not None or self.background):
            raise UsageError("save_every, background and resume need a run directory: give --save as well")
        if self.elastic and self.save is None:
            raise UsageError(
                "an elastic bench goes on from its checkpoints: give --elastic a run directory with --save"
            )
        if self.save is not None and self.engine != "zerokit":
            raise UsageError(f"--save writes zerokit's checkpoints, which engine {self.engine!r} cannot")
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(f"save_every must be at least 1, not {self.save_every}")
        if self.warmup is not None and self.warmup < 0:
            raise UsageError(f"warmup must be at least 0, not {self.warmup}")

    def _check_mesh(self) -> None:
        if self.mesh is None:
            if self.outer_stage is not None:
                raise UsageError(
                    "--outer-stage is the stage of a mesh's outer axis: give --mesh, such as 2x4, as well"
                )
            return
        shape = re.fullmatch(r"(\d+)x(\d+)", self.mesh)
        if shape is None:
            raise UsageError(f"mesh {self.mesh!r}: expected OUTERxINNER, such as 2x4")
        outer, inner = map(int, shape.groups())
        if outer * inner != self.world or 1 in (outer, inner):
            raise UsageError(
                f"mesh {self.mesh} has {outer * inner} ranks, and there are {self.world}: the product of its axes must "
                "be the number of ranks, and neither axis 1"
            )
        if self.outer_stage is not None and not 0 <= self.outer_stage <= self.stage:
            raise UsageError(
                f"outer stage {self.outer_stage} with stage {self.stage}: it lies between 0 and the inner one"
            )
        if self.elastic:
            raise UsageError(
                "an elastic bench changes the number of ranks, which a mesh fixes: leave --mesh out"
            )

    @property
    def shape(self) -> tuple[int, int] | None:
        """The mesh, (outer, inner)."""
        if self.mesh is None:
            return None
        outer, _, inner = self.mesh.partition("x")
        return int(outer), int(inner)

    @property
    def stages(self) -> tuple[int, int]:
        """The stages of the outer and the inner axis."""
        return self.stage if self.outer_stage is None else self.outer_stage, self.stage

    @property
    def world(self) -> int:
        """Ranks."""
        return self.nodes * self.nproc_per_node

    @property
    def samples_per_step(self) -> int:
        """Sequences or images over all ranks and micro-batches."""
        return self.world * self.batch_size * self.accumulate

    @property
    def saves_every(self) -> int | None:
        """After how many steps each a checkpoint is written; None for only one at the end."""
        if self.elastic and self.save_every is None:
            return max(1, self.steps // 10)  # a restart repeats a tenth of the run at most
        return self.save_every

    @property
    def key(self) -> str:
        """Equal for equal settings, in any process and at any time: what an interrupted sweep knows its cells by."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
