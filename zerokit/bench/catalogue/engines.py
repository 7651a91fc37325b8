"""The engines by name: what each does, its ZeRO stages, what it requires, and whether it can do what settings ask.

Standard library only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zerokit.bench.catalogue.sizes import InceptionConfig
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: one way to train on several ranks.

    `title` is its name in tables. `stages` are the ZeRO stages that it amounts to, `default_stage` the one it has when
    none is asked for. `package` has to be importable, and `install` says how to make it so. `fp16` says whether it is
    benched so, `wires` on which.
    """

    title: str
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
_OWN_WIRES = ("bf16", "int8", "int4")
ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "zerokit": Engine("zerokit", (0, 1, 2, 3), 2, fp16=True, wires=_OWN_WIRES, local_steps=True),
        "ddp": Engine("DDP", (0,), 0, wires=("bf16", "powersgd")),
        "post-local-sgd": Engine("PostLocalSGD", (0,), 0, local_steps=True),
        "zero-redundancy-optimizer": Engine("ZeroRedundancy", (1,), 1),
        # Stage 2 keeps parameters between forward and backward.
        "fsdp2": Engine("FSDP2", (2, 3), 3),
        "deepspeed": Engine("DeepSpeed", (0, 1, 2, 3), 2, "deepspeed", _DEEPSPEED, fp16=True),
        "parameter-server": Engine("parameter server", (0,), 0),
        # The floor, and the twin that a cell's communication is measured against. At stages 1 to 3 each rank steps the
        # optimizer for a 1/N share of the parameters only, as the engines with these stages do.
        "compute-only": Engine("compute only", (0, 1), 0, fp16=True),
    }
)


def require_known(settings: Settings) -> Settings:
    """Return the settings; raise `UsageError` for an unknown engine or model, or sizes or data that do not fit."""
    if settings.engine not in ENGINES:
        raise UsageError(f"engine {settings.engine!r} is unknown: choose one of {tuple(ENGINES)}")
    if (objection := _objection(settings)) is not None:
        raise UsageError(objection)
    return settings


def _objection(settings: Settings) -> str | None:
    name, workload = settings.model, describe(settings.model)
    text, images = workload.text, workload.images
    if text is not None and settings.seq_len > text.positions:
        return (
            f"seq_len {settings.seq_len} exceeds the {text.positions} positions of {name}; "
            "use a smaller --seq-len"
        )
    if settings.data not in (None, "synthetic") and text is None and images is None:
        return f"{name} makes its own data: omit --data {settings.data} out"
    if images is None:
        if settings.image_size is None:
            return None
        return f"{name} takes no images: leave image_size {settings.image_size} out"
    size = settings.image_size or images.image_size
    if images.smallest is None:
        if size == images.image_size:
            return None
        return f"{name} takes images of {images.image_size} pixels a side, not {size}"
    if size < images.smallest:
        return f"image_size {size} is too small for {name}: at least {images.smallest}"
    # A BatchNorm over one value a channel has no variance: at the last stage of a ResNet, and in Inception's
    # auxiliary classifier at its usual size.
    if settings.batch_size == 1 and (isinstance(images, InceptionConfig) or size == images.smallest):
        return f"{name} at {size} pixels needs a batch of at least 2: give --batch-size"
    return None


def unsupported(settings: Settings) -> str | None:
    """The reason why the engine cannot run these settings; None if it can. Installation is not checked."""
    name, engine = settings.engine, ENGINES[settings.engine]
    if settings.stage not in engine.stages:
        only = len(engine.stages) == 1
        has = f"stage {engine.stages[0]} only" if only else f"stages {', '.join(map(str, engine.stages))}"
        return f"{name} has no stage {settings.stage}: it has {has}"
    if settings.every is not None and not engine.local_steps:
        local = " and ".join(other for other in ENGINES if ENGINES[other].local_steps)
        return f"{name} synchronises in every step: {local} make local steps (--every)"
    if name == "post-local-sgd" and (settings.every is None or settings.fragments > 1 or settings.delay):
        return "post-local-sgd averages all weights once in --every steps, without --fragments and --delay"
    if settings.mesh is not None and name not in ("zerokit", "fsdp2"):
        return f"{name} has one axis: zerokit and fsdp2 train on a mesh"
    if settings.mesh is not None and name == "fsdp2" and settings.stages[0] != 0:
        return "fsdp2 replicates over the outer axis of a mesh: its outer stage is 0"
    if settings.precision == "fp16" and not engine.fp16:
        return f"{name} is not benched in fp16, which needs its own loss scaling; use bf16"
    if settings.wire != "own" and settings.wire not in engine.wires:
        having = [other for other in ENGINES if settings.wire in ENGINES[other].wires]
        return f"{name} has no {settings.wire} wire: {' and '.join(having)} ha{'ve' if having[1:] else 's'}"
    narrow = settings.wire in ("int8", "int4") and settings.every is None
    if settings.wire_updates and not (narrow and settings.stages[0] in (1, 2)):
        return (
            "--wire-updates sends parameters on zerokit's int8 or int4 wire in every step, at stages 1 and 2"
        )
    return None
