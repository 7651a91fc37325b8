"""Valid JSON changed a little: what a reader of untrusted files must survive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 70),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=4),
        st.sampled_from(["float32", "bfloat16", "master", "param", "0123abcd", "gain"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def mutated(plain: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """A copy in which one to three members or elements are replaced, removed, doubled or moved by a little."""
    changed = copy.deepcopy(plain)
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = changed
        while place:
            key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
            if isinstance(place[key], dict | list) and data.draw(st.integers(0, 5)):
                place = place[key]
                continue
            action = data.draw(st.integers(0, 3))
            if action == 0:
                del place[key]
            elif action == 1 and isinstance(place, list):
                place.insert(key, copy.deepcopy(place[key]))
            elif action == 2 and type(place[key]) is int:
                place[key] += data.draw(st.integers(-2, 2))
            else:
                place[key] = data.draw(JSON)
            break
    return changed


def put(*path: str | int, value: Any) -> Callable[[Any], None]:
    """A change: this value at that place of plain JSON."""

    def change(plain: Any) -> None:
        for key in path[:-1]:
            plain = plain[key]
        plain[path[-1]] = value

    return change
