"""`extra` by rank: members that ranks have given different values are kept for each rank, and handed out by rank.

Every rank gives `save` an `extra`. What is equal on all ranks is stored once; what is not, for each rank:

    {"schedule": {…}, "loader": {"$": "ranks", "items": [rank 0's, rank 1's]}}

Members are those of a dict with text keys, the same on all ranks; any other `extra` is stored whole, once or by rank.
Where rank 0 alone gives an `extra`, and the others None, it is everyone's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zerokit.checkpoint.extra import MARKER, RANKS, decode, encode, mapping, pairs_of, ranks_in

Member = str | None
"""A member of `extra` by its key; None for the whole of it."""

Digests = Mapping[Member, str]
"""Text by member that is equal for equal values; the one member None where `extra` is no dict with text keys."""


class ByRank(tuple[Any, ...]):
    """All ranks' values of a member, or of the whole, of `extra`, as `Checkpoint.extra()` shows them."""

    __slots__ = ()


def members_of(extra: Any) -> Mapping[Member, Any]:
    """The values that are compared over ranks, by member."""
    if type(extra) is dict and all(type(key) is str for key in extra):
        return extra
    return {None: extra}


def differing(digests: Sequence[Digests | None]) -> tuple[Member, ...]:
    """The members that are stored by rank; `digests` are all ranks', None of one that gave no `extra`."""
    first, *others = digests
    if all(other is None for other in others) or all(other == first for other in others):
        return ()
    if first is None or any(other is None or other.keys() != first.keys() for other in others):
        return (None,)
    return tuple(name for name in first if any(other[name] != first[name] for other in others if other))


def encode_by_rank(
    extra: Any, by_rank: Mapping[Member, Sequence[Any]], path: str = "extra"
) -> tuple[Any, dict[str, Any]]:
    """As `encode`, with all ranks' values of the members in `by_rank`. Raises as `encode` does."""
    tensors: dict[str, Any] = {}

    def ranks(name: Member, where: str) -> dict[str, Any]:
        items = [encode(value, f"{where}/{rank}", tensors)[0] for rank, value in enumerate(by_rank[name])]
        return {MARKER: RANKS, "items": items}

    if not by_rank:
        return encode(extra, path)
    if None in by_rank:
        return ranks(None, path), tensors
    places = {key: f"{path}/{key}" for key in extra}
    encoded = {
        key: ranks(key, place) if key in by_rank else encode(extra[key], place, tensors)[0]
        for key, place in places.items()
    }
    return mapping(encoded), tensors


def decode_by_rank(
    plain: Any,
    tensors: Mapping[str, Any],
    path: str,
    rank: int | None = None,
    left_out: Collection[Member] = (),
) -> Any:
    """The value that `rank` gave to `save`, without what is `left_out`; with None all ranks', as `ByRank`.

    Raises `CheckpointError`, naming the path, for invalid data.
    """
    own = ranks_in(plain)
    if None in left_out:
        return None
    taken = {
        name: {MARKER: "tuple", "items": items} if rank is None else items[rank]
        for name, items in own.items()
        if name not in left_out
    }
    if None in own:
        value = decode(taken[None], tensors, path)
        return ByRank(value) if rank is None else value
    if not own:
        return decode(plain, tensors, path)
    pairs = ((key, taken.get(key, item)) for key, item in pairs_of(plain) if key not in left_out)
    value = decode(mapping(dict(pairs)), tensors, path)
    return value if rank is not None else value | {name: ByRank(value[name]) for name in taken}


def shown(name: Member) -> str:
    """The member as an expression, for messages."""
    return "extra" if name is None else f"extra[{name!r}]"
