"""Checkpoints without a training: numbers that do not compress."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.checkpoints import Content, example_extra, write_checkpoint
from zerokit.checkpoint.safetensors import Stream
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
    sizes = {parameter.name: 4 * parameter.numel for parameter in layout.parameters}
    noise = bytearray(random.Random(0).randbytes(8 << 20))
    noise[3::4] = b"\x3e" * (len(noise) // 4)  # numbers below 1: not every float fits bf16

    class Values(dict[tuple[str, str], bytes]):
        """Made when they are asked for: all of them may be more than the memory."""

        def __missing__(self, key: tuple[str, str]) -> bytes:
            start, size = random.Random(repr(key)).randrange(1 << 18) * 4, sizes[key[1]]
            return bytes((noise * (size // len(noise) + 2))[start : start + size])

    streams = tuple(Stream(kind, "float32", tuple(range(len(layout.parameters)))) for kind in KINDS)
    extra = example_extra(1, 1, user=None)
    write_checkpoint(path, layout, Content(1, streams, Values(), scalars=(), common=(), extra=extra))
