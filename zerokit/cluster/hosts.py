"""Lists of hosts: DeepSpeed's hostfile, and Slurm's bracketed list."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from zerokit.documents import read_text
from zerokit.errors import UsageError

MOST_HOSTS = 1 << 16
"""Slurm's own limit (MaxNodeCount) is as much."""


@dataclass(frozen=True, slots=True)
class HostSlots:
    """A line of a hostfile: a host, and its number of ranks, None if not given."""

    host: str
    slots: int | None


def read_hostfile(path: Path) -> list[HostSlots]:
    """Read a hostfile's lines, `HOST [slots=N]`; `#` starts a comment.

    The format is DeepSpeed's, https://www.deepspeed.ai/getting-started/#resource-configuration-multi-node.
    Raises `UsageError` that names the file and the line.
    """
    try:
        lines = read_text(path).removeprefix("\ufeff").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"the hostfile {path} cannot be read: {error}") from error
    hosts: list[HostSlots] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match = re.fullmatch(r"slots=([1-9][0-9]{0,5})", words[1]) if len(words) == 2 else None
        if len(words) > 2 or (len(words) == 2 and match is None) or words[0].startswith("-"):
            raise UsageError(f"line {number} of {path} is {line.strip()!r:.60}; expected: HOST slots=N")
        if any(words[0] == known.host for known in hosts):
            raise UsageError(f"line {number} of {path} names {words[0][:60]} twice")
        hosts.append(HostSlots(words[0], int(match[1]) if match else None))
    if not hosts:
        raise UsageError(f"the hostfile {path} names no host")
    return hosts


def equal_slots(hosts: Sequence[HostSlots]) -> int | None:
    """The slots of all these hosts, None if not given; raises `UsageError` if they differ."""
    slots = {one.slots for one in hosts}
    if len(slots) > 1:
        listed = ", ".join(f"{one.host} {one.slots or 'open'}" for one in hosts)
        raise UsageError(
            f"every node runs the same number of ranks, but the hosts' slots differ: {listed}; give --nproc-per-node"
        )
    return slots.pop() if slots else None


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's list of nodes: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login.

    Brackets may come more than once in a name; leading zeros are kept. Raises `UsageError` for what is no such list.
    """
    hosts: list[str] = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text.strip()):  # at commas outside brackets
        parts = re.findall(r"([^\[\]\s]+)|\[([^\[\]]*)\]", name)
        if "".join(literal or f"[{ranges}]" for literal, ranges in parts) != name:
            raise UsageError(
                f"{text!r:.60} is not a list of nodes in Slurm's form: {name!r:.60} in it cannot be read"
            )
        endings = [[literal] if literal else _expand_ranges(ranges, text) for literal, ranges in parts]
        if len(hosts) + math.prod(map(len, endings)) > MOST_HOSTS:
            raise UsageError(f"{text!r:.60} names more than {MOST_HOSTS} nodes")
        hosts += map("".join, product(*endings))
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece)
        if match is None or not 0 <= int(match[2] or match[1]) - int(match[1]) < MOST_HOSTS - len(numbers):
            raise UsageError(
                f"{text!r:.60} is not a list of nodes in Slurm's form: [{ranges[:60]}] is not a list of at most "
                f"{MOST_HOSTS} numbers"
            )
        last = int(match[2] or match[1])
        numbers += [str(number).zfill(len(match[1])) for number in range(int(match[1]), last + 1)]
    return numbers
