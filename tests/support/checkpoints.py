"""Checkpoints written the plain way, for tests of what reads them: whole contents in memory, file by file."""

from __future__ import annotations

import json
import random
import subprocess
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerokit.checkpoint.manifest import COMMON_NAME, EXTRA_NAME, NAME, WEIGHT_KINDS, File, Manifest, Scalars
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Stream, lay_out, rank_file
from zerokit.layout import Layout, Parameter, Segment, build_layout
from zerokit.process import Process
from zerokit.skips import NONE_SKIPPED, Skips


@dataclass(frozen=True)
class Content:
    """A whole state: `values[kind, parameter]` are the bytes of one parameter in one stream."""

    step: int
    streams: tuple[Stream, ...]
    values: dict[tuple[str, str], bytes]
    scalars: tuple[Scalars, ...]
    common: tuple[tuple[str, str, tuple[int, ...], bytes], ...]
    """Name, dtype, shape and bytes of the tensors that are stored whole."""
    extra: object
    weights_only: bool = False
    skips: Skips = NONE_SKIPPED


def example_layout(world: int, *, bucket_bytes: int = 4096) -> Layout:
    """Units of blocks and the rest; tied, frozen, empty, 0-d and integer parameters, two groups."""
    segments = [
        Segment(None, (Parameter("tok.weight", (50, 24), aliases=("head.weight",)),)),
        *(
            Segment(
                f"blocks.{i}",
                (
                    Parameter(f"blocks.{i}.weight", (24, 40 + i)),
                    Parameter(f"blocks.{i}.bias", (40 + i,), group=1),
                    Parameter(f"blocks.{i}.base", (24, 7), dtype="bfloat16", trainable=False),
                    Parameter(f"blocks.{i}.empty", (0, 5)),
                ),
            )
            for i in range(4)
        ),
        Segment(
            None, (Parameter("gain", (), group=1), Parameter("table", (9,), dtype="int64", trainable=False))
        ),
    ]
    return build_layout(segments, world=world, bucket_bytes=bucket_bytes)


def example_content(layout: Layout, *, step: int = 100, seed: int = 0) -> Content:
    """Random bytes for an Adam-like optimizer; independent of the layout's world size."""
    line = list(layout.parameters)
    trainable = tuple(place for place, p in enumerate(line) if p.trainable)
    frozen: dict[str, list[int]] = {}
    for place, parameter in enumerate(line):
        if not parameter.trainable:
            frozen.setdefault(parameter.dtype, []).append(place)
    streams = [
        Stream(kind, "float32", trainable) for kind in ("master", "exp_avg", "exp_avg_sq") if trainable
    ]
    streams += [Stream("param", dtype, tuple(places)) for dtype, places in frozen.items()]
    streams.sort(key=lambda stream: stream.order)
    generator = random.Random(seed)
    values = {
        (stream.kind, line[place].name): generator.randbytes(line[place].numel * stream.element_bytes)
        for stream in streams
        for place in stream.parameters
    }
    scalars = (Scalars("step", "float32", (), trainable),) if trainable else ()
    common = [
        ("buffers/running_mean", "float32", (8,), generator.randbytes(32)),
        ("buffers/count", "int64", (), generator.randbytes(8)),
    ]
    if trainable:
        common.append(
            ("optimizer/step", "float32", (len(trainable),), generator.randbytes(4 * len(trainable)))
        )
    groups = 1 + max((p.group for p in line if p.trainable), default=0)
    return Content(step, tuple(streams), values, scalars, tuple(common), example_extra(step, groups))


def example_extra(step: int = 100, count: int = 2, **members: object) -> dict[str, object]:
    """An `extra.json` of a whole state of `count` groups; `members` take the place of its own."""
    return {
        "step": step,
        "user": {"note": "an example"},
        "groups": [{"lr": 0.1}] * count,
        "values": {},
        "scaler": None,
        "rng": {"world": 1, "seed": 0, "step": step},
        **members,
    }


def weights_of(content: Content) -> Content:
    """The same without the optimizer's state."""
    streams = tuple(stream for stream in content.streams if stream.kind in WEIGHT_KINDS)
    return replace(
        content,
        streams=streams,
        values={key: value for key, value in content.values.items() if key[0] in WEIGHT_KINDS},
        scalars=(),
        common=tuple(tensor for tensor in content.common if not tensor[0].startswith("optimizer/")),
        weights_only=True,
    )


def coded(content: Content, layout: Layout) -> Content:
    """The same, with moments in codes and scales: random bytes."""
    generator, line = random.Random(1), layout.parameters
    streams, values = [], dict(content.values)
    for stream in content.streams:
        if stream.kind not in ("exp_avg", "exp_avg_sq"):
            streams.append(stream)
            continue
        dtype = "float8_e4m3fn" if stream.kind == "exp_avg" else "float8_e5m2"
        scales = Stream(f"{stream.kind}.scale", "float32", stream.parameters, 64)
        streams += [replace(stream, dtype=dtype), scales]
        for position in stream.parameters:
            parameter = line[position]
            values[stream.kind, parameter.name] = generator.randbytes(parameter.numel)
            values[scales.kind, parameter.name] = generator.randbytes(4 * -(-parameter.numel // 64))
    ordered = tuple(sorted(streams, key=lambda stream: stream.order))
    return replace(content, streams=ordered, values=values)


def write_checkpoint(path: Path, layout: Layout, content: Content) -> Manifest:
    """Write the step directory `path`."""
    path.mkdir(parents=True)
    checksums: list[list[int]] = [[] for _ in content.streams]
    parts: dict[tuple[int, str, int], int] = {}
    files = []
    for rank in range(layout.world):
        file = rank_file(layout, content.streams, content.step, rank)
        body = bytearray()
        for extent in file.extents:
            stream = content.streams[extent.stream]
            name = layout.parameters[extent.position].name
            whole = content.values[stream.kind, name]
            piece = whole[
                extent.interval.start * stream.element_bytes : extent.interval.stop * stream.element_bytes
            ]
            assert len(file.header) + len(body) == extent.offset
            parts[extent.stream, name, rank] = zlib.crc32(piece)
            body += piece
        (path / file.name).write_bytes(file.header + body)
        files.append(File(file.name, len(file.header) + len(body), len(file.header), zlib.crc32(file.header)))
    line = [parameter.name for parameter in layout.parameters]
    for number, stream in enumerate(content.streams):
        for place in stream.parameters:
            checksums[number] += [parts[number, line[place], rank] for rank in layout.owners(place)]
    common = common_file(content.common)
    extra = json.dumps(content.extra).encode()
    (path / COMMON_NAME).write_bytes(common)
    (path / EXTRA_NAME).write_bytes(extra)
    manifest = Manifest(
        content.step,
        layout,
        content.streams,
        content.scalars,
        tuple(array("I", crcs) for crcs in checksums),
        tuple(files),
        File(COMMON_NAME, len(common), 0, zlib.crc32(common)),
        File(EXTRA_NAME, len(extra), 0, zlib.crc32(extra)),
        content.weights_only,
        skips=content.skips,
    )
    (path / NAME).write_bytes(manifest.to_bytes())
    return manifest


def common_file(tensors: Sequence[tuple[str, str, tuple[int, ...], bytes]]) -> bytes:
    """A safetensors file of whole tensors, wide elements first, then by name."""
    ordered = sorted(tensors, key=lambda t: (-ELEMENT_BYTES[t[1]], t[0]))
    header, _ = lay_out((tensor[:3] for tensor in ordered), {"format": "zerokit"})
    return header + b"".join(data for *_, data in ordered)


def sealed(manifest: dict[str, Any] | bytes) -> bytes:
    """A manifest's file with a right checksum, whatever is in it; as bytes, what follows the checksum's member."""
    if isinstance(manifest, dict):
        members = {key: value for key, value in manifest.items() if key != "crc32"}
        manifest = json.dumps(members).encode()[1:]
    return b'{"crc32":"%08x",' % zlib.crc32(manifest) + manifest


def with_extra(step: Path, change: dict[str, Any]) -> None:
    """Change members of `extra.json`; every checksum is right afterwards, that of a run's `latest` apart."""
    plain = json.loads((step / NAME).read_bytes())
    extra = json.loads((step / EXTRA_NAME).read_bytes()) | change
    content = json.dumps(extra).encode()
    (step / EXTRA_NAME).write_bytes(content)
    plain["extra"] |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (step / NAME).write_bytes(sealed(plain))


def write_run(run: Path, layout: Layout, content: Content) -> Path:
    """A run with one step and its `latest`; returns the step's directory."""
    step = run / f"step-{content.step:08d}"
    manifest = write_checkpoint(step, layout, content).to_bytes()
    (run / "latest").write_text(f"{step.name} {manifest[10:18].decode()}\n")
    return step


def flip(path: Path, place: int, bits: int = 1) -> bytes:
    """Change one byte of a file; returns what was there."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[place] ^= bits
    path.write_bytes(changed)
    return whole


def ended_process() -> Process:
    """A process that has been."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return replace(Process.current(), pid=ended.pid)


def leave_work(folder: Path, writer: Process, target: str = "out") -> Path:
    """What a killed writer leaves beside its target."""
    path = folder / f".{target}.tmp-{writer}.abcdef"
    path.mkdir()
    (path / "file").write_text("half")
    return path
