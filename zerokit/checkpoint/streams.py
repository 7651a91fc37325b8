"""The streams of a manifest together: their order, what must be in one, and codes with their scales."""

from __future__ import annotations

from itertools import pairwise

from zerokit.checkpoint.safetensors import Stream
from zerokit.layout import Layout
from zerokit.sizes import FP8_BLOCK

SCALES = ".scale"
"""The scales of the codes in a stream are in a stream that is called as theirs, and so on."""

BLOCK = FP8_BLOCK
"""Elements that share a scale: every slice of a parameter begins at a multiple of it."""

CODES = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of codes."""

_WEIGHTS = ("master", "param")


def check_streams(layout: Layout, streams: list[Stream]) -> None:
    """Raise `ValueError` unless these streams hold each parameter as they must, and codes have their scales."""
    if any(a.order >= b.order for a, b in pairwise(streams)):
        raise ValueError(
            "streams are not in order: wide elements first, then master, then by name, each once"
        )
    trainable = [parameter.trainable for parameter in layout.parameters]
    seen: set[tuple[str, int]] = set()
    for stream in streams:
        if not stream.kind or "/" in stream.kind:
            raise ValueError(f"a stream cannot be called {stream.kind[:200]!r}")
        for position in stream.parameters:
            if trainable[position] == (stream.kind == "param"):
                raise ValueError(
                    f"stream {stream.kind[:200]!r} holds parameter {position}, which is "
                    f"{'trainable' if trainable[position] else 'frozen'}"
                )
            if (stream.kind, position) in seen:
                raise ValueError(f"parameter {position} is in two streams of kind {stream.kind[:200]!r}")
            seen.add((stream.kind, position))
    for stream in streams:
        if stream.block != 1:
            _check_scales(stream)
    if any(stream.block != 1 for stream in streams):
        _check_codes(streams)
    for position, trains in enumerate(trainable):
        if ("master" if trains else "param", position) not in seen:
            raise ValueError(f"parameter {position} is in no {'master' if trains else 'param'} stream")


def _check_scales(scales: Stream) -> None:
    kind = scales.kind.removesuffix(SCALES)
    if scales.block != BLOCK or scales.dtype != "float32" or kind in (scales.kind, *_WEIGHTS):
        raise ValueError(
            f"stream {scales.kind[:200]!r} of {scales.dtype} has an element for each {scales.block} of its parameters, "
            f"which only scales of states have: of float32, for each {BLOCK}, and called by a kind and {SCALES!r}"
        )


def _check_codes(streams: list[Stream]) -> None:
    """Beside scales, all codes have some, and all scales codes."""
    coded = {
        (s.kind, p) for s in streams if s.dtype in CODES and s.kind not in _WEIGHTS for p in s.parameters
    }
    scaled = {(s.kind.removesuffix(SCALES), p) for s in streams if s.block != 1 for p in s.parameters}
    for kind, position in sorted(coded ^ scaled):
        lacks = "has codes without scales" if (kind, position) in coded else "has scales of no codes"
        raise ValueError(f"{kind[:200]!r} of parameter {position} {lacks}")
