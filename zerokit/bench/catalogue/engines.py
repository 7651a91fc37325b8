"""The engines by name: what each does, its ZeRO stages, what it requires, and whether it can do what settings ask."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zerokit.available import available_bytes
from zerokit.bench.catalogue.workloads import InceptionConfig, describe
from zerokit.bench.machine.host import find_gpus, visible_devices
from zerokit.bench.record.options import ON_DEVICE
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.words import value_in_words
from zerokit.errors import UsageError
from zerokit.sizes import ELSEWHERE


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
    optimizers: tuple[str, ...] = ("adamw", "muon")
    """What `--optimizer` may be."""
    local_steps: bool = False
    """Whether islands can train by themselves (`--every`)."""
    module: str | None = None
    """The module of its trainer, where it is not named as the engine."""

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
        "post-local-sgd": Engine("PostLocalSGD", (0,), 0, local_steps=True, module="ddp"),
        "zero-redundancy-optimizer": Engine("ZeroRedundancy", (1,), 1, module="ddp"),
        # Stage 2 keeps parameters between forward and backward.
        "fsdp2": Engine("FSDP2", (2, 3), 3),
        "deepspeed": Engine(
            "DeepSpeed", (0, 1, 2, 3), 2, "deepspeed", _DEEPSPEED, fp16=True, optimizers=("adamw",)
        ),
        "parameter-server": Engine("parameter server", (0,), 0, optimizers=("adamw",)),
        # The floor, and the twin that a cell's communication is measured against. At stages 1 to 3 each rank steps the
        # optimizer for a 1/N share of the parameters only, as the engines with these stages do.
        "compute-only": Engine("compute only", (0, 1), 0, fp16=True),
    }
)


def label_of(settings: Settings, names: Iterable[str] = (), *, rounds: bool = False) -> list[str]:
    """Words for a cell: its engine, the stage if that has several, and the values of these settings.

    As "FSDP2 3", "batch 4"; with `rounds` "FSDP2 3 #2" for the second one.
    """
    engine = ENGINES.get(settings.engine)
    first = settings.engine if engine is None else engine.title
    if engine is None or engine.stages != (settings.stage,):
        first += f" {settings.stage}"
    if rounds and settings.repeat:
        first += f" #{settings.repeat + 1}"
    values = {name: getattr(settings, name) for name in names if name not in ("engine", "stage")}
    return [first, *(value_in_words(name, value) for name, value in values.items() if value is not None)]


def cell_label(settings: Settings, names: Iterable[str]) -> str:
    """A cell's name in tables, where these settings vary: "FSDP2 3 · batch 4"."""
    return " · ".join(label_of(settings, names))


def require_known(settings: Settings) -> Settings:
    """Return the settings; raise `UsageError` for an unknown engine or model, or sizes or data that do not fit."""
    if settings.engine not in ENGINES:
        raise UsageError(f"engine {settings.engine!r} is unknown: choose one of {tuple(ENGINES)}")
    name, workload = settings.model, describe(settings.model)
    text, images = workload.text, workload.images
    if text is not None and settings.seq_len > text.positions:
        raise UsageError(
            f"seq_len {settings.seq_len} exceeds the {text.positions} positions of {name}; "
            "use a smaller --seq-len"
        )
    if settings.data not in (None, "synthetic") and text is None:
        raise UsageError(f"{name} makes its own data: omit --data {settings.data}")
    if images is None:
        if settings.image_size is not None:
            raise UsageError(f"{name} takes no images: leave image_size {settings.image_size} out")
        return settings
    size = settings.image_size or images.image_size
    if images.smallest is None:
        if size != images.image_size:
            raise UsageError(f"{name} takes images of {images.image_size} pixels a side, not {size}")
        return settings
    if size < images.smallest:
        raise UsageError(f"image_size {size} is too small for {name}: at least {images.smallest}")
    # A BatchNorm over one value a channel has no variance: at the last stage of a ResNet, and in Inception's
    # auxiliary classifier at its usual size.
    if settings.batch_size == 1 and (isinstance(images, InceptionConfig) or size == images.smallest):
        raise UsageError(f"{name} at {size} pixels needs a batch of at least 2: give --batch-size")
    return settings


def unsupported(settings: Settings) -> str | None:
    """The reason why the engine cannot run these settings; None if it can. Installation is not checked."""
    name, engine = settings.engine, ENGINES[settings.engine]
    if settings.stage not in engine.stages:
        only = len(engine.stages) == 1
        has = f"stage {engine.stages[0]} only" if only else f"stages {', '.join(map(str, engine.stages))}"
        return f"{name} has no stage {settings.stage}: it has {has}"
    if settings.states != ON_DEVICE and name != "zerokit":
        return f"{name} has no home for states but its own: --states {settings.states} is zerokit's"
    if settings.shares is not None and name != "zerokit":
        return f"{name} cuts equally for all ranks: --shares {settings.shares} is zerokit's"
    if settings.pace and name != "zerokit":
        return f"{name} takes the mean of ranks with equal batches: --pace is zerokit's"
    if settings.optimizer not in engine.optimizers:
        having = [other for other in ENGINES if settings.optimizer in ENGINES[other].optimizers]
        return f"{name} is benched with adamw only: {', '.join(having)} train with torch's Muon"
    workload = describe(settings.model)
    if settings.pace and not workload.divisible:
        return (
            f"{settings.model} normalises over its micro-batch, so its loss is no mean over samples that other ranks "
            "could train on: omit --pace"
        )
    if settings.optimizer == "muon" and workload.config is not None and workload.text is None:
        return f"{settings.model} has no matrices in blocks, which Muon trains: use --optimizer adamw"
    if settings.every is not None and not engine.local_steps:
        local = " and ".join(other for other in ENGINES if ENGINES[other].local_steps)
        return f"{name} synchronises in every step: {local} make local steps (--every)"
    if settings.every is not None and name == "zerokit" and settings.optimizer != "adamw":
        return "zerokit's local steps mix shards of weights, and Muon's matrices are whole: use --optimizer adamw"
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
    return None


GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory available to ranks on this machine: the host's, and each CUDA device's total."""

    host_bytes: int
    device_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of model state on a rank: `whole`·Ψ + `shared`·Ψ/N."""

    whole: int
    shared: int

    def bytes_of(self, *, parameters: int, world: int) -> int:
        """The bytes on one rank, rounded down."""
        return self.whole * parameters + self.shared * parameters // world

    def __str__(self) -> str:
        parts = ((self.whole, "Ψ"), (self.shared, "Ψ/N"))
        return " + ".join(f"{count}{unit}" for count, unit in parts if count)


def state_of(
    engine: str, stage: int, precision: str, optimizer: str = "adamw", home: str = ON_DEVICE
) -> State:
    """The least state that an engine keeps for each parameter in the memory that it computes in.

    AdamW's two moments and Muon's one are in fp32, unless the states' `home` is "fp8". What is on the host or on a disk
    is not counted.
    """
    count = 2 if optimizer == "adamw" else 1
    moments = count if home == "fp8" else 4 * count
    if engine == "parameter-server":  # rank 0, the only one that steps, keeps moments as well
        return State(whole=4 + 4, shared=0)
    half = precision != "fp32"
    if engine == "fsdp2":
        # Everything is sharded in fp32; at stage 2, between forward and backward and so without gradients, whole
        # parameters in the compute precision stay as well.
        whole = 0 if stage == 3 else 2 if half else 4
        return State(whole, shared=(0 if whole else 4) + 4 + moments)
    # DDP and the like keep fp32 under autocast; zerokit and DeepSpeed keep half-precision parameters and a master.
    parameter, gradient, updated = 4, 4, moments
    if half and engine in ("zerokit", "deepspeed"):
        parameter, gradient, updated = 2, 4 if engine == "zerokit" else 2, 4 + moments
    if home in ELSEWHERE:
        updated = 0
    if engine == "compute-only":
        stage = min(stage, 1)  # it can share out nothing but the optimizer's work
    elif engine == "deepspeed" and stage == 1:
        stage = 2  # gradients that are not its own may go as backward goes
    kept = [parameter, gradient, updated]
    return State(whole=sum(kept[: 3 - stage]), shared=sum(kept[3 - stage :]))


def refuse_if_too_large(settings: Settings, machine: Machine) -> str | None:
    """The reason why ranks on this machine cannot hold the model's state; None if they may.

    A workload whose number of parameters is not known is not judged, and neither are unequal shares of devices.
    """
    parameters = describe(settings.model).parameters
    on_cuda = settings.device == "cuda" or (settings.device is None and bool(machine.device_bytes))
    if parameters is None or (settings.shares is not None and on_cuda):
        return None
    precision = settings.precision or ("bf16" if on_cuda else "fp32")
    home = ON_DEVICE if settings.home == "host" and not on_cuda else settings.home
    state = state_of(settings.engine, settings.stage, precision, settings.optimizer, home)
    least = state_of(settings.engine, 3, precision, settings.optimizer, home)
    for index, there in enumerate(machine.device_bytes if on_cuda else (machine.host_bytes,)):
        # Ranks go round the devices.
        sharing = len(range(index, settings.world, len(machine.device_bytes) if on_cuda else 1))
        needed = state.bytes_of(parameters=parameters, world=settings.world) * sharing
        if needed <= there:
            continue
        for_all = least.bytes_of(parameters=parameters, world=settings.world) * sharing
        advice = "choose a smaller model or more machines"
        if settings.engine in ("zerokit", "deepspeed") and settings.stage < 3 and for_all <= there:
            advice = f"--stage 3 needs at least {for_all / GIB:,.1f} GiB"
        elif settings.engine == "zerokit" and on_cuda and home == ON_DEVICE:
            away = state_of("zerokit", 3, precision, settings.optimizer, "host")
            without = away.bytes_of(parameters=parameters, world=settings.world) * sharing
            if without <= there:
                advice = f"--stage 3 --states host needs at least {without / GIB:,.1f} GiB there"
        return (
            f"{settings.model} is too large: {settings.engine} at stage {settings.stage} in {precision} keeps at "
            f"least {state} bytes of parameters, gradients and optimizer state a rank (Ψ = {parameters / 1e9:,.1f} "
            f"billion, N = {settings.world}), {needed / GIB:,.1f} GiB for {sharing} "
            f"rank{'s' if sharing > 1 else ''} on {f'CUDA device {index}' if on_cuda else 'this machine'}, "
            f"which has {there / GIB:,.1f} GiB; {advice}"
        )
    return None


def this_machine() -> Machine:
    """The memory available now; torch is not imported.

    A device whose size is not known, such as a slice (MIG), is taken to be large: never to refuse wrongly.
    """
    most = max((gpu.memory_bytes for gpu in find_gpus() if gpu.memory_bytes is not None), default=2**63)
    return Machine(available_bytes(), tuple(gpu.memory_bytes or most for gpu in visible_devices()))
