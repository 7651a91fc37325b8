"""What ranks have unequal parts of, as text in rank order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from zerokit.bench.record.measured import Rank
from zerokit.bench.record.metrics import MIB
from zerokit.bench.record.record import Record


def _state_mib(rank: Rank) -> float | None:
    """Where shares differ."""
    return None if rank.share is None or rank.memory_bytes is None else rank.memory_bytes["total"] / MIB


_PARTS: Mapping[str, Callable[[Rank], float | None]] = {
    "samples by rank": lambda rank: rank.samples,
    "speeds by rank": lambda rank: rank.speed,
    "shares by rank": lambda rank: rank.share,
    "state by rank, MiB": _state_mib,
}
MEANING: Mapping[str, str] = MappingProxyType(
    {
        "samples by rank": "in the last step, in proportion to the speeds that ranks have agreed on",
        "speeds by rank": "relative to their mean",
        "shares by rank": "of what is sharded",
        "state by rank, MiB": "counted at the end of backward",
    }
)


def by_rank(record: Record) -> dict[str, str]:
    """Each kind of parts that the ranks of this record have, such as samples "6, 2"."""
    found = {name: [part(rank) for rank in record.ranks] for name, part in _PARTS.items()}
    return {
        name: ", ".join(f"{value:.4g}" for value in values if value is not None)
        for name, values in found.items()
        if values and None not in values
    }
