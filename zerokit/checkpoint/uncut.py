"""Files with states that are not cut, those of other shapes than their tensor's: one for each tensor that has any.

Each is a safetensors file whose `__metadata__` says, as `states`, what they are: kind → value, encoded as values of
`extra.json` are. The tensors that it refers to are in the file. Whoever updates the tensor writes the file, and whoever
updates it later reads it, so it has nothing to do with the number of ranks. `orders` has the dimensions, the slowest
first, of tensors that lie in memory in another order than C's: products of matrices that lie otherwise have other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zerokit.checkpoint.checksum import crc32, damaged
from zerokit.checkpoint.disk import check_size, opened, read_exactly
from zerokit.checkpoint.entries import Uncut
from zerokit.checkpoint.extra import decode, encode, mapping
from zerokit.checkpoint.safetensors import (
    ELEMENT_BYTES,
    LENGTH_BYTES,
    Header,
    header_size,
    lay_out,
    parse_header,
    read_header,
)
from zerokit.checkpoint.strict import compact, members, parse_json, typed
from zerokit.errors import CheckpointError

if TYPE_CHECKING:
    from zerokit.runtime.homes import Elements

T = TypeVar("T")


@dataclass(slots=True)
class UncutFile:
    """A file that is to be written: `tensors` in the order in which they follow its `header`."""

    place: Uncut
    header: bytes
    tensors: Sequence[Elements]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def plan_uncut(place: Uncut, states: Mapping[str, Any]) -> UncutFile:
    """The file of these states, by kind. Raises `CheckpointError` for what cannot be saved."""
    tensors: dict[str, Any] = {}
    plain = {kind: encode(states[kind], kind, tensors)[0] for kind in sorted(states)}
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-ELEMENT_BYTES[dtypes[name]], name))
    metadata = {"format": "zerokit", "states": compact(mapping(plain)).decode()}
    if orders := {name: found for name in order if (found := _order(tensors[name])) is not None}:
        metadata["orders"] = compact(orders).decode()
    header, _ = lay_out(((name, dtypes[name], tuple(tensors[name].shape)) for name in order), metadata)
    return UncutFile(place, header, [tensors[name] for name in order])


def _order(tensor: Any) -> list[int] | None:
    """The dimensions by their strides, if these are not in order and leave no holes."""
    if not hasattr(tensor, "is_contiguous") or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=lambda at: (-tensor.stride(at), at))
    return order if tensor.permute(order).is_contiguous() else None


def read_uncut(
    path: Path,
    place: Uncut,
    make: Callable[[bytearray, str, tuple[int, ...]], T],
    arrange: Callable[[T, list[int]], T] = lambda tensor, order: tensor,
) -> dict[str, Any]:
    """The states in a file, by kind, each tensor made by `make` of its bytes, dtype and shape.

    `arrange` brings a tensor's memory into an order of dimensions.

    Raises `CheckpointError`, naming the file, if it is missing or damaged.
    """
    with opened(path) as fd:
        check_size(fd, place.size, path)
        first = bytearray(min(LENGTH_BYTES, place.size))
        read_exactly(fd, [first], 0, path)
        content = bytearray(header_size(bytes(first), place.size, str(path)))
        read_exactly(fd, [content], 0, path)
        header = parse_header(bytes(content), place.size, str(path))
        crc = crc32(content)
        tensors = {}
        for tensor in header.tensors.values():  # one after the other, without holes
            data = bytearray(tensor.size)
            read_exactly(fd, [data], tensor.offset, path)
            crc = crc32(data, crc)
            tensors[tensor.name] = make(data, tensor.dtype, tensor.shape)
    if crc != place.crc:
        raise CheckpointError(f"{path}: {damaged(crc, place.crc)}: take another checkpoint")
    for name, order in _orders(header, str(path)).items():
        tensors[name] = arrange(tensors[name], order)
    return _decoded(header, place, tensors, str(path))


def check_uncut(path: Path, place: Uncut) -> None:
    """Raise `CheckpointError` unless a file, whose bytes are known to be right, has the states that it should have."""
    header = read_header(path)
    _orders(header, str(path))
    _decoded(header, place, dict.fromkeys(header.tensors), str(path))


def _orders(header: Header, where: str) -> dict[str, list[int]]:
    try:
        plain = typed(parse_json(header.metadata.get("orders", "{}").encode()), dict, "'orders'")
        for name, order in plain.items():
            dims = range(len(header.tensors[name].shape)) if name in header.tensors else ()
            if sorted(members(plain, name, int)) != list(dims):
                raise ValueError(f"'orders' has {str(order)[:60]} for {name[:60]!r}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid: {error}") from None
    return plain


def _decoded(header: Header, place: Uncut, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        plain = typed(parse_json(header.metadata.get("states", "").encode()), dict, "'states'")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid: {error}") from None
    states: dict[str, Any] = decode(plain, tensors, where)
    if tuple(sorted(map(str, states))) != place.kinds:
        raise CheckpointError(
            f"{where}: has states {', '.join(map(str, states))[:200]}, expected {', '.join(place.kinds)[:200]}"
        )
    return states
