"""Dataclasses to JSON and back, strictly: a record with a wrong field is refused and the field named.

Understands dataclasses, enums of strings, lists, tuples of one type, dicts with string keys, unions with None, JSON's
scalars; `json_schema` says the same in JSON Schema.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar, get_args, get_origin

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest integer: arithmetic with floats does not overflow, and other languages read it."""

LARGEST_FLOAT = 1e100
"""The largest number with a point: sums, squares and ratios do not overflow."""

_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string"}


class SchemaError(ValueError):
    """A value does not have the form that its dataclass promises; the message starts with its path."""


def to_plain(value: Any) -> Any:
    """What `json.dumps(allow_nan=False)` takes. Numbers that are not finite become None: JSON has none."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_plain(kind: type[T], value: Any, path: str = "") -> T:
    """The `kind` (a dataclass) that `to_plain` turned into `value`.

    Raises `SchemaError` for a field that is unknown or mistyped, or missing without a default.
    """
    if not isinstance(value, Mapping):
        raise SchemaError(f"{path or kind.__name__}: expected an object, found {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # kind is a dataclass
    if unknown := sorted(set(value) - set(known)):
        raise SchemaError(f"{_join(path, unknown[0])}: not a field of {kind.__name__}")
    taken = {}
    for name, field in known.items():
        if name in value:
            taken[name] = _convert(hints[name], value[name], _join(path, name))
        elif field.default is MISSING and field.default_factory is MISSING:
            raise SchemaError(f"{_join(path, name)}: missing")
    return kind(**taken)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, parameters = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(next(one for one in parameters if one is not type(None)), value, path)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise SchemaError(f"{path}: expected a list, found {type(value).__name__}")
        return origin(
            _convert(parameters[0], item, f"{path}[{position}]") for position, item in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise SchemaError(f"{path}: expected an object, found {type(value).__name__}")
        return {key: _convert(parameters[1], item, _join(path, key)) for key, item in value.items()}
    if inspect.isclass(hint) and issubclass(hint, StrEnum):
        if value not in list(hint):
            raise SchemaError(f"{path}: expected one of {', '.join(hint)}, found {value!r}")
        return hint(value)
    if is_dataclass(hint):
        return from_plain(typing.cast(type[Any], hint), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= LARGEST else math.inf
    if isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"{path}: expected a finite number, found {value}")
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
        raise SchemaError(f"{path}: expected a number of at most {LARGEST_FLOAT:g}, found {value:g}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise SchemaError(f"{path}: expected an integer of at most 64 bits")
    if hint is not Any and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        raise SchemaError(f"{path}: expected {hint.__name__}, found {type(value).__name__}")
    return value


def json_schema(kind: type[Any], name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what `to_plain` makes of a `kind`, a dataclass; `name` becomes its `$id`.

    Every dataclass is a definition with its docstring as description. A field's `metadata["schema"]` is added to its
    schema: what a type cannot say, such as the values of an enumeration. Fields with a default may be absent.
    """
    definitions: dict[str, Any] = {}
    _define(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": name,
        "$ref": f"#/$defs/{kind.__name__}",
        "$defs": dict(sorted(definitions.items())),
    }


def _define(kind: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A reference to the definition of a dataclass, which is made where it is missing."""
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # holds the name, should a dataclass contain itself
        hints, own = typing.get_type_hints(kind), fields(kind)
        definitions[kind.__name__] = {
            "description": inspect.cleandoc(kind.__doc__ or ""),
            "type": "object",
            "properties": {
                field.name: _schema(hints[field.name], definitions) | dict(field.metadata.get("schema", {}))
                for field in own
            },
            "required": [
                field.name for field in own if field.default is MISSING and field.default_factory is MISSING
            ],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, parameters = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        choices = [_schema(one, definitions) for one in parameters]
        if all(set(one) == {"type"} for one in choices):
            return {"type": [one["type"] for one in choices]}
        return {"anyOf": choices}
    if origin in (list, tuple):
        return {"type": "array", "items": _schema(parameters[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(parameters[1], definitions)}
    if is_dataclass(hint):
        return _define(typing.cast(type[Any], hint), definitions)
    if inspect.isclass(hint) and issubclass(hint, StrEnum):
        return {"type": "string", "enum": [one.value for one in hint]}
    if hint is type(None):
        return {"type": "null"}
    return {} if hint is Any else {"type": _SCALARS[hint]}
