"""Values of `extra.json`: what JSON breaks is written as objects with the member "$", which names the type.

    None, bool, str, list, int below 2^53, finite float     as they are
    dict of str without a key "$"                           object
    any other dict, Counter, OrderedDict                    {"$": "dict", "items": [[key, value], …]}
    tuple, set, frozenset                                   {"$": "tuple", "items": […]}
    larger int, inf and nan, bytes                          {"$": "int", "hex": "-0x…"}, {"$": "float", "value": "inf"},
                                                            {"$": "bytes", "base64": "…"}
    torch tensor, numpy array, numpy scalar                 {"$": "torch" | "array" | "scalar", "tensor": name}

Tensors lie in `common.safetensors`. Every type comes back as it was, or is refused: plain JSON turns the integer keys
of MultiStepLR into text, unnoticed. This module never imports torch or numpy; it knows their types by name.
"""

from __future__ import annotations

import base64
import math
import reprlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zerokit.checkpoint.extents import ELEMENT_BYTES
from zerokit.checkpoint.strict import canonical
from zerokit.errors import CheckpointError

MARKER = "$"
MAX_DEPTH = 64
"""Values that contain themselves end here, and readers in other languages need no deep stack."""

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
_NUMPY_HAS_NOT = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


def encode(value: Any, path: str = "extra") -> tuple[Any, dict[str, Any]]:
    """The value as plain JSON data, and the tensors and arrays it refers to, by their names: "path/keys/…".

    Raises `CheckpointError`, naming the path, for a value of any other type, text that is not valid Unicode, tensors
    that are not dense and of a dtype of the format, and nesting deeper than `MAX_DEPTH`.
    """
    encoder = _Encoder()
    return encoder.encode(value, path, path, 0), encoder.tensors


def decode(plain: Any, tensors: Mapping[str, Any], path: str = "extra") -> Any:
    """The value that `encode` was given. Raises `CheckpointError`, naming the path, for anything it cannot return.

    A torch tensor comes back as what `tensors` holds under its name; so does a numpy array, unless that is a torch
    tensor, which is turned into an array. No tensor is taken twice: a short text could ask for any amount of memory.
    """
    return _Decoder(tensors).decode(plain, _Location(None, path), 0)


def mapping(encoded: dict[str, Any]) -> dict[str, Any]:
    """A dict whose keys are text and whose items are encoded already, encoded."""
    return {MARKER: "dict", "items": list(map(list, encoded.items()))} if MARKER in encoded else encoded


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}

    def encode(self, value: Any, where: str, name: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{where}: nested more than {MAX_DEPTH} deep, or it contains itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _text(value, where)
        if kind is int:
            return value if abs(value) < _EXACT else {MARKER: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {MARKER: "float", "value": str(value)}
        if kind is bytes:
            return {MARKER: "bytes", "base64": base64.b64encode(value).decode()}
        if kind is list:
            return self._items(value, where, name, depth)
        if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
            items = self._items(value, where, name, depth)
            if kind is not tuple:
                items.sort(key=canonical)  # sets have no order; equal ones are written equally
            return {MARKER: kind.__name__, "items": items}
        if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
            return self._mapping(value, where, name, depth)
        if (kind.__module__, kind.__name__) == ("torch", "Tensor"):
            return self._torch(value, where, name)
        if _is_numpy(kind):
            return self._numpy(value, where, name)
        raise CheckpointError(
            f"{where}: {_described(kind)} cannot be written ({reprlib.repr(value)}): use numbers, text, bytes, lists, "
            "tuples, sets, dicts, tensors or arrays"
        )

    def _items(self, values: Iterable[Any], where: str, name: str, depth: int) -> list[Any]:
        return [
            self.encode(value, f"{where}[{number}]", f"{name}/{number}", depth + 1)
            for number, value in enumerate(values)
        ]

    def _mapping(self, value: Mapping[Any, Any], where: str, name: str, depth: int) -> dict[str, Any]:
        encoded = []
        for number, (key, item) in enumerate(value.items()):
            inner = f"{where}[{reprlib.repr(key)}]"
            part = str(key) if type(key) in (str, int) else str(number)
            encoded.append(
                [
                    self.encode(key, f"{inner} (its key)", f"{name}/{part}.key", depth + 1),
                    self.encode(item, inner, f"{name}/{part}", depth + 1),
                ]
            )
        if type(value) is dict and all(type(key) is str for key in value):
            return mapping(dict(encoded))
        return {MARKER: type(value).__name__, "items": encoded}

    def _torch(self, value: Any, where: str, name: str) -> dict[str, Any]:
        dtype = str(value.dtype).removeprefix("torch.")
        if str(value.layout) != "torch.strided" or value.is_meta or dtype not in ELEMENT_BYTES:
            raise CheckpointError(
                f"{where}: a {str(value.layout).removeprefix('torch.')} tensor of {dtype} on {value.device} cannot be "
                f"written, only dense ones of {', '.join(ELEMENT_BYTES)}"
            )
        return {MARKER: "torch", "tensor": self._add(name, value.detach())}

    def _numpy(self, value: Any, where: str, name: str) -> dict[str, Any]:
        dtype = str(value.dtype)
        if dtype not in ELEMENT_BYTES.keys() - _NUMPY_HAS_NOT:
            raise CheckpointError(f"{where}: numpy's {dtype} cannot be written: convert it")
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


@dataclass(frozen=True, slots=True)
class _Location:
    """The path of a value. It becomes text for an error only: a key may be as long as the file."""

    above: _Location | None
    part: object

    def __str__(self) -> str:
        parts = []
        location = self
        while location.above is not None:
            parts.append(f"[{reprlib.repr(location.part)}]")
            location = location.above
        return f"{location.part}{''.join(reversed(parts))}"


class _Decoder:
    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()

    def decode(self, plain: Any, where: _Location, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH:  # a level of ours may be two of JSON's
            raise CheckpointError(f"{where}: nested too deep")
        if isinstance(plain, list):
            return self._items(plain, where, depth)
        if not isinstance(plain, dict):
            return plain
        if MARKER not in plain:
            return {key: self.decode(item, _Location(where, key), depth + 1) for key, item in plain.items()}
        try:
            return self._typed_value(plain, where, depth)
        except (
            ValueError,
            TypeError,
            OverflowError,
        ) as error:  # TypeError: a key or member that cannot be hashed
            raise CheckpointError(
                f"{where}: {reprlib.repr(plain)} is no value of this format: {error}"
            ) from None

    def _items(self, items: list[Any], where: _Location, depth: int) -> list[Any]:
        return [self.decode(item, _Location(where, number), depth + 1) for number, item in enumerate(items)]

    def _typed_value(self, plain: dict[str, Any], where: _Location, depth: int) -> Any:
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
            if kind != "tuple":
                _require_spread(item[0] if kind in _MAPPINGS else item for item in decoded)
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


def _require_spread(keys: Iterable[Any]) -> None:
    """Raises `ValueError` where many have one hash: each would be compared with all others, for minutes."""
    most = max(Counter(map(hash, keys)).values(), default=0)
    if most > _MOST_ALIKE:
        raise ValueError(f"{most} keys or members have one hash, {_MOST_ALIKE} may")


def _mapping(kind: str, items: list[list[Any]]) -> dict[Any, Any]:
    result = _MAPPINGS[kind]()
    for key, value in items:
        result[key] = value
    return result


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{where}: {value!a} is not valid Unicode: write it as bytes") from None
    return value


def _is_numpy(kind: type) -> bool:
    return kind.__module__ == "numpy" and (
        kind.__name__ == "ndarray" or any(base.__name__ == "generic" for base in kind.__mro__)
    )


def _described(kind: type) -> str:
    return (
        "a function"
        if kind.__name__ in ("function", "method")
        else f"a {kind.__module__}.{kind.__qualname__}"
    )
