"""A checkpoint cut for another number of ranks: byte ranges copied, no tensor decoded.

Ranges are the common refinement of the old cuts and the new ones. Their checksums combine to those of the old slices,
which verifies what was read, and to those of the new ones, which the new manifest states; no byte is read twice for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from zerokit.checkpoint.checksum import Pieces, along, crc32
from zerokit.checkpoint.copying import Options, converting
from zerokit.checkpoint.disk import make_directory, sync_directory, write_exactly, write_file
from zerokit.checkpoint.extents import rank_file
from zerokit.checkpoint.manifest import COMMON_NAME, EXTRA_NAME, NAME, File, Manifest, own_checksum
from zerokit.checkpoint.prune import foreign_to_checkpoint
from zerokit.checkpoint.requests import Request, requests_for
from zerokit.checkpoint.run import LATEST_NAME, Latest, step_name
from zerokit.checkpoint.source import Source
from zerokit.layout import Layout


def write_cut(source: Source, world: int, target: Path, options: Options) -> Path:
    """Write any source in zerokit's format, cut for `world` ranks: a step, or a run of one step.

    Returns the step's directory. Raises as `convert` does.
    """
    layout = source.layout.for_world(world)
    with converting(source, target, options, foreign_to_checkpoint) as work:
        if source.run is None:
            _write(source, layout, work, options)
            return target
        name = step_name(source.step)
        make_directory(work / name)
        crc = own_checksum(_write(source, layout, work / name, options))
        assert crc is not None
        sync_directory(work / name)
        write_file(work / LATEST_NAME, Latest(name, (crc,)).text().encode())
    return target / name


def _write(source: Source, layout: Layout, step: Path, options: Options) -> bytes:
    """Everything of a step, in the directory `step`; returns its manifest."""
    manifest = source.manifest
    source.check_files()
    described, wholes = [], {}
    with options.copying(source) as copier:
        for rank in range(layout.world):
            file = rank_file(layout, manifest.streams, manifest.step, rank)
            described.append(File(file.name, file.size, len(file.header), crc32(file.header)))
            target = copier.target(step / file.name, file.size)
            write_exactly(target.fd, [file.header], 0, target.path)
            requests = (
                requests_for(source, extent.stream, extent.position, extent.interval, target, extent.offset)
                for extent in file.extents
            )
            copier.copy(source, chain.from_iterable(requests))
            copier.release(target)
        for whole, content in source.whole_files():
            wholes[whole.name] = whole
            if content is not None:
                write_file(step / whole.name, content)
                continue
            target = copier.target(step / whole.name, whole.size)
            copier.copy(source, [Request(whole.name, source.path / whole.name, 0, whole.size, target, 0)])
            copier.release(target)
    content = replace(
        manifest,
        layout=layout,
        checksums=tuple(_recombined(manifest, layout, copier.pieces)),
        files=tuple(described),
        common=wholes[COMMON_NAME],
        extra=wholes[EXTRA_NAME],
    ).to_bytes()
    write_file(step / NAME, content)
    return content


def _recombined(manifest: Manifest, layout: Layout, pieces: Pieces) -> Iterator[array[int]]:
    """By stream the checksums of the new slices, from those of the pieces."""
    for number, stream in enumerate(manifest.streams):
        crcs = array("I")
        for position in stream.parameters:
            cuts = [cut for _, cut, _ in layout.cuts(position)]
            for cut, piece in along(pieces.parts(number, position), cuts):
                assert piece.size == cut.numel * stream.element_bytes
                crcs.append(piece.crc)
        yield crcs
