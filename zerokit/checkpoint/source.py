"""`Source`: a checkpoint to read from, in whichever format: what it holds, and where each element lies in its files.

`Checkpoint` is zerokit's own format, `formats.ForeignCheckpoint` any other. Those who copy or load bytes need no more
than this class, and neither torch nor the framework that wrote the files.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokit.checkpoint.checksum import Piece
from zerokit.checkpoint.extents import Stream
from zerokit.checkpoint.extra import decode
from zerokit.checkpoint.manifest import File, Manifest
from zerokit.checkpoint.plan import PieceKey
from zerokit.errors import ZerokitWarning
from zerokit.layout import Interval, Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements `interval` of a flattened parameter, one after the other from byte `offset` of file `file` on."""

    file: int
    interval: Interval
    offset: int


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """A buffer of the model, whole: `size` bytes from byte `offset` of the file at `path` on."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int


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
        """Show the notes as a `ZerokitWarning`, for callers that cannot return them."""
        if self.notes:
            warnings.warn("; ".join(self.notes), ZerokitWarning, stacklevel=3)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def world(self) -> int:
        """How many ranks wrote it, or it was cut for."""
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
        """The parameters, in the order of the line."""
        return list(self.shapes)

    @abstractmethod
    def locate(self, stream: int, name: str, interval: Interval) -> Iterator[Stretch]:
        """Where the elements `interval` of a flattened parameter lie in one stream, in order."""

    @abstractmethod
    def file_path(self, file: int) -> Path:
        """The path of the file with that number."""

    @abstractmethod
    def open_file(self, file: int) -> AbstractContextManager[int]:
        """The descriptor of that file, which is the one that was described."""

    @abstractmethod
    def check_files(self) -> None:
        """Raises `CheckpointError` unless every file is there and is the one that was described."""

    @abstractmethod
    def faults(self, by_rank: Sequence[Mapping[PieceKey, Piece]]) -> list[str]:
        """What is wrong with the bytes that the ranks have read (their pieces `by_rank`); empty if all is well."""

    @property
    @abstractmethod
    def data_size(self) -> int:
        """Bytes that a copy of the whole reads."""

    @abstractmethod
    def held_files(self) -> list[tuple[str, int]]:
        """Every file's name and size in bytes."""

    @abstractmethod
    def checksums(self, stream: int) -> Iterator[tuple[str, Piece]]:
        """Each parameter's name in one stream and the checksum of its elements; data is read where none is stated."""

    @abstractmethod
    def whole_files(self) -> Iterator[tuple[File, bytes | None]]:
        """The files that are not cut, `common` and `extra`; their contents where they are not on the disk."""

    @property
    @abstractmethod
    def buffers(self) -> dict[str, StoredBuffer]:
        """The model's persistent buffers, by their names."""

    @property
    @abstractmethod
    def common_forms(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor that is stored whole, by its name: "buffers/…", "optimizer/…" and others."""

    @property
    def common_names(self) -> Collection[str]:
        """The names of the tensors that are stored whole."""
        return self.common_forms.keys()

    @abstractmethod
    def common_tensor(self, name: str) -> tuple[str, tuple[int, ...], bytearray]:
        """Dtype, shape and bytes of a tensor that is stored whole. Raises `UsageError` if there is none."""

    @abstractmethod
    def extra_plain(self) -> dict[str, Any]:
        """The members of `extra.json`, as plain data, valid as FORMAT.md defines them."""

    @abstractmethod
    def check_generators(self, plain: dict[str, Any]) -> None:
        """Raises `CheckpointError` unless the states of the generators that `extra.json` lists are there."""

    def extra(self) -> dict[str, Any]:
        """The members of `extra.json`: "user" is what `save` was given.

        Tensors come as numpy arrays, torch's too; bfloat16 and float8 elements as float32, exactly.
        """
        tensors = _Arrays(self)
        where = f"{self.path / self.manifest.extra.name}"
        return {key: decode(value, tensors, f"{where}: {key}") for key, value in self.extra_plain().items()}


class _Arrays(Mapping[str, "np.ndarray[Any, Any]"]):
    """The tensors of `common`, read when they are asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, name: str) -> NDArray[Any]:
        from zerokit.checkpoint.arrays import to_array

        if name not in self._source.common_names:
            raise KeyError(name)
        dtype, shape, content = self._source.common_tensor(name)
        return to_array(content, dtype, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.common_names)

    def __len__(self) -> int:
        return len(self._source.common_names)
