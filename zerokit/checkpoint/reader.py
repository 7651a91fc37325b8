"""`Checkpoint`: a checkpoint on disk, read without torch. Nothing is loaded but what is asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokit.checkpoint import header
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import LATEST_NAME, explained, opened, read_exactly
from zerokit.checkpoint.extents import RankFile, Stream, rank_file
from zerokit.checkpoint.extra import decode
from zerokit.checkpoint.manifest import NAME, File, Manifest, own_checksum, parse_manifest
from zerokit.checkpoint.strict import parse_json, typed
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BUFFER_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 28
"""Of the manifest and of `extra.json`, which are read whole: a damaged size must not take all memory."""

_LATEST = re.compile(rb"(step-\d{8,20}) ([0-9a-f]{8})\n(?:\1 ([0-9a-f]{8})\n)?")
"""Two lines while the step is being replaced: the new manifest's, then the old one's."""


class Checkpoint:
    """A step's directory, or a run's, whose `latest` is followed.

    The manifest is read and proven at once. Raises `CheckpointError` unless `path` holds one that is undamaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, stated = find_step(Path(path))
        content = read_whole(self.path / NAME)
        self.manifest: Manifest = parse_manifest(content, str(self.path / NAME))
        crc = own_checksum(content)
        assert crc is not None
        self.manifest_crc: int = crc
        self.run: Path | None = Path(path) if stated else None
        """The run's directory, where `path` was one."""
        if stated:
            check_latest(Path(path) / LATEST_NAME, self, stated)
        self._rank_files: dict[int, RankFile] = {}
        self._crcs: dict[int, dict[str, list[tuple[int, int]]]] = {}

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

    def read(self, stream: str, name: str) -> NDArray[Any]:
        """A whole parameter in one stream, such as `read("master", "blocks.0.weight")`, as an array of its shape.

        Only its bytes are read, and they are proven. bfloat16 and float8 elements, which numpy does not have, come as
        float32, exactly. Raises `UsageError` for a stream or name that is not there, `CheckpointError` for damage.
        """
        from zerokit.checkpoint.arrays import to_array

        number, first = self.find(stream, name)
        found = self.streams[number]
        slices = self.slice_checksums(number)[first]
        for rank, _ in slices:  # before memory is taken that the files may not justify
            with self._opened(rank):
                pass
        whole = bytearray(self.layout.find(first)[1].interval.numel * found.element_bytes)
        for rank, crc in slices:
            file = self.rank_file(rank)
            extent = file.by_place[number, first]
            start = extent.interval.start * found.element_bytes
            part = memoryview(whole)[start : start + extent.size]
            path = self.path / file.name
            with self._opened(rank) as fd:
                read_exactly(fd, [part], extent.offset, path)
            if crc32(part) != crc:
                raise CheckpointError(
                    f"{path}: {stream}/{first}, elements {extent.interval.start} to {extent.interval.stop}: damaged "
                    f"(CRC-32 {crc32(part):08x}, expected {crc:08x}): take another checkpoint"
                )
        return to_array(whole, found.dtype, self.shapes[first])

    def find(self, stream: str, name: str) -> tuple[int, str]:
        """The number of the stream of that kind which holds the parameter, and the parameter's first name.

        Raises `UsageError` where there is no such stream or parameter.
        """
        first = self._first_names.get(name)
        if first is None:
            raise UsageError(f"{self.path} has no parameter {name!r}: see `zerokit inspect`")
        place = self._places[first]
        held = {s.kind: number for number, s in enumerate(self.streams) if place in self._held[number]}
        if stream not in held:
            raise UsageError(
                f"{self.path} has no stream {stream!r} of {name!r}, only {', '.join(map(repr, held))}"
            )
        return held[stream], first

    def slice_checksums(self, stream: int) -> dict[str, list[tuple[int, int]]]:
        """`(rank, CRC-32)` of every slice of the stream with that number, in rank order, by parameter."""
        if stream not in self._crcs:
            self._crcs[stream] = dict(self.manifest.slice_checksums(stream))
        return self._crcs[stream]

    def rank_file(self, rank: int) -> RankFile:
        """A rank's file as it must be. Raises `CheckpointError` if the manifest states another one."""
        if rank not in self._rank_files:
            file = rank_file(self.layout, self.streams, self.step, rank)
            stated = self.manifest.files[rank]
            computed = File(file.name, file.size, len(file.header), crc32(file.header))
            if stated != computed:
                raise CheckpointError(
                    f"{self.path / NAME}: describes {file.name} as {_summary(stated)}, but by its layout that file has "
                    f"{_summary(computed)}: the manifest was not written by zerokit, or changed since"
                )
            self._rank_files[rank] = file
        return self._rank_files[rank]

    @contextmanager
    def open_rank(self, rank: int) -> Iterator[int]:
        """The descriptor of a rank's file, whose size and header are as they must be.

        Raises `CheckpointError`, naming the file, if it is missing, of another size or of another header.
        """
        file = self.rank_file(rank)
        with self._opened(rank) as fd:
            check_header(fd, file, self.path / file.name)
            yield fd

    @contextmanager
    def _opened(self, rank: int) -> Iterator[int]:
        """The descriptor of a rank's file, whose size is as it must be."""
        file = self.rank_file(rank)
        path = self.path / file.name
        with opened(path) as fd:
            check_size(fd, file.size, path)
            yield fd

    @cached_property
    def common(self) -> header.Header:
        """The header of `common.safetensors`; the whole file is proven once.

        Raises `CheckpointError` if it is missing, damaged or no safetensors file.
        """
        stated = self.manifest.common
        path = self.path / stated.name
        with opened(path) as fd:
            check_size(fd, stated.size, path)
            found = file_checksum(fd, stated.size, path)
            if found != stated.crc:
                raise _damaged(path, found, stated.crc)
            return read_header(fd, stated.size, path)

    @property
    def common_names(self) -> Collection[str]:
        """The names of the tensors that are stored whole: "buffers/…", "optimizer/…" and others."""
        return self.common.tensors.keys()

    def common_tensor(self, name: str) -> tuple[str, tuple[int, ...], bytearray]:
        """Dtype, shape and bytes of a tensor that is stored whole. Raises `UsageError` if there is none."""
        tensor = self.common.tensors.get(name)
        if tensor is None:
            raise UsageError(f"{self.path / self.manifest.common.name} has no tensor {name!r}")
        path = self.path / self.manifest.common.name
        content = bytearray(tensor.size)
        with opened(path) as fd:
            read_exactly(fd, [content], tensor.offset, path)
        return tensor.dtype, tensor.shape, content

    def extra_plain(self) -> dict[str, Any]:
        """The members of `extra.json`, as plain data. Raises `CheckpointError` if it is missing or damaged."""
        stated = self.manifest.extra
        path = self.path / stated.name
        content = read_whole(path, stated.size)
        if crc32(content) != stated.crc:
            raise _damaged(path, crc32(content), stated.crc)
        try:
            return typed(parse_json(content), dict, stated.name)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not valid: {error}") from None

    def extra(self) -> dict[str, Any]:
        """The members of `extra.json`: "user" is what `save` was given.

        Tensors come as numpy arrays, torch's too; bfloat16 and float8 elements as float32, exactly.
        """
        where = str(self.path / self.manifest.extra.name)
        tensors = _Arrays(self)
        return {key: decode(value, tensors, f"{where}: {key}") for key, value in self.extra_plain().items()}

    @cached_property
    def _first_names(self) -> dict[str, str]:
        return {name: p.name for p in self.layout.parameters for name in (p.name, *p.aliases)}

    @cached_property
    def _places(self) -> dict[str, int]:
        return {parameter.name: place for place, parameter in enumerate(self.layout.parameters)}

    @cached_property
    def _held(self) -> list[frozenset[int]]:
        return [frozenset(stream.parameters) for stream in self.streams]


class _Arrays(Mapping[str, "np.ndarray[Any, Any]"]):
    """The tensors of `common`, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> NDArray[Any]:
        from zerokit.checkpoint.arrays import to_array

        if name not in self._checkpoint.common_names:
            raise KeyError(name)
        dtype, shape, content = self._checkpoint.common_tensor(name)
        return to_array(content, dtype, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.common_names)

    def __len__(self) -> int:
        return len(self._checkpoint.common_names)


def find_step(path: Path) -> tuple[Path, tuple[int, ...]]:
    """The step's directory that `path` names or whose run it names, then with the CRC-32s that `latest` states.

    There are two of them where a step was being replaced, and both its manifests are right. Raises `CheckpointError` if
    `path` is neither.
    """
    with explained(path, "opened"):
        return _find_step(path)


def _find_step(path: Path) -> tuple[Path, tuple[int, ...]]:
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: {what}: give the directory of a step, or of a run")
    if (path / NAME).exists():
        return path, ()
    latest = path / LATEST_NAME
    if not os.path.lexists(latest):
        steps = sorted(entry.parent.name for entry in path.glob(f"step-*/{NAME}"))
        hint = f": name one of its steps, such as {path / steps[-1]}" if steps else ""
        raise CheckpointError(f"{path}: no checkpoint: it has neither {NAME} nor {LATEST_NAME}{hint}")
    found = _LATEST.fullmatch(read_whole(latest, limit=1024))
    if found is None:
        raise CheckpointError(f"{latest}: damaged: expected 'step-######## ' and eight hexadecimal digits")
    step = path / found[1].decode()
    stated = tuple(int(crc, 16) for crc in found.groups()[1:] if crc)
    if (step / NAME).exists():
        return step, stated
    aside = _put_aside(step, stated)
    if aside is None:
        raise CheckpointError(
            f"{latest}: points to {step.name}, which has no {NAME}: name another step of {path}"
        )
    return aside, stated


def _put_aside(step: Path, stated: tuple[int, ...]) -> Path | None:
    """Where a whole version of the step lies, if the writer was killed between the two renames that replace it.

    That is where the file system cannot exchange directories. `latest` states both manifests by then.
    """
    whole = {}
    for manifest in sorted(step.parent.glob(f".{step.name}.tmp-*/{NAME}")):
        crc = own_checksum(read_whole(manifest))
        if crc is not None:
            whole[crc] = manifest.parent
    return next((whole[crc] for crc in stated if crc in whole), None)


def check_latest(latest: Path, checkpoint: Checkpoint, stated: tuple[int, ...]) -> None:
    """Raises `CheckpointError` unless the manifest is a `stated` one and its step is what its directory is called."""
    if checkpoint.manifest_crc not in stated:
        told = " or ".join(f"{crc:08x}" for crc in stated)
        raise CheckpointError(
            f"{latest}: states the manifest {told}, {checkpoint.path.name} has {checkpoint.manifest_crc:08x}: "
            "one of the two is damaged or from another run; name the step itself to read it all the same"
        )
    name = f"step-{checkpoint.step:08d}"
    if checkpoint.path.name != name and not checkpoint.path.name.startswith(f".{name}.tmp-"):
        raise CheckpointError(f"{checkpoint.path / NAME}: describes step {checkpoint.step}")


def read_whole(path: Path, size: int | None = None, *, limit: int = MAX_TEXT_BYTES) -> bytes:
    """A small file's contents, which must be `size` bytes if given, and not more than `limit`.

    Raises `CheckpointError`, naming the file.
    """
    with opened(path) as fd:
        found = os.fstat(fd).st_size
        if size is not None:
            check_size(fd, size, path)
        if found > limit:
            raise CheckpointError(f"{path}: {found} bytes, more than the {limit} that it may have")
        content = bytearray(found)
        read_exactly(fd, [content], 0, path)
    return bytes(content)


def check_size(fd: int, size: int, path: Path) -> None:
    """Raises `CheckpointError` unless the open file has `size` bytes."""
    found = os.fstat(fd).st_size
    if found != size:
        raise CheckpointError(
            f"{path}: {'truncated' if found < size else 'too long'}: {found} bytes, expected {size}"
        )


def check_header(fd: int, file: RankFile, path: Path) -> None:
    """Raises `CheckpointError` unless the open file begins with the header that it must have."""
    found = bytearray(len(file.header))
    read_exactly(fd, [found], 0, path)
    if found == file.header:
        return
    first = next(place for place, (a, b) in enumerate(zip(found, file.header, strict=True)) if a != b)
    reason = f"differs from byte {first} on"
    try:
        metadata = header.parse_header(bytes(found), file.size, str(path)).metadata
    except CheckpointError:
        pass
    else:  # a whole header: of another step, perhaps
        expected = header.parse_header(file.header, file.size, str(path)).metadata
        if strange := [
            f"{key} {metadata.get(key)!r}, not {expected[key]!r}"
            for key in expected
            if metadata.get(key) != expected[key]
        ]:
            reason = f"is of another checkpoint ({', '.join(strange)})"
    raise CheckpointError(f"{path}: its header is damaged or foreign: it {reason}")


def read_header(fd: int, size: int, path: Path) -> header.Header:
    """The header of an open safetensors file of `size` bytes. Raises `CheckpointError`."""
    first = bytearray(min(header.LENGTH_BYTES, size))
    read_exactly(fd, [first], 0, path)
    content = bytearray(header.header_size(bytes(first), size, str(path)))
    read_exactly(fd, [content], 0, path)
    return header.parse_header(bytes(content), size, str(path))


def file_checksum(fd: int, size: int, path: Path) -> int:
    """The CRC-32 of the first `size` bytes of an open file. Raises `CheckpointError` if it has fewer."""
    buffer = memoryview(bytearray(min(BUFFER_BYTES, size)))
    crc = 0
    for start in range(0, size, BUFFER_BYTES):
        part = buffer[: min(BUFFER_BYTES, size - start)]
        read_exactly(fd, [part], start, path)
        crc = crc32(part, crc)
    return crc


def _damaged(path: Path, found: int, stated: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: damaged (CRC-32 {found:08x}, expected {stated:08x}): take another checkpoint"
    )


def _summary(file: File) -> str:
    return f"{file.size} bytes with a header of {file.header_size} ({file.crc:08x})"
