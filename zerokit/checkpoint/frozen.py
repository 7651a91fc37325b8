"""Frozen parameters apart from a step: what `save` writes of them, and how `load` recognises the model's own.

Their contents decide, by checksums of what this rank holds, so no change can go unnoticed, whoever made it. On a host
that takes a second for 16 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import torch

from zerokit.checkpoint.bases import base_name, frozen_in, holds
from zerokit.checkpoint.checksum import Part, Pieces, along, crc32
from zerokit.checkpoint.manifest import FROZEN, WEIGHT_KINDS, parse_manifest
from zerokit.checkpoint.matching import Match
from zerokit.checkpoint.prune import foreign_to_step
from zerokit.checkpoint.safetensors import Stream, rank_file
from zerokit.checkpoint.snapshot import Apart, Arguments, Rest, Slices
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.staged import contents, device_of, staging_for, through
from zerokit.checkpoint.staging import Staging
from zerokit.checkpoint.state import Held, dtype_name, kept_slices, own_slices
from zerokit.checkpoint.together import Together
from zerokit.checkpoint.writing import (
    Contents,
    contents_of,
    final_manifest,
    require_written,
    write_rank,
    write_rest,
)
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Interval, Layout
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.build import Runtime
from zerokit.runtime.homes import Elements, in_memory

Frozen = Literal["always", "once", "never"]
_NAMED = 5
"""Names that an error lists."""


def set_apart(
    optimizer: ZeroOptimizer, together: Together, frozen: Frozen, run: Callable[[], Path]
) -> Apart | None:
    """Where the frozen parameters of a save belong; None if into the step itself. Collective.

    `run` returns the run's directory, on rank 0. Raises `UsageError` for an unknown `frozen`, and `CheckpointError`.
    """
    if frozen not in get_args(Frozen):
        raise UsageError(f"frozen={frozen!r}: expected one of {', '.join(map(repr, get_args(Frozen)))}")
    units = [unit for unit in optimizer.runtime.units if not unit.unit.trainable]
    if frozen == "always" or not any(unit.unit.payload_numel for unit in units):
        return None
    held = [one for one in own_slices(optimizer.runtime, together.rank) if one.kind == FROZEN]
    checksums = _whole_checksums(optimizer.runtime, held, together)
    if frozen == "never":
        return Apart("", False, checksums)
    base = base_name(
        (p, dtype_name(unit.kept.tensor) if p.numel else p.dtype, checksums.get(p.name, 0))
        for unit in units
        for p in unit.unit.parameters
    )
    return Apart(base, together.on_first(lambda: not holds(run() / base)), checksums)


def _whole_checksums(
    runtime: Runtime, held: Iterable[Held], together: Together, dtypes: Mapping[str, str] | None = None
) -> dict[str, int]:
    """The CRC-32 of parameters of which ranks hold slices, by name; as elements of `dtypes`, if they are given."""

    def elements(one: Held) -> Elements:
        if dtypes is None:
            return one.tensor
        return in_memory(one.tensor).to(getattr(torch, dtypes[one.part.parameter.name]))

    def own() -> Pieces:
        pieces, wanted = Pieces(), list(held)
        with through(device_of(one.tensor for one in wanted), staging_for("checksums")) as staging:
            for number, content in chain.from_iterable(contents(map(elements, wanted), staging)):
                key = Part(0, wanted[number].position, wanted[number].part.interval.start)
                pieces.add(key, crc32(content), content.nbytes)
        return pieces

    pieces = Pieces.joined(together.exchange(together.each(own)))
    found = {}
    for number, position in pieces.parameters():
        parameter = runtime.layout.parameters[position]
        ((_, whole),) = along(pieces.parts(number, position), [Interval(0, parameter.numel)])
        found[parameter.name] = whole.crc
    return found


def write_base(
    together: Together,
    apart: Apart,
    arguments: Arguments,
    layout: Layout,
    streams: Sequence[Stream],
    slices: Slices,
) -> None:
    """Write the directory of a save's frozen parameters. Collective. Raises `CheckpointError`; there is none then."""
    frozen = [unit for unit in layout.units if not unit.trainable]
    own = replace(layout, units=tuple(replace(unit, index=index) for index, unit in enumerate(frozen)))
    places = {position: own.positions.get(p.name, -1) for position, p in enumerate(layout.parameters)}
    held = tuple(
        Stream(stream.kind, stream.dtype, tuple(places[position] for position in stream.parameters))
        for stream in streams
        if stream.kind == FROZEN
    )
    with ExitStack() as stack:
        begun: list[tuple[Staging, Contents]] = []

        def begin() -> Path:
            # Step 0 whenever it is written: it is what it is by its contents alone.
            save = replace(arguments, step=0, weights_only=True)
            contents = contents_of(save, own, held, (), Rest({"step": 0, "user": None}))
            staging = Staging(Path(arguments.run) / apart.base, force=True, foreign=foreign_to_step)
            stack.callback(staging.discard)
            begun.append((staging, contents))
            return staging.work

        work = together.on_first(begin)
        file = rank_file(own, held, 0, together.rank)
        written = together.exchange(together.each(lambda: write_rank(work, file, held, slices, own)))

        def finish() -> None:
            staging, contents = begun[0]
            require_written(work, written)
            content = final_manifest(contents, written)
            write_rest(work, contents.common, contents.extra, content)
            if frozen_in(parse_manifest(content, str(work))) != apart.base:
                raise CheckpointError(
                    f"{staging.target}: frozen parameters have changed while they were written: change weights when no "
                    "save is under way"
                )
            staging.commit()

        together.on_first(finish)


def require_same(
    checkpoint: Source,
    match: Match,
    optimizer: ZeroOptimizer,
    together: Together,
    *,
    strict: bool,
    weights_only: bool,
) -> None:
    """Compare the model's weights with the frozen parameters that the checkpoint names and does not have. Collective.

    Raises `CheckpointError` where they differ; with `strict=False` that is noted as left out.
    """
    manifest = checkpoint.manifest
    if manifest.frozen != "":
        return
    numbers = {position: number for (kind, position), number in manifest.numbers.items() if kind == FROZEN}
    wanted = {name: position for name, position in match.sources.items() if position in numbers}
    dtypes = {name: manifest.streams[numbers[position]].dtype for name, position in wanted.items()}
    held = [
        one
        for one in chain(
            own_slices(optimizer.runtime, together.rank, weights_only=weights_only),
            kept_slices(optimizer.runtime),
        )
        if one.kind in WEIGHT_KINDS and one.part.parameter.name in wanted
    ]
    actual = _whole_checksums(optimizer.runtime, held, together, dtypes)
    other = [
        name for name, crc in actual.items() if manifest.whole(numbers[wanted[name]], wanted[name]).crc != crc
    ]
    if not other:
        return
    more = f" and {len(other) - _NAMED} more" if len(other) > _NAMED else ""
    fault = f"{', '.join(other[:_NAMED])}{more}"
    if strict:
        raise CheckpointError(
            f"{checkpoint.path}: it was saved with frozen='never', so frozen parameters are the model's own, and they "
            f"are not those of the training that saved it: {fault}. Build the model with the weights that this "
            "training began with, or load what fits with strict=False"
        )
    match.left_out.append(f"frozen parameters with other values than in the training that saved it: {fault}")
