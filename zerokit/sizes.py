"""Bytes per element of parameters, gradients, masters and states, and of gradients on narrow wires.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zerokit.layout import Unit
from zerokit.owners import Owners, Shape


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Integers of `bits` in blocks of `block` elements, each with a scale of two bytes."""

    bits: int
    block: int

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements that lie together; the last block may be shorter."""
        return -(-numel * self.bits // 8) + 2 * -(-numel // self.block)

    def unit_nbytes(self, unit: Unit) -> int:
        """Bytes of a unit's payload and of the scales of all its shards."""
        pieces = map(unit.cut.piece, range(unit.world))
        scales = sum(-(-piece.numel // self.block) for piece in pieces)
        return -(-unit.payload_numel * self.bits // 8) + 2 * scales


BLOCK_FORMATS = {"int8": BlockFormat(8, 256), "int4": BlockFormat(4, 128)}
"""The narrow wires: 1.008 and 0.516 bytes an element."""


@dataclass(frozen=True, slots=True)
class Wholes:
    """Tensors that are updated whole: their owners, and by group and shape the bytes of an owner's states of one.

    `states_of` gives those of all states, and those of single numbers among them; `moments_of` those of an element of
    each state that is kept in fp8.
    """

    owners: Owners
    states_of: Callable[[int, Shape], tuple[int, int]]
    moments_of: Callable[[int, Shape], tuple[int, ...]] = lambda group, shape: ()


HOMES = ("device", "host", "disk", "fp8")
"""Where masters and states are between steps; with fp8 they are on the device, and moments in eight bits."""
ELSEWHERE = ("host", "disk")
"""Homes whose masters and states are in the device's memory only while they visit."""

FP8_BLOCK = 64
"""Elements that share a scale of four bytes, where moments are in fp8: 1.0625 bytes an element."""


class StateBytes(NamedTuple):
    """Bytes of the states of an optimizer group: per element, and of single numbers for each flat parameter.

    `moments` are the bytes per element of those states that fp8 keeps in its own; `element` includes them.
    """

    element: int
    scalars: int
    moments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element, for each kind of state.

    `master` is 0 where the parameters' own storage serves as master; `states` counts all element states of the
    optimizer together (8 for Adam in fp32), `scalars` bytes of other state for each flat parameter. `wire` is that of
    gradients on their way to be summed, None where it is `reduce`. `home` is one of `HOMES`; only with fp8 are there
    `moments`, as in `StateBytes`.
    """

    compute: int
    reduce: int
    master: int
    states: int
    scalars: int = 0
    wire: int | BlockFormat | None = None
    differing: Mapping[int, ElementBytes] = field(default_factory=dict)
    """Those of units that compute in another dtype than the rest, by index."""
    groups: Mapping[int, StateBytes] = field(default_factory=dict)
    """Those of optimizer groups that have other states, by number."""
    wholes: Wholes | None = None
    """The tensors that are updated whole, if there are any."""
    home: str = "device"
    moments: tuple[int, ...] = ()

    def of_unit(self, index: int) -> ElementBytes:
        """The bytes per element of a unit."""
        return self.differing.get(index, self)

    def of_group(self, number: int) -> StateBytes:
        """The bytes of the states of an optimizer group."""
        return self.groups.get(number, StateBytes(self.states, self.scalars, self.moments))


_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2}
_CAST = ("float32", "bfloat16", "float16")


def stored_bytes(unit: Unit, compute_bytes: int) -> int:
    """Bytes per element of a unit's parameters: frozen ones of unusual dtypes are not cast to the compute dtype."""
    dtype = unit.parameters[0].dtype
    return compute_bytes if unit.trainable or dtype in _CAST else _DTYPE_BYTES.get(dtype, 1)
