"""Checkpoints without a training: numbers that do not compress."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

from tests.support.checkpoints import common_file, example_extra
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.manifest import COMMON_NAME, EXTRA_NAME, NAME, File, Manifest
from zerokit.checkpoint.safetensors import Extent, Stream, rank_file
from zerokit.layout import Parameter, Segment, build_layout

KINDS = ("master", "exp_avg", "exp_avg_sq")
_WIDTH = 1024
_SMALL_WIDTH = 64
"""The width of checkpoints that would have less than eight blocks otherwise."""


def make_checkpoint(path: Path, size_gb: float, world: int) -> None:
    """Write a step of a transformer's shapes and AdamW's streams, of `size_gb` 10^9 bytes."""
    numel = size_gb * 1e9 / 4 / len(KINDS)
    width = _WIDTH if numel > 8 * 11 * _WIDTH**2 else _SMALL_WIDTH
    shapes = ((3 * width, width), (3 * width,), (4 * width, width), (width, 4 * width), (width,))
    count = max(1, round(numel / sum(Parameter("", shape).numel for shape in shapes)))
    layout = build_layout(
        (
            Segment(f"b{i}", tuple(Parameter(f"b{i}.{n}", shape) for n, shape in enumerate(shapes)))
            for i in range(count)
        ),
        world=world,
        bucket_bytes=25 << 20,
    )
    noise = bytearray(random.Random(0).randbytes(8 << 20))
    noise[3::4] = b"\x3e" * (len(noise) // 4)  # numbers below 1: not every float fits bf16

    def data(extent: Extent) -> bytes:
        start = random.Random(extent.offset).randrange(1 << 18) * 4
        return bytes((noise * (extent.size // len(noise) + 2))[start : start + extent.size])

    streams = tuple(Stream(kind, "float32", tuple(range(len(layout.parameters)))) for kind in KINDS)
    path.mkdir(parents=True)
    files, crcs = [], {(stream, p): array("I") for stream in range(len(KINDS)) for p in streams[0].parameters}
    for rank in range(layout.world):
        file = rank_file(layout, streams, 1, rank)
        with (path / file.name).open("wb") as out:
            out.write(file.header)
            for extent in file.extents:
                content = data(extent)
                crcs[extent.stream, extent.position].append(crc32(content))
                out.write(content)
        files.append(File(file.name, file.size, len(file.header), crc32(file.header)))
    common, extra = common_file(()), json.dumps(example_extra(1, 1, user=None)).encode()
    for name, content in ((COMMON_NAME, common), (EXTRA_NAME, extra)):
        (path / name).write_bytes(content)
    manifest = Manifest(
        step=1,
        layout=layout,
        streams=streams,
        scalars=(),
        checksums=tuple(
            array("I", [crc for p in stream.parameters for crc in crcs[number, p]])
            for number, stream in enumerate(streams)
        ),
        files=tuple(files),
        common=File(COMMON_NAME, len(common), 0, crc32(common)),
        extra=File(EXTRA_NAME, len(extra), 0, crc32(extra)),
    )
    (path / NAME).write_bytes(manifest.to_bytes())
