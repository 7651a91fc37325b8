"""JSON and TOML that somebody else has written: whatever is wrong with it is a `ValueError` of one short line.

The callers know the file, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MOST_BYTES = 1 << 28
"""zerokit's own documents are smaller by far; a device that never ends could be named as well."""
_DEEPEST = 64
"""Lists and objects in each other. A record of zerokit's has seven; a parser's stack ends at about a thousand."""


def read_text(path: Path) -> str:
    """The text of a file of at most `MOST_BYTES`. Raises `OSError`, or `ValueError` if it is larger or not UTF-8."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
    return content.decode()


def parse_json(text: str, deepest: int = _DEEPEST) -> Any:
    """The value of a JSON document, whose lists and objects are at most `deepest` in each other."""
    return _bounded(json.loads, text, deepest)


def parse_toml(text: str) -> dict[str, Any]:
    """The value of a TOML document, as `parse_json`."""
    import tomllib

    return _bounded(tomllib.loads, text, _DEEPEST)


def _bounded(parse: Callable[[str], T], text: str, deepest: int) -> T:
    try:
        value = parse(text)
        require_shallow(value, deepest)
    except RecursionError:
        raise ValueError("values are nested too deep") from None
    return value


def require_shallow(plain: object, deepest: int, stated: int | None = None) -> None:
    """Raises `ValueError` if lists and dicts are nested deeper than `deepest`; the message names `stated`, if given."""
    level, depth = [plain] if isinstance(plain, dict | list) else [], 0
    while level:
        depth += 1
        if depth > deepest:
            raise ValueError(f"values are nested more than {deepest if stated is None else stated} deep")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
