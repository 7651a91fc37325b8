"""Bytes of a rank's file that are elements of a tensor, written or read by `save` and `load`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zerokit.checkpoint.checksum import Piece, crc32
from zerokit.checkpoint.disk import read_exactly, write_exactly
from zerokit.checkpoint.plan import PieceKey
from zerokit.checkpoint.state import host_bytes, tensor_of

_BATCH_BYTES = 64 << 20
"""Neighbours go in one vectored call up to this size: what must be converted is staged in memory."""


@dataclass(frozen=True, slots=True)
class Request:
    """`size` bytes from byte `offset` of a file on are the elements of `tensor`, flat, stored as `dtype`."""

    key: PieceKey
    offset: int
    size: int
    tensor: Tensor
    dtype: str


def write(fd: int, requests: Iterable[Request], where: Path) -> list[int]:
    """Write them to an open file; returns their CRC-32s in the same order. Raises `CheckpointError`."""
    crcs = []
    for batch in _neighbours(requests):
        buffers = [host_bytes(request.tensor) for request in batch]
        assert [buffer.nbytes for buffer in buffers] == [request.size for request in batch]
        write_exactly(fd, buffers, batch[0].offset, where)
        crcs += [crc32(buffer) for buffer in buffers]
    return crcs


def read(fd: int, requests: Iterable[Request], where: Path) -> dict[PieceKey, Piece]:
    """Fill their tensors from an open file; returns the checksums of what was read. Raises `CheckpointError`."""
    pieces = {}
    for batch in _neighbours(sorted(requests, key=lambda request: request.offset)):
        buffers = [_buffer(request) for request in batch]
        read_exactly(fd, buffers, batch[0].offset, where)
        for request, buffer in zip(batch, buffers, strict=True):
            pieces[request.key] = Piece(crc32(buffer), request.size)
            if isinstance(buffer, bytearray):
                with torch.no_grad():
                    request.tensor.copy_(tensor_of(buffer, request.dtype, request.tensor.shape))
    return pieces


def _neighbours(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Runs of requests that follow each other in the file, for one call each."""
    batch: list[Request] = []
    for request in requests:
        end = batch[-1].offset + batch[-1].size if batch else request.offset
        if batch and (request.offset != end or end + request.size - batch[0].offset > _BATCH_BYTES):
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


def _buffer(request: Request) -> memoryview | bytearray:
    """The tensor's own memory where the bytes can go there as they are."""
    tensor = request.tensor
    if tensor.device.type == "cpu" and str(tensor.dtype) == f"torch.{request.dtype}":
        return host_bytes(tensor)
    return bytearray(request.size)
