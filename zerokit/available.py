"""Main memory that this process can still take, and processor time, within all its control groups.

Standard library only.

[Note: control groups] A process is in one group of each hierarchy (`/proc/self/cgroup`), and the limits of all groups
above it apply as well: a Slurm step is in its job's group, a container in its pod's. `/proc/self/mountinfo` says where
hierarchies are mounted and which group a mount shows at its top; in a container that is often its own group.
Version 2 has one hierarchy, version 1 one for each controller; hybrid systems have both. Groups above the top of the
mount limit a process too, but only version 1 tells: in `hierarchical_memory_limit`.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_UNLIMITED = 1 << 62
"""Version 1 writes about 2⁶³ where there is no limit."""


def available_bytes(root: Path = _ROOT) -> int:
    """Main memory available without swapping; a huge number if nothing says so.

    Files in memory (tmpfs) are not available; other cached ones are. `root` holds `proc` and what is mounted.
    """
    return min(memory_pools(root).values(), default=sys.maxsize)


def memory_pools(root: Path = _ROOT) -> dict[str, int]:
    """The bytes available in each pool that this process takes memory from: its machine, and groups with a limit.

    Processes that share a pool have the same name for it, also in different containers.
    """
    pools = {}
    known = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if known is not None:
        pools[_machine(root)] = known * 1024
    for name, group in _named_groups("memory", root):
        if (free := _free(group)) is not None:
            pools[name] = max(0, free)
    return pools


def cpu_quotas(root: Path = _ROOT) -> dict[str, float]:
    """The cores' worth of time that each group with a quota allows its processes together, by names like pools'."""
    quotas = {}
    for name, group in _named_groups("cpu", root):
        old = (_text(group / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
        words = (_text(group / "cpu.max") or " ".join(old)).split()
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # not "max", not -1
            quotas[name] = int(words[0]) / int(words[1])
    return quotas


def sharers(pools: Iterable[Iterable[str]]) -> Counter[str]:
    """How many processes take from each pool, from the names of each process's pools."""
    return Counter(name for names in pools for name in names)


def part_of(pools: Mapping[str, float], sharing: Mapping[str, int]) -> float:
    """What is left for a process if all that share a pool take equal parts: the least of its pools, or infinity."""
    return min((free / sharing.get(name, 1) for name, free in pools.items()), default=math.inf)


def _free(group: Path) -> int | None:
    """What processes of a group may still take; None without a limit. Version 2's names, and version 1's."""
    stat = _numbers(group / "memory.stat")
    limits = [
        _number(group / "memory.max"),
        _number(group / "memory.high"),  # nothing is killed beyond it, but processes hardly advance
        _number(group / "memory.limit_in_bytes"),
        stat.get("hierarchical_memory_limit"),
    ]
    used = _number(group / "memory.current")
    if used is None:
        used = _number(group / "memory.usage_in_bytes")
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    if used is None or not known:
        return None
    if "file" in stat:
        cached = stat["file"] - stat.get("shmem", 0)
    elif "total_shmem" in stat:
        cached = stat.get("total_cache", 0) - stat["total_shmem"]
    else:  # older kernels count files in memory with the others
        cached = stat.get("total_inactive_file", 0)
    return min(known) - used + cached


def own_groups(controller: str, root: Path = _ROOT) -> Iterator[list[Path]]:
    """This process's groups in each hierarchy that may have this controller, the innermost first, up to its mount."""
    own: dict[str, PurePosixPath] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            own["cgroup2" if number == "0" else "cgroup"] = PurePosixPath(path)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        place, _, system = line.partition(" - ")
        words = system.split()  # kind, what is mounted, options
        kind = words[0] if words else ""
        if kind not in own or (kind == "cgroup" and controller not in words[-1].split(",")):
            continue
        shown, top = (PurePosixPath(_unescaped(field)) for field in place.split()[3:5])
        below = own[kind].relative_to(shown) if own[kind].is_relative_to(shown) else PurePosixPath()
        if ".." in below.parts:  # of a process that is not below the top of its namespace
            below = PurePosixPath()
        yield [root / top.relative_to("/") / inner for inner in (below, *below.parents)]


def _named_groups(controller: str, root: Path) -> Iterator[tuple[str, Path]]:
    """Those groups; a name is the same in every namespace of this boot, because groups have inodes."""
    for folder in itertools.chain.from_iterable(own_groups(controller, root)):
        with suppress(OSError):  # hidden from here
            state = os.stat(folder)
            yield f"{_machine(root)}:{state.st_dev}:{state.st_ino}", folder


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _machine(root: Path) -> str:
    return _text(root / "proc/sys/kernel/random/boot_id").strip()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):  # there is none, or it is not for this user
        return ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _numbers(file: Path) -> dict[str, int]:
    """The numbers of a file of lines `name number`, by name."""
    lines = (line.split() for line in _text(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
