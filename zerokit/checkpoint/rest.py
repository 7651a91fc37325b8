"""The members of `extra.json`: what a training goes on with beside its streams, each as FORMAT.md defines it.

Values stay encoded here, so that tools which never decode them refuse the same files as `load` does.
"""

from __future__ import annotations

import math
from typing import Any

from zerokit.checkpoint.extra import MARKER, MAX_DEPTH
from zerokit.checkpoint.header import Header
from zerokit.checkpoint.manifest import MAX_STEP, MAX_WORLD, Manifest
from zerokit.checkpoint.strict import bounded, member, members, parse_json, typed
from zerokit.errors import CheckpointError
from zerokit.nesting import require_shallow

GENERATOR_PREFIX = "rng/"
"""Names of generators' states in `common` begin so."""

_LIVE_OPTIONS = ("params", "param_names")
"""The members of a group, which are those of the running program."""

_DEEPEST = 3 * (MAX_DEPTH + 2)
"""JSON's levels: an encoded mapping takes three."""


def parse_rest(content: bytes, manifest: Manifest, where: str) -> dict[str, Any]:
    """The members of `extra.json`. Raises `CheckpointError`, naming `where`, unless they are valid."""
    try:
        plain = typed(parse_json(content), dict, manifest.extra.name)
        _check_rest(plain, manifest)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid: {error}") from None
    return plain


def _check_rest(plain: dict[str, Any], manifest: Manifest) -> None:
    """Raises `ValueError`, naming the member of `extra.json`, unless all are there and of their kinds."""
    require_shallow(plain, _DEEPEST, stated=MAX_DEPTH)
    step = bounded(plain, "step", 0, MAX_STEP)
    if step != manifest.step:
        raise ValueError(f"'step' is {step}, but the manifest's is {manifest.step}")
    if "user" not in plain:
        raise ValueError("'user' is missing")
    if not manifest.weights_only:
        _check_groups(plain, manifest)
        _check_values(plain, manifest)
        _check_scaler(plain)
        generators = member(plain, "rng", dict)
        try:
            bounded(generators, "world", 1, MAX_WORLD)
            bounded(generators, "seed", 0, (1 << 64) - 1)
            bounded(generators, "step", 0)
        except ValueError as error:
            raise ValueError(f"'rng': {error}") from None


def check_generators(plain: dict[str, Any], common: Header) -> None:
    """Raises `ValueError` unless the states in `common` have a row for each rank that `rng` lists."""
    world = plain["rng"]["world"]
    for name, tensor in common.tensors.items():
        if name.startswith(GENERATOR_PREFIX) and (
            tensor.dtype != "uint8" or len(tensor.shape) != 2 or tensor.shape[0] != world
        ):
            raise ValueError(
                f"{name[:200]!r} is {tensor.dtype} {list(tensor.shape)}, expected uint8 [{world}, bytes]: a row for "
                "each rank of 'rng'"
            )


def _check_groups(plain: dict[str, Any], manifest: Manifest) -> None:
    groups = member(plain, "groups", list)
    needed = 1 + max((p.group for p in manifest.layout.line if p.trainable), default=-1)
    if len(groups) < needed:
        raise ValueError(f"'groups' has {len(groups)} elements, expected one for each of {needed} groups")
    for number, group in enumerate(groups):
        what = f"'groups'[{number}]"
        options = _mapping(group, what)
        for key in _LIVE_OPTIONS:
            if key in options:
                raise ValueError(f"{what} has the member {key!r}, which belongs to the running program")


def _check_values(plain: dict[str, Any], manifest: Manifest) -> None:
    if "values" not in plain:
        raise ValueError("'values' is missing")
    for kind, values in _mapping(plain["values"], "'values'").items():
        what = f"'values'[{kind[:60]!r}]"
        positions = set()
        for name in _mapping(values, what):
            if name not in manifest.layout.positions:
                raise ValueError(f"{what} is of {name[:200]!r}, which is no parameter")
            positions.add(manifest.layout.positions[name])
        tensors = [(held.kind, held.parameters) for held in manifest.streams]
        tensors += [(held.kind, held.parameters) for held in manifest.scalars]
        for other, parameters in tensors:
            if other == kind and (both := positions.intersection(parameters)):
                raise ValueError(
                    f"{what} is of parameter {min(both)}, of which there are tensors of that kind"
                )


def _check_scaler(plain: dict[str, Any]) -> None:
    if "scaler" not in plain:
        raise ValueError("'scaler' is missing")
    if plain["scaler"] is None:
        return
    scaler = typed(plain["scaler"], dict, "'scaler'")
    try:
        text = member(scaler, "value", str)
        if not 0.0 < _hexadecimal(text) < math.inf:
            raise ValueError(
                f"'value' is {text[:60]!r}, expected a hexadecimal number over 0, such as 0x1p+16"
            )
        bounded(scaler, "good_steps", 0)
    except ValueError as error:
        raise ValueError(f"'scaler': {error}") from None


def _hexadecimal(text: str) -> float:
    """The number; NaN where there is none, which is in no range."""
    try:
        return float.fromhex(text) if "0x" in text else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _mapping(value: Any, what: str) -> dict[str, Any]:
    """The members of an encoded mapping whose keys are text, still encoded."""
    mapping = typed(value, dict, what)
    if MARKER not in mapping:
        return mapping
    if mapping[MARKER] not in ("dict", "OrderedDict") or len(mapping) != 2:
        raise ValueError(f"{what} is {str(mapping)[:60]}, expected a mapping")
    pairs = members(mapping, "items", list)
    if not all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError(f"{what} has a key that is no text")
    return dict(pairs)
