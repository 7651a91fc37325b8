"""Dataclasses to JSON and back, strictly, with pydantic: an invalid field is refused by name.

The types of the fields are the one definition. pydantic is imported when something is read, so that no command waits
for it to show its help.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from annotated_types import Ge, Le

from zerokit.documents import parse_json
from zerokit.errors import ZerokitError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

Integer = Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]
"""Arithmetic with floats does not overflow, and other languages read it."""
Count = Annotated[int, Ge(0), Le(2**63 - 1)]
"""What a bench counts: never less than none."""
Number = Annotated[float, Ge(-1e100), Le(1e100)]
"""Finite, and sums, squares and ratios do not overflow."""


class SchemaError(ValueError):
    """A value does not match its dataclass; the message starts with its path."""


def to_plain(value: Any) -> Any:
    """The value as plain data for `json.dumps(allow_nan=False)`; numbers that are not finite become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_plain(kind: type[T], value: Any, *, others: Literal["forbid", "ignore"] = "forbid") -> T:
    """The instance of `kind` (a dataclass) from which `to_plain` made `value`.

    Raises `SchemaError` for a field that is unknown, mistyped or out of its range, or missing without a default; with
    `others="ignore"` unknown ones are left out.
    """
    from pydantic import ValidationError

    try:
        found: T = _adapter(cast(Any, kind)).validate_json(json.dumps(value), strict=True, extra=others)
    except ValidationError as error:
        raise SchemaError(_first(error, kind.__name__)) from error
    return found


def parse(kind: type[T], text: str, what: str, fault: type[ZerokitError], check: Callable[[T], None]) -> T:
    """The instance of `kind`, a dataclass with a `format`, whose JSON this is.

    Raises `fault` with a text that says why it is not `what`, naming the first invalid field; `check` raises
    `ValueError` for values that contradict each other.
    """
    (expected,) = (field.default for field in fields(cast(Any, kind)) if field.name == "format")
    try:
        value = parse_json(text)
        if "\\u" in text:  # an escape may be half of a surrogate pair, which cannot be written again
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise fault(f"not a {what}: {error}") from error
    found = value.get("format") if isinstance(value, dict) else None
    if found != expected:
        raise fault(f"not a {what} that this version reads: format {found!r:.60}, expected {expected!r}")
    try:
        made = from_plain(kind, value)
        check(made)
    except (ValueError, ZerokitError) as error:
        raise fault(f"malformed {what}: {error}") from error
    return made


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _first(error: Any, kind: str) -> str:
    """The first fault in words: its path, what was expected, and what was found."""
    fault = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    if fault["type"] == "missing":
        return f"{path}: missing"
    if fault["type"] == "unexpected_keyword_argument":
        return f"{path}: no such field"
    found, limits = fault["input"], fault.get("ctx", {})
    shown = repr(found) if isinstance(found, bool | int | float | str) else type(found).__name__
    expected = fault["msg"].replace("Input should be", "expected").replace("valid array", "list")
    for name, words in (("ge", "at least"), ("le", "at most")):
        expected = f"expected {words} {limits[name]:g}" if name in limits else expected
    return f"{path or kind}: {expected}, found {shown[:60]}"
