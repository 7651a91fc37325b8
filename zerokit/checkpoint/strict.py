"""Strict JSON parsing for damaged or hostile files; every refusal is a `ValueError` that shows the value.

The callers know the file and turn it into a `CheckpointError`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

MAX_NUMEL = 1 << 56
"""Elements. Sizes in bytes stay below 2^63 for every dtype."""

_MAX_DIMENSIONS = 64
"""As in numpy and torch. Also: the product of a million large sizes would take minutes."""

T = TypeVar("T")


def parse_json(content: bytes) -> Any:
    """The value of a UTF-8 JSON document without duplicate keys, NaN, infinity or numbers of over 4300 digits.

    Raises `ValueError`, or `RecursionError` for deep nesting.
    """
    text = content.decode()
    plain = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    if "\\u" in text:  # an escape may be half of a surrogate pair, which cannot be written again
        json.dumps(plain, ensure_ascii=False).encode()
    return plain


def compact(plain: Any) -> bytes:
    """A JSON document without spaces, not escaped."""
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def canonical(plain: Any) -> str:
    """Canonical text: equal for equal data, in any order of members."""
    return json.dumps(plain, sort_keys=True)


def typed(value: Any, kind: type[T], what: str) -> T:
    """`value`, if it is of that kind (a bool is no int)."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what} is {str(value)[:60]!r}, expected {kind.__name__}")
    return value


def member(entry: dict[str, Any], key: str, kind: type[T]) -> T:
    """A member of an object."""
    if key not in entry:
        raise ValueError(f"{key!r} is missing")
    return typed(entry[key], kind, repr(key))


def members(entry: dict[str, Any], key: str, kind: type[T]) -> list[T]:
    """A member of an object that is a list of one kind."""
    return [typed(value, kind, f"an element of {key!r}") for value in member(entry, key, list)]


def bounded(entry: dict[str, Any], key: str, least: int, most: int = MAX_NUMEL * 8) -> int:
    """An integer member, `least` and `most` included."""
    value = member(entry, key, int)
    if not least <= value <= most:
        raise ValueError(f"{key!r} is {str(value)[:60]}, expected {least} to {most}")
    return value


def shape_of(entry: dict[str, Any]) -> tuple[int, ...]:
    """The member "shape"."""
    shape = tuple(members(entry, "shape", int))
    if (
        len(shape) > _MAX_DIMENSIONS
        or any(size < 0 for size in shape)
        or math.prod(max(size, 1) for size in shape) > MAX_NUMEL
    ):
        raise ValueError(f"shape {str(shape)[:60]} is impossible")
    return shape


@contextmanager
def within(what: str) -> Iterator[None]:
    """Name `what` in a refusal of the body."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {twice[:60]!r}")
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
