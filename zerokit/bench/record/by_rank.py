"""Settings that are several numbers in one text, a mesh "2x4" and values by rank such as "3,1"; and what does not fit
together among those of ranks that differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from zerokit.cuts import reduced
from zerokit.errors import UsageError

T = TypeVar("T", int, float)

PACE_EVERY = 10
"""Steps between two agreements of `--pace`: the first is about cold steps, so warm-up covers two."""
BY_MEMORY = "memory"
"""Shares by the memory that is free on each rank."""
_LEAST_CORES = 0.05
"""The kernel takes no quota below a millisecond."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_mesh(text: str) -> tuple[int, int]:
    """The outer and the inner axis of "2x4"; raises `UsageError` for other text."""
    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if shape is None:
        raise UsageError(f"mesh {text!r}: expected OUTERxINNER, such as 2x4")
    return int(shape[1]), int(shape[2])


def parse_shares(text: str) -> tuple[int, ...] | None:
    """The shares of "3,1"; None for "memory". Raises `UsageError` for other text."""
    if text == BY_MEMORY:
        return None
    shares = _each(text, int, f"shares {text!r}: expected whole numbers by rank, such as 3,1, or {BY_MEMORY}")
    try:
        reduced(len(shares), shares)
    except ValueError as error:
        raise UsageError(f"--shares: {error}") from None
    return shares


def parse_cores(text: str, world: int) -> tuple[float, ...]:
    """The cores of "1,0.5", of each of `world` ranks; raises `UsageError` for other text."""
    wrong = f"cores_per_rank {text!r}: expected numbers by rank from {_LEAST_CORES} on, such as 1,0.5"
    cores = _each(text, float, wrong)
    if not all(_LEAST_CORES <= each < math.inf for each in cores):
        raise UsageError(wrong)
    return _of_all(cores, world, f"cores_per_rank {text}")


def parse_sizes(text: str, world: int) -> tuple[int, ...]:
    """The bytes of "2G,512M", in units of 1,024, of each of `world` ranks; raises `UsageError` for other text."""
    wrong = f"memory_per_rank {text!r}: expected sizes by rank, such as 2G,512M"

    def size(part: str) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", part, re.IGNORECASE)
        if found is None:
            raise ValueError
        return int(float(found[1]) * _UNITS[found[2].upper()])

    sizes = _each(text, size, wrong)
    if not all(2**20 <= each < 2**63 for each in sizes):
        raise UsageError(f"{wrong}, and each at least 1M")
    return _of_all(sizes, world, f"memory_per_rank {text}")


def _of_all(values: tuple[T, ...], world: int, what: str) -> tuple[T, ...]:
    if len(values) != world:
        raise UsageError(f"{what}: {len(values)} values, expected one for each of {world} ranks")
    return values


def _each(text: str, parse: Callable[[str], T], wrong: str) -> tuple[T, ...]:
    """The parts of the text between commas."""
    try:
        return tuple(parse(part.strip()) for part in text.split(","))
    except (ValueError, OverflowError):
        raise UsageError(wrong) from None


def contradictions_of_unequal(
    shares: str | None,
    world: int,
    inner: int | None,
    *,
    pace: bool,
    limited: bool,
    islands: bool,
    elastic: bool,
    warmup: int | None,
) -> Iterator[str]:
    """What does not fit together among settings of ranks that differ; `inner` are the ranks of a mesh's inner axis."""
    by_rank = None if shares is None else parse_shares(shares)
    if by_rank is not None and len(by_rank) not in (world, inner):
        axis = "" if inner is None else f", or for each of the {inner} of the mesh's inner axis"
        yield f"shares {shares}: {len(by_rank)} shares, expected one for each of {world} ranks{axis}"
    if shares is not None and islands:
        yield "--shares and --every: islands hold equal parts, so leave one of them out"
    if elastic and (by_rank is not None or pace or limited):
        yield (
            "an elastic bench changes the number of ranks: leave out --pace and what names ranks one by one (--shares "
            "with numbers, --cores-per-rank, --memory-per-rank)"
        )
    if not pace:
        return
    if world == 1:
        yield "--pace deals samples to several ranks: give at least 2"
    if islands:
        yield "--pace and --every: islands take the mean of their weights, so each trains on equally many samples"
    if warmup is not None and warmup < 2 * PACE_EVERY:
        yield (
            f"--warmup {warmup} with --pace: ranks agree on speeds every {PACE_EVERY} steps, and twice before the "
            f"measured ones; give at least {2 * PACE_EVERY}, or leave --warmup out"
        )
