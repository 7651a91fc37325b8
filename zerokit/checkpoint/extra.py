"""`extra.json`: its members and their values. Values that JSON lacks are objects with their type in "$".

    None, bool, str, list, int below 2^53, finite float     as they are
    dict of str without a key "$"                           object
    any other dict, Counter, OrderedDict                    {"$": "dict", "items": [[key, value], …]}
    tuple, set, frozenset                                   {"$": "tuple", "items": […]}
    larger int, inf and nan, bytes                          {"$": "int", "hex": "-0x…"}, {"$": "float", "value": "inf"},
                                                            {"$": "bytes", "base64": "…"}
    torch tensor, numpy array, numpy scalar                 {"$": "torch" | "array" | "scalar", "tensor": name}
    a member of `user` that ranks gave different values     {"$": "ranks", "items": […]}: see `by_rank`

Members are checked encoded, so that tools which never decode them refuse the same files as `load` does.
Tensors lie in `common.safetensors`. Every type comes back as it was, or is refused: plain JSON turns the integer keys
of MultiStepLR into text, unnoticed. This module never imports torch or numpy; it knows their types by name.
"""

from __future__ import annotations

import base64
import math
import reprlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from zerokit.checkpoint.manifest import MAX_STEP, MAX_WORLD, Manifest
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.checkpoint.small_floats import PACKED, SMALL
from zerokit.checkpoint.strict import bounded, canonical, member, members, parse_json, typed, within
from zerokit.documents import require_shallow
from zerokit.errors import CheckpointError

MARKER = "$"
RANKS = "ranks"
"""The type of what has a value for each rank: `user`, or a member of it."""

MAX_DEPTH = 64
"""Values that contain themselves end here, and readers in other languages need no deep stack."""

GENERATOR_PREFIX = "rng/"
"""Names of generators' states in `common` begin so."""

LOCAL_STEPS = "local_steps"
"""The member that has the state of `zerokit.LocalSteps`, where there was one."""

_LIVE_OPTIONS = ("params", "param_names")
"""The members of a group, which are those of the running program."""

_DEEPEST = 3 * (MAX_DEPTH + 2)
"""JSON's levels: an encoded mapping takes three."""

_EXACT = 1 << 53
"""Readers that keep numbers as doubles are exact below it."""

_MOST_ALIKE = 1 << 10
"""Keys of one hash. Integers that differ by a multiple of 2^61 - 1 share one; ordinary data has no such keys."""

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_LEAVES = {
    "int": "hex",
    "float": "value",
    "bytes": "base64",
    "torch": "tensor",
    "array": "tensor",
    "scalar": "tensor",
}
_NUMPY_HAS_NOT = {"bfloat16", *SMALL, *PACKED}


def encode(
    value: Any, path: str = "extra", tensors: dict[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The value as plain JSON data, and the tensors and arrays it refers to, by their names: "path/keys/…".

    They are added to `tensors`, if given, under other names than those that are there.

    Raises `CheckpointError`, naming the path, for a value of any other type, text that is not valid Unicode, tensors
    that are not dense and of a dtype of the format, and nesting deeper than `MAX_DEPTH`.
    """
    encoder = _Encoder({} if tensors is None else tensors)
    return encoder.encode(value, path, 0), encoder.tensors


def decode(plain: Any, tensors: Mapping[str, Any], path: str = "extra") -> Any:
    """The value that `encode` was given. Raises `CheckpointError`, naming the path, for invalid data.

    A torch tensor comes back as what `tensors` holds under its name; so does a numpy array, unless that is a torch
    tensor, which is turned into an array. No tensor is taken twice: a short text could ask for any amount of memory.
    """
    return _Decoder(tensors).decode(plain, (path,), 0)


def mapping(encoded: dict[str, Any]) -> dict[str, Any]:
    """Encode a dict with text keys and already encoded items."""
    return {MARKER: "dict", "items": list(map(list, encoded.items()))} if MARKER in encoded else encoded


class _Encoder:
    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def encode(self, value: Any, name: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{name}: nested more than {MAX_DEPTH} deep, or it contains itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _text(value, name)
        if kind is int:
            return value if abs(value) < _EXACT else {MARKER: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {MARKER: "float", "value": str(value)}
        if kind is bytes:
            return {MARKER: "bytes", "base64": base64.b64encode(value).decode()}
        if kind is list:
            return self._items(value, name, depth)
        if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
            items = self._items(value, name, depth)
            if kind is not tuple:
                items.sort(key=canonical)  # sets have no order; equal ones are written equally
            return {MARKER: kind.__name__, "items": items}
        if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
            return self._mapping(value, name, depth)
        if (kind.__module__, kind.__name__) == ("torch", "Tensor"):
            return self._torch(value, name)
        if kind.__module__ == "numpy" and {"ndarray", "generic"} & {base.__name__ for base in kind.__mro__}:
            return self._numpy(value, name)
        raise CheckpointError(
            f"{name}: a {kind.__module__}.{kind.__qualname__} cannot be written ({reprlib.repr(value)}): use numbers, "
            "text, bytes, lists, tuples, sets, dicts, tensors or arrays"
        )

    def _items(self, values: Iterable[Any], name: str, depth: int) -> list[Any]:
        return [self.encode(value, f"{name}/{number}", depth + 1) for number, value in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], name: str, depth: int) -> dict[str, Any]:
        encoded = []
        for number, (key, item) in enumerate(value.items()):
            inner = f"{name}/{key if type(key) in (str, int) else number}"
            encoded.append([self.encode(key, f"{inner}.key", depth + 1), self.encode(item, inner, depth + 1)])
        if type(value) is dict and all(type(key) is str for key in value):
            return mapping(dict(encoded))
        return {MARKER: type(value).__name__, "items": encoded}

    def _torch(self, value: Any, name: str) -> dict[str, Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        if str(value.layout) != "torch.strided" or value.is_meta or dtype not in ELEMENT_BYTES:
            raise CheckpointError(
                f"{name}: a {str(value.layout).removeprefix('torch.')} tensor of {dtype} on {value.device} cannot be "
                f"written, only dense ones of {', '.join(ELEMENT_BYTES)}"
            )
        return {MARKER: "torch", "tensor": self._add(name, value.detach())}

    def _numpy(self, value: Any, name: str) -> dict[str, Any]:
        dtype = str(value.dtype)
        if dtype not in ELEMENT_BYTES.keys() - _NUMPY_HAS_NOT:
            raise CheckpointError(f"{name}: numpy's {dtype} cannot be written: convert it")
        is_array = type(value).__name__ == "ndarray"
        # A copy, in C order, since not every reader of arrays takes negative strides or memory that is read-only.
        array = value.copy(order="C") if is_array else value.reshape(1).reshape(())
        return {MARKER: "array" if is_array else "scalar", "tensor": self._add(name, array)}

    def _add(self, name: str, value: Any) -> str:
        """Names must be unique: {"a/b": …} and {"a": {"b": …}} would clash."""
        unique, number = name, 1
        while unique in self.tensors:
            number += 1
            unique = f"{name}~{number}"
        self.tensors[unique] = value
        return unique


_Place = tuple[object, ...]
"""Where a value is. It becomes text for an error only: a key may be as long as the file."""


def _text_of(place: _Place) -> str:
    return f"{place[0]}{''.join(f'[{reprlib.repr(part)}]' for part in place[1:])}"


class _Decoder:
    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()

    def decode(self, plain: Any, where: _Place, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH:  # a level of ours may be two of JSON's
            raise CheckpointError(f"{_text_of(where)}: nested too deep")
        if isinstance(plain, list):
            return self._items(plain, where, depth)
        if not isinstance(plain, dict):
            return plain
        if MARKER not in plain:
            return {key: self.decode(item, (*where, key), depth + 1) for key, item in plain.items()}
        try:
            return self._typed_value(plain, where, depth)
        except (ValueError, TypeError, OverflowError) as error:  # TypeError: what cannot be hashed as a key
            raise CheckpointError(
                f"{_text_of(where)}: {reprlib.repr(plain)} is not a value of this format: {error}"
            ) from None

    def _items(self, items: list[Any], where: _Place, depth: int) -> list[Any]:
        return [self.decode(item, (*where, number), depth + 1) for number, item in enumerate(items)]

    def _typed_value(self, plain: dict[str, Any], where: _Place, depth: int) -> Any:
        kind = plain[MARKER]
        if len(plain) != 2 or not isinstance(kind, str):
            raise ValueError("expected two members")
        if kind in _MAPPINGS or kind in _SEQUENCES:
            items = plain["items"] if isinstance(plain.get("items"), list) else None
            if items is None:
                raise ValueError("expected a list 'items'")
            decoded = self._items(items, where, depth)
            if kind in _MAPPINGS and not all(isinstance(item, list) and len(item) == 2 for item in decoded):
                raise ValueError("expected [key, value] pairs")
            hashed = [] if kind == "tuple" else [item[0] if kind in _MAPPINGS else item for item in decoded]
            alike = max(Counter(map(hash, hashed)).values(), default=0)
            if alike > _MOST_ALIKE:  # each would be compared with all others, for minutes
                raise ValueError(f"{alike} keys or members have one hash, {_MOST_ALIKE} may")
            result = _mapping(kind, decoded) if kind in _MAPPINGS else _SEQUENCES[kind](decoded)
            if len(result) != len(decoded):
                raise ValueError("the same key or member twice")
            return result
        return self._leaf(kind, plain)

    def _leaf(self, kind: str, plain: dict[str, Any]) -> Any:
        member = _LEAVES.get(kind)
        text = plain.get(member) if member else None
        if not isinstance(text, str):
            raise ValueError(f"type {kind[:20]!r} is unknown, or it has no text {member!r}")
        if kind == "int":
            value = int(text, 16)
            if hex(value) != text:
                raise ValueError("expected lower-case hexadecimal digits after 0x")
            return value
        if kind == "float":
            if text not in ("inf", "-inf", "nan"):
                raise ValueError("expected inf, -inf or nan")
            return float(text)
        if kind == "bytes":
            return base64.b64decode(text, validate=True)
        if text not in self._tensors:
            raise ValueError("there is no such tensor")
        if text in self._taken:
            raise ValueError("the same tensor twice")
        self._taken.add(text)
        value = self._tensors[text]
        if kind != "torch" and type(value).__module__ == "torch":
            value = value.numpy()
        return value[()] if kind == "scalar" else value


def _mapping(kind: str, items: list[list[Any]]) -> dict[Any, Any]:
    result = _MAPPINGS[kind]()
    for key, value in items:
        result[key] = value
    return result


def _text(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{ascii(name)[1:-1]}: {value!a} is not valid Unicode: write it as bytes"
        ) from None
    return value


def parse_members(content: bytes, manifest: Manifest, where: str) -> dict[str, Any]:
    """The members of `extra.json`. Raises `CheckpointError`, naming `where`, unless they are valid."""
    try:
        plain = typed(parse_json(content), dict, manifest.extra.name)
        _check_members(plain, manifest)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid: {error}") from None
    return plain


def _check_members(plain: dict[str, Any], manifest: Manifest) -> None:
    require_shallow(plain, _DEEPEST, stated=MAX_DEPTH)
    step = bounded(plain, "step", 0, MAX_STEP)
    if step != manifest.step:
        raise ValueError(f"'step' is {step}, but the manifest's is {manifest.step}")
    for name, items in ranks_in(member(plain, "user", object)).items():
        if len(items) != manifest.extra_ranks:
            which = "" if name is None else f" in {name[:60]!r}"
            raise ValueError(
                f"'user'{which} has values of {len(items)} ranks, the manifest says {manifest.extra_ranks}"
            )
    if manifest.weights_only:
        return
    _check_groups(plain, manifest)
    _check_values(plain, manifest)
    if member(plain, "scaler", object) is not None:
        scaler = member(plain, "scaler", dict)
        with within("'scaler'"):
            _check_scale(member(scaler, "value", str))
            bounded(scaler, "good_steps", 0)
    generators = member(plain, "rng", dict)
    with within("'rng'"):
        bounded(generators, "world", 1, MAX_WORLD)
        bounded(generators, "seed", 0, (1 << 64) - 1)
        bounded(generators, "step", 0)


def ranks_in(plain: Any) -> dict[str | None, list[Any]]:
    """The members of an encoded `user` that have a value for each rank, encoded; the whole of it as None.

    Raises `ValueError` where that is no list.
    """
    found: dict[str | None, list[Any]] = {}
    for name, item in [(None, plain), *pairs_of(plain)]:
        if isinstance(item, dict) and item.get(MARKER) == RANKS:
            found[name] = members(item, "items", object)
            if len(item) != 2:
                raise ValueError(f"{str(item)[:60]} has other members than 'items'")
    return found


def pairs_of(plain: Any) -> list[tuple[str, Any]]:
    """Keys and encoded items of an encoded mapping with text keys alone; none of anything else."""
    if not isinstance(plain, dict):
        return []
    if MARKER not in plain:
        return list(plain.items())
    items = plain.get("items") if plain[MARKER] == "dict" else None
    pairs = [tuple(pair) for pair in items if isinstance(pair, list)] if isinstance(items, list) else []
    text = all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
    return pairs if text and len(pairs) == len(items or ()) else []


def _check_groups(plain: dict[str, Any], manifest: Manifest) -> None:
    groups = member(plain, "groups", list)
    needed = 1 + max((p.group for p in manifest.layout.parameters if p.trainable), default=-1)
    if len(groups) < needed:
        raise ValueError(f"'groups' has {len(groups)} elements, expected one for each of {needed} groups")
    for number, group in enumerate(groups):
        what = f"'groups'[{number}]"
        options = _text_mapping(group, what)
        for key in _LIVE_OPTIONS:
            if key in options:
                raise ValueError(f"{what} has the member {key!r}, which only the running program may set")


def _check_values(plain: dict[str, Any], manifest: Manifest) -> None:
    scalars = {(held.kind, position) for held in manifest.scalars for position in held.parameters}
    scalars.update((kind, one.position) for one in manifest.uncut for kind in one.kinds)
    for kind, values in _text_mapping(member(plain, "values", object), "'values'").items():
        what = f"'values'[{kind[:60]!r}]"
        for name in _text_mapping(values, what):
            position = manifest.layout.positions.get(name)
            if position is None:
                raise ValueError(f"{what} belongs to {name[:200]!r}, which is not a parameter")
            if (kind, position) in scalars or (kind, position) in manifest.numbers:
                raise ValueError(f"{what} is of parameter {position}, which also has tensors of that kind")


def _check_scale(text: str) -> None:
    value = math.nan
    with suppress(ValueError, OverflowError):
        value = float.fromhex(text) if "0x" in text else math.nan
    if not 0.0 < value < math.inf:
        raise ValueError(f"'value' is {text[:60]!r}, expected a hexadecimal number over 0, such as 0x1p+16")


def _text_mapping(value: Any, what: str) -> dict[str, Any]:
    """The members of an encoded mapping whose keys are text, still encoded."""
    mapping = typed(value, dict, what)
    if MARKER not in mapping:
        return mapping
    if mapping[MARKER] not in ("dict", "OrderedDict") or len(mapping) != 2:
        raise ValueError(f"{what} is {str(mapping)[:60]}, expected a mapping")
    pairs = members(mapping, "items", list)
    if not all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError(f"{what} has a key that is not text")
    return dict(pairs)
