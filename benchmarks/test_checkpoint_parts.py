"""Parts of a checkpoint's way one by one: the manifest, checksums, what a rank has to read, a copied file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.elsewhere import InTurns, elsewhere
from benchmarks.measuring import empty, remove
from benchmarks.synthetic import make_checkpoint
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.copying import Copier
from zerokit.checkpoint.manifest import NAME, parse_manifest
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.requests import Memory, Request, requests_for

RANKS, READERS, SIZE_GB = 64, 48, 0.02
"""Ranks that saved the small tensors whose description is measured, and ranks that load them."""
BYTES = 16 << 20
"""The size of the memory whose checksum is taken."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of many ranks and few bytes."""
    path = tmp_path_factory.mktemp("wide") / "step-00000001"
    make_checkpoint(path, SIZE_GB, RANKS)
    return Checkpoint(path)


@pytest.fixture(scope="module")
def dcp(wide: Checkpoint) -> Metadata:
    """The same tensors as DCP describes them, each cut by its rows, as FSDP2 does."""
    tensors, places = {}, {}
    for stream in wide.streams:
        for position in stream.parameters:
            parameter = wide.layout.parameters[position]
            name = f"{stream.kind}.{parameter.name}"
            chunks = _chunks(parameter.shape, RANKS)
            size, properties = torch.Size(parameter.shape), TensorProperties(torch.float32)
            tensors[name] = TensorStorageMetadata(properties, size, list(chunks.values()))
            for rank, chunk in chunks.items():
                index = MetadataIndex(name, chunk.offsets, rank)
                places[index] = _StorageInfo(f"__{rank}_0.distcp", 0, 4 * chunk.sizes.numel())
    return Metadata(dict(tensors), storage_data=places)


def _chunks(shape: tuple[int, ...], ranks: int) -> dict[int, ChunkStorageMetadata]:
    """The rows of each rank that has some."""
    rows = -(-shape[0] // ranks)
    offsets = torch.Size([0] * (len(shape) - 1))
    return {
        rank: ChunkStorageMetadata(
            torch.Size([start, *offsets]), torch.Size([min(rows, shape[0] - start), *shape[1:]])
        )
        for rank, start in enumerate(range(0, shape[0], rows))
    }


@pytest.mark.benchmark(group=f"manifest of {RANKS} ranks: read", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit", "json.loads", "DCP, pickle.loads"])
def test_manifest_read(in_turns: InTurns, wide: Checkpoint, dcp: Metadata, how: str) -> None:
    content, pickled = (wide.path / NAME).read_bytes(), pickle.dumps(dcp)
    calls: dict[str, Callable[[], object]] = {
        "zerokit": lambda: parse_manifest(content, NAME),
        "json.loads": lambda: json.loads(content),
        "DCP, pickle.loads": lambda: pickle.loads(pickled),
    }
    in_turns(how, calls)


@pytest.mark.benchmark(group=f"manifest of {RANKS} ranks: write", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit", "json.dumps", "DCP, pickle.dumps"])
def test_manifest_write(in_turns: InTurns, wide: Checkpoint, dcp: Metadata, how: str) -> None:
    plain = json.loads((wide.path / NAME).read_bytes())
    calls: dict[str, Callable[[], object]] = {
        "zerokit": wide.manifest.to_bytes,
        "json.dumps": lambda: json.dumps(plain),
        "DCP, pickle.dumps": lambda: pickle.dumps(dcp),
    }
    in_turns(how, calls)


@pytest.mark.benchmark(
    group=f"plan: what one of {READERS} ranks reads of a checkpoint of {RANKS}", timer=elsewhere
)
@pytest.mark.parametrize("how", ["zerokit", "DCP"])
def test_plan(in_turns: InTurns, wide: Checkpoint, dcp: Metadata, how: str) -> None:
    target, rank = Memory(0), READERS // 2
    layout = wide.layout.for_world(READERS)

    def zerokit() -> list[Request]:
        return [
            request
            for position, interval in layout.owned(rank)
            for stream in range(len(wide.streams))
            for request in requests_for(wide, stream, position, interval, target, 0)
        ]

    wanted = [
        (name, tensor, [chunk])
        for name, tensor in dcp.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
        and (chunk := _chunks(tuple(tensor.size), READERS).get(rank)) is not None
    ]

    def by_dcp() -> list[object]:
        return list(chain.from_iterable(create_read_items_for_chunk_list(*one) for one in wanted))

    in_turns(how, {"zerokit": zerokit, "DCP": by_dcp})
    assert zerokit()
    assert by_dcp()


@pytest.mark.benchmark(group=f"checksum: CRC-32 of {BYTES >> 20} MiB", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit", "zlib.crc32"])
def test_checksum(in_turns: InTurns, how: str) -> None:
    content = bytes(range(256)) * (BYTES // 256)
    in_turns(how, {"zerokit": lambda: crc32(content), "zlib.crc32": lambda: zlib.crc32(content)})
    assert crc32(content) == zlib.crc32(content)


@pytest.mark.benchmark(group="copy: a file, to the disk", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit, with CRC-32", "cp and sync", "shutil.copyfile and fsync"])
def test_copy(in_turns: InTurns, checkpoint: Checkpoint, tmp_path: Path, how: str) -> None:
    source, target = checkpoint.file_path(0), tmp_path / "copy"
    size = source.stat().st_size

    def zerokit() -> None:
        with Copier(total=size) as copier:
            file = copier.target(target, size)
            copier.copy(checkpoint, [Request("file", source, 0, size, file, 0)])
            copier.release(file)

    def by_cp() -> None:
        subprocess.run(["cp", source, target], check=True)
        os.sync()

    def by_shutil() -> None:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())

    calls = {"zerokit, with CRC-32": zerokit, "cp and sync": by_cp, "shutil.copyfile and fsync": by_shutil}
    in_turns(how, calls, lambda name: empty(target))
    remove(target)
    calls[how]()
    assert target.read_bytes() == source.read_bytes()
