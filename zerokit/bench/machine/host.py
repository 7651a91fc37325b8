"""The host: its processor, memory and NVIDIA devices, and those that CUDA shows to a process. Standard library only.

`CUDA_VISIBLE_DEVICES` lists devices by index or by UUID ("GPU-…", or "MIG-…" for a slice of one), and a UUID may be cut
short as long as it stays unambiguous. CUDA reads it up to the first entry that names no device.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import platform
import re
import resource
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


def peak_host_bytes() -> int:
    """The peak resident memory of this process.

    From /proc where there is one: there `ru_maxrss` would start at what the parent held when it forked.
    """
    if (line := _field("/proc/self/status", "VmHWM")) is not None:
        return int(line.split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_first(pages: int) -> None:
    """Ask the system for so many pages of memory, and write to each of them once."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory[:: mmap.PAGESIZE] = bytes(pages)


def processor_name() -> str:
    """The CPU's name, or its architecture if the system does not report a name."""
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _field(path: str, name: str) -> str | None:
    """What follows the colon in the first line of `path` that begins with `name`; None where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def memory_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_DRIVER = Path("/proc/driver/nvidia/gpus")
_QUERY = ("nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device of this machine, in the driver's order; `memory_bytes` is None if only /proc lists it."""

    uuid: str
    memory_bytes: int | None


def visible_names(environment: Mapping[str, str]) -> list[str] | None:
    """The entries of `CUDA_VISIBLE_DEVICES` that CUDA honours; None if it is not set."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not re.fullmatch("[0-9]{1,9}", name) and not name.startswith(("GPU-", "MIG-")):
            break  # "-1", and whatever else is no device
        names.append(name)
    return names


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """The machine's devices that CUDA shows, in CUDA's order.

    A slice of a device has its UUID and no size: which device it was cut from is not looked at.
    """
    names = visible_names(environment)
    if names is None:
        return list(gpus)
    shown: list[Gpu] = []
    for name in names:
        if name.startswith("MIG-"):  # CUDA shows one slice, and nothing else
            return shown or ([Gpu(name, None)] if gpus else [])
        by_index = name.isdecimal()
        matching = gpus[int(name) :][:1] if by_index else [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        if len(matching) != 1:
            break
        shown += matching
    return shown


def identify(uuid: str, environment: Mapping[str, str]) -> str:
    """A device's identity: the UUID that torch gives it, or that of the slice (MIG) which CUDA shows.

    For a slice, CUDA may give the UUID of the whole device.
    """
    names = visible_names(environment) or [""]
    if names[0].startswith("MIG-"):
        return names[0]
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def find_gpus(driver: Path = _DRIVER, query: Sequence[str] = _QUERY) -> list[Gpu]:
    """All NVIDIA devices of this machine: as `query` prints them, UUID and MiB a line, or in the `driver`'s folder."""
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        ).stdout
        rows = [line.split(",") for line in answer.splitlines() if line.strip()]
        return [Gpu(uuid.strip(), int(mib) * 2**20) for uuid, mib in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        pass
    gpus = []
    for information in sorted(driver.glob("*/information")):  # by PCI bus, as nvidia-smi
        lines = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        gpus.append(Gpu(lines.get("GPU UUID", "").strip(), None))
    return gpus


def torch_built() -> tuple[str | None, str | None]:
    """The version of torch and of the CUDA that it was built for, from a file of its own: importing takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except OSError:
        return None, None
    return found["__version__"], found.get("cuda")


def torch_uses_cuda() -> bool:
    """Whether the installed torch was built for CUDA; it is not imported."""
    return torch_built()[1] is not None


def visible_devices() -> list[Gpu]:
    """The CUDA devices that torch will see in a process started here."""
    return visible(find_gpus(), os.environ) if torch_uses_cuda() else []
