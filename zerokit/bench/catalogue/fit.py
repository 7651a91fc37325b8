"""Estimates whether a bench's model state fits this machine, before any process starts. Standard library only.

What is compared is a lower bound, parameters, gradients and AdamW's state by ZeRO's formulas (arXiv:1910.02054, §5),
without activations, buffers or padding: what is refused could not have run, what is not refused may still run out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.machine.devices import find_gpus, visible_devices
from zerokit.bench.record.settings import Settings

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory available to ranks on this machine: the host's (None if unknown), and each CUDA device's total."""

    host_bytes: int | None
    device_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of model state on a rank: `whole`·Ψ + `shared`·Ψ/N, and `first`·Ψ more on rank 0."""

    whole: int
    shared: int
    first: int = 0

    def bytes_of(self, rank: int, *, parameters: int, world: int) -> int:
        """The bytes on one rank, rounded down."""
        whole = self.whole + (self.first if rank == 0 else 0)
        return whole * parameters + self.shared * parameters // world

    def __str__(self) -> str:
        parts = ((self.whole, "Ψ"), (self.shared, "Ψ/N"))
        return " + ".join(f"{count}{unit}" for count, unit in parts if count)


def state_of(engine: str, stage: int, precision: str) -> State:
    """The least state that an engine keeps for each parameter; AdamW's two moments are in fp32."""
    if engine == "parameter-server":  # only rank 0 steps
        return State(whole=4 + 4, shared=0, first=8)
    half = precision != "fp32"
    if engine == "fsdp2":
        # Everything is sharded in fp32; at stage 2, between forward and backward and so without gradients, whole
        # parameters in the compute precision stay as well.
        return State(whole=0, shared=4 + 4 + 8) if stage == 3 else State(whole=2 if half else 4, shared=4 + 8)
    # DDP and the like keep fp32 under autocast; zerokit and DeepSpeed keep half-precision parameters and a master.
    parameter, gradient, optimizer = 4, 4, 8
    if half and engine in ("zerokit", "deepspeed"):
        parameter, gradient, optimizer = 2, 4 if engine == "zerokit" else 2, 12
    if engine == "compute-only":
        stage = min(stage, 1)  # it can share out nothing but the optimizer's work
    elif engine == "deepspeed" and stage == 1:
        stage = 2  # gradients that are not its own may go as backward goes
    kept = [parameter, gradient, optimizer]
    return State(whole=sum(kept[: 3 - stage]), shared=sum(kept[3 - stage :]))


def refuse_if_too_large(settings: Settings, machine: Machine) -> str | None:
    """The reason why ranks on this machine cannot hold the model's state; None if they may.

    A workload whose number of parameters is not known is not judged.
    """
    parameters = describe(settings.model).parameters
    if parameters is None:
        return None
    on_cuda = settings.device == "cuda" or (settings.device is None and bool(machine.device_bytes))
    precision = settings.precision or ("bf16" if on_cuda else "fp32")
    state = state_of(settings.engine, settings.stage, precision)
    least = state_of(settings.engine, 3, precision)
    for index, there in enumerate(machine.device_bytes if on_cuda else (machine.host_bytes,)):
        # Ranks go round the devices.
        sharing = range(index, settings.world, len(machine.device_bytes) if on_cuda else 1)
        needed = sum(state.bytes_of(rank, parameters=parameters, world=settings.world) for rank in sharing)
        if there is None or needed <= there:
            continue
        for_all = least.bytes_of(1, parameters=parameters, world=settings.world) * len(sharing)
        advice = "choose a smaller model or more machines"
        if settings.engine in ("zerokit", "deepspeed") and settings.stage < 3 and for_all <= there:
            advice = f"--stage 3 needs at least {for_all / GIB:,.1f} GiB"
        return (
            f"{settings.model} is too large: {settings.engine} at stage {settings.stage} in {precision} keeps at "
            f"least {state} bytes of parameters, gradients and optimizer state a rank (Ψ = {parameters / 1e9:,.1f} "
            f"billion, N = {settings.world}), {needed / GIB:,.1f} GiB for {len(sharing)} "
            f"rank{'s' if len(sharing) > 1 else ''} on {f'CUDA device {index}' if on_cuda else 'this machine'}, "
            f"which has {there / GIB:,.1f} GiB; {advice}"
        )
    return None


def this_machine() -> Machine:
    """The memory available now; torch is not imported."""
    return Machine(available_bytes(), _device_bytes())


def available_bytes() -> int | None:
    """Main memory available without swapping, within this process's control group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not available:
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["file"]
    except (OSError, ValueError, KeyError):  # no group, or one without a limit ("max")
        return available[0]
    return min(available[0], limit - used + int(cached))


def _device_bytes() -> tuple[int, ...]:
    """Memory of the CUDA devices that ranks here will see; empty where there are none.

    Where a size is not known, as of a slice (MIG), it is taken to be large: never to refuse wrongly.
    """
    known = [gpu.memory_bytes for gpu in find_gpus() if gpu.memory_bytes is not None]
    return tuple(gpu.memory_bytes or max(known, default=2**63) for gpu in visible_devices())
