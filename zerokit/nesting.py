"""The nesting depth of plain data. Hostile JSON can be as deep as the parser's stack, and exceed other code's."""

from __future__ import annotations


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
