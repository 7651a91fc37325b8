"""`Source`: a checkpoint of any format to read from: its contents, and the place of each element.

`Checkpoint` is zerokit's own format, `formats.ForeignCheckpoint` any other. Those who copy or load bytes need no more
than this class, and neither torch nor the framework that wrote the files.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from zerokit.checkpoint.by_rank import Member, decode_by_rank
from zerokit.checkpoint.checksum import Piece, Pieces
from zerokit.checkpoint.disk import read_part
from zerokit.checkpoint.extra import GENERATOR_PREFIX, decode, ranks_in
from zerokit.checkpoint.manifest import BUFFER_PREFIX, File, Manifest
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Stream
from zerokit.checkpoint.small_floats import PACKED, SMALL, values_of
from zerokit.checkpoint.streams import BLOCK
from zerokit.errors import CheckpointError, UsageError, ZerokitWarning
from zerokit.layout import Interval, Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")


class Stretch(NamedTuple):
    """Elements `interval` of a stream, of one parameter, one after the other from byte `offset` of `file` on."""

    file: int
    interval: Interval
    offset: int


class Source(ABC):
    """A checkpoint's contents and their places. All errors in its files are `CheckpointError`s."""

    format = "zerokit"
    path: Path
    """The step's directory, or a foreign checkpoint's."""
    run: Path | None
    """The run's directory where the path that was given is one."""
    notes: tuple[str, ...]
    """What a user should know of this choice or reading, as sentences: `warn` shows them."""
    manifest: Manifest
    manifest_crc: int
    """The CRC-32 of what describes the contents: equal for equal checkpoints."""

    def warn(self) -> None:
        """Issue the notes as a `ZerokitWarning`, for callers that cannot return them."""
        if self.notes:
            warnings.warn("; ".join(self.notes), ZerokitWarning, stacklevel=3)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def world(self) -> int:
        """The number of ranks that wrote it, or for which it was cut."""
        return self.manifest.world

    @property
    def weights_only(self) -> bool:
        """Whether it holds parameters and buffers only, no optimizer's state."""
        return self.manifest.weights_only

    @property
    def layout(self) -> Layout:
        return self.manifest.layout

    @property
    def streams(self) -> tuple[Stream, ...]:
        return self.manifest.streams

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's shape by its name, in the order of the line; tied ones by their first name only."""
        return {parameter.name: parameter.shape for parameter in self.layout.parameters}

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    @abstractmethod
    def locate(self, stream: int, position: int, interval: Interval) -> Iterator[Stretch]:
        """The places of elements of a stream that are of the parameter at `position` of the line, in order."""

    @abstractmethod
    def file_path(self, file: int) -> Path:
        """The path of the file with that number."""

    def place(self, name: str) -> Path:
        """The path of a file of the checkpoint, by its name."""
        return self.path / name

    @property
    def folders(self) -> tuple[Path, ...]:
        """The directories that its files lie in, or their runs'."""
        return (self.run or self.path,)

    @abstractmethod
    def open_file(self, file: int) -> AbstractContextManager[int]:
        """The descriptor of the file with that number, after a check that it is unchanged."""

    @abstractmethod
    def check_files(self) -> None:
        """Raise `CheckpointError` unless every file exists and has its size."""

    @abstractmethod
    def faults(self, by_rank: Sequence[Pieces]) -> list[str]:
        """The problems in the bytes that ranks have read; empty if there are none."""

    def require_right(self, by_rank: Sequence[Pieces], advice: str = "") -> None:
        """Raise `CheckpointError`, naming files and elements, if bytes that ranks have read differ from checksums."""
        if faults := self.faults(by_rank):
            more = f"; and {len(faults) - 3} more (zerokit verify lists all)" if len(faults) > 3 else ""
            raise CheckpointError(f"{self.path}: {'; '.join(faults[:3])}{more}{advice}")

    @property
    @abstractmethod
    def data_size(self) -> int:
        """The number of bytes that a complete copy reads."""

    @abstractmethod
    def held_files(self) -> list[tuple[str, int]]:
        """Every file's name and size in bytes."""

    @abstractmethod
    def checksums(self, stream: int) -> Iterator[tuple[str, Piece]]:
        """Each parameter of a stream with its checksum; data without a stated checksum is read."""

    @abstractmethod
    def whole_files(self) -> Iterator[tuple[File, bytes | None]]:
        """The files that are not sharded, `common` and `extra`, with their contents if they are not on disk."""

    @property
    def buffers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the model's persistent buffers, by their names."""
        return {
            name.removeprefix(BUFFER_PREFIX): form
            for name, form in self.common_forms.items()
            if name.startswith(BUFFER_PREFIX)
        }

    @property
    @abstractmethod
    def common_forms(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor that is stored whole, by its name: "buffers/…", "optimizer/…" and others."""

    @abstractmethod
    def common_place(self, name: str) -> tuple[Path, int]:
        """The file that has a tensor which is stored whole, after a check of its bytes, and the byte it begins at."""

    def common_tensor(self, name: str) -> tuple[str, tuple[int, ...], bytearray]:
        """Dtype, shape and bytes, verified, of a tensor that is stored whole. Raises `UsageError` if there is none."""
        if name not in self.common_forms:
            raise UsageError(f"{self.path} has no tensor {name!r}")
        dtype, shape = self.common_forms[name]
        path, offset = self.common_place(name)
        return dtype, shape, read_part(path, offset, math.prod(shape) * ELEMENT_BYTES[dtype])

    @abstractmethod
    def extra_plain(self) -> dict[str, Any]:
        """The members of `extra.json`, as plain data, valid as FORMAT.md defines them."""

    @property
    def by_rank(self) -> list[Member]:
        """The members of `extra` that each of the manifest's `extra_ranks` gave for itself; None for all of it."""
        return list(ranks_in(self.extra_plain()["user"])) if self.manifest.extra_ranks else []

    def check_generators(self, plain: dict[str, Any]) -> None:
        """Raises `CheckpointError` unless generators' states have a row for each rank that `extra.json` lists."""
        for name, (dtype, shape) in self.common_forms.items():
            world = plain["rng"]["world"] if name.startswith(GENERATOR_PREFIX) else 0
            if world and (dtype != "uint8" or len(shape) != 2 or shape[0] != world):
                raise CheckpointError(
                    f"{self.path / self.manifest.common.name}: not valid: {name[:200]!r} is {dtype} {list(shape)}, "
                    f"expected uint8 [{world}, bytes]: a row for each rank of 'rng'"
                )

    def extra(self) -> dict[str, Any]:
        """The members of `extra.json`; "user" is the `extra` given to `save`, with `ByRank` where ranks' values differ.

        Tensors come as numpy arrays, torch's too; bfloat16 and float8 elements as float32, exactly.
        """
        tensors, where = Tensors(self, to_array), self.path / self.manifest.extra.name
        return {
            key: (decode_by_rank if key == "user" else decode)(value, tensors, f"{where}: {key}")
            for key, value in self.extra_plain().items()
        }


def to_array(content: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The elements as an array of `shape`; bfloat16 and float8, which numpy does not have, as float32, exactly.

    Packed ones, of four or six bits a number, come as their bytes: uint8 of `shape` and one more dimension.
    """
    import numpy as np

    if dtype == "bfloat16":
        flat = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype in SMALL:
        flat = values_of(dtype)[np.frombuffer(content, np.uint8)]
    elif dtype in PACKED:
        flat = np.frombuffer(content, np.uint8)
        shape = (*shape, ELEMENT_BYTES[dtype])
    elif dtype == "bool":
        flat = np.frombuffer(content, np.uint8) != 0
    else:
        flat = np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
    return flat.reshape(shape)


def scaled(codes: NDArray[Any], scales: NDArray[Any]) -> NDArray[Any]:
    """Codes, n as float32 in any shape, times the scale of the block that each is in [⌈n / 64⌉]."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):  # scales may be any numbers
        values: NDArray[Any] = codes * np.repeat(scales, BLOCK)[: codes.size].reshape(codes.shape)
    return values


class Tensors(Mapping[str, T]):
    """The tensors of a checkpoint's `common`, read on demand into separate memory.

    `make` makes them of their bytes, dtype and shape. Raises `CheckpointError` for a file that is damaged, before
    anything is read from it.
    """

    def __init__(self, source: Source, make: Callable[[bytearray, str, tuple[int, ...]], T]) -> None:
        self._source, self._make = source, make

    def __getitem__(self, name: str) -> T:
        if name not in self._source.common_forms:
            raise KeyError(name)
        dtype, shape, content = self._source.common_tensor(name)
        return self._make(content, dtype, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.common_forms)

    def __len__(self) -> int:
        return len(self._source.common_forms)


def from_array(values: NDArray[Any], dtype: str) -> memoryview:
    """The bytes of floating-point `values` as float64, float32, float16 or bfloat16, rounded to nearest, ties to even.

    Raises `OverflowError` if a finite value is too large for `dtype`.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):  # a signalling nan is as good as any
        if dtype == "bfloat16":
            bits = values.astype("<f4", copy=False).view("<u4")
            # Two maxima tell that nothing is near the largest finite value, infinite or nan.
            small = not bits.size or (bits.view("<i4").max() < _ROUNDS_UP and bits.max() < _ROUNDS_UP | _SIGN)
            # To nearest, ties to even; in place: this is most of the time that a conversion takes.
            upper = bits >> 16
            upper &= 1
            upper += 0x7FFF
            upper += bits
            codes = upper.view("<u2")[1::2].copy()
            if small:
                return codes.view(np.uint8).data
            codes[(bits & ~np.uint32(_SIGN)) > _INFINITE] = 0x7FC0  # adding may have made a zero of a nan
            infinite = (codes & 0x7FFF) == _INFINITE >> 16
        else:
            codes = values.astype(np.dtype(dtype).newbyteorder("<"))
            infinite = np.isinf(codes)
    lost = np.flatnonzero(infinite & np.isfinite(values))
    if lost.size:
        raise OverflowError(f"{values[lost[0]]:g} does not fit {dtype}")
    return codes.view(np.uint8).data


_SIGN, _INFINITE = 1 << 31, 0x7F800000
"""Bits of a float32."""

_ROUNDS_UP = 0x7F7F8000
"""The code of the smallest float32 that bfloat16 rounds to infinity."""
