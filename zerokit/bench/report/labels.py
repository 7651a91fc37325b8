"""How much room labels take, and where beside their points they have it: arithmetic in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEIGHT = 270
"""The height of a picture with two axes."""
BESIDE, NAME = 112.0, 150.0
"""Labels up to the first width stand beside their bars, longer ones above; names in a plot are cut at the second."""


def text_width(text: str) -> float:
    """About how wide a text of 12 pixels will be."""
    return 6.84 * len(text)


def lines_of(name: str) -> list[str]:
    """A long name with each of its parts on a line of its own."""
    return name.split(" · ") if text_width(name) > BESIDE else [name]


def place_labels(
    rows: Sequence[dict[str, Any]],
    tries: Sequence[tuple[float, float, str]],
    area: tuple[list[float], list[float], float, float],
) -> list[dict[str, Any]]:
    """Labels beside their points, the first of `tries` where nothing else is; none where there is no free place.

    Only in the margin, beside a point at the right edge, is a label further away still known to be that point's.
    Places are looked for at the narrowest width: at any other, points are further apart and the labels no longer.
    `area` has both axes' domains, the pixels across, and those that are free beside.
    """
    xs, ys, width, room = area

    def pixels(row: dict[str, Any]) -> tuple[float, float]:
        right = (row["x"] - xs[0]) / ((xs[1] - xs[0]) or 1.0)
        return right * width, (ys[1] - row["y"]) / (ys[1] - ys[0]) * HEIGHT

    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in map(pixels, rows)]
    found = []
    for row in rows:
        lines, (x, y) = lines_of(row["name"]), pixels(row)
        across, tall = min(max(map(text_width, lines)), NAME), 7.5 * len(lines)
        for dx, dy, align in tries:
            left = x + dx - {"left": 0.0, "center": across / 2, "right": across}[align]
            box = (left, y + dy - tall, left + across, y + dy + tall)
            inside = box[0] >= 0 and box[2] <= width + room and box[1] >= 0 and box[3] <= HEIGHT
            near = abs(dy) < 30 or row["x"] == xs[1]
            if (
                inside
                and near
                and all(box[2] <= a or c <= box[0] or box[3] <= b or d <= box[1] for a, b, c, d in taken)
            ):
                taken.append(box)
                found.append({**row, "name": lines, "dx": dx, "dy": dy - tall + 7.5, "align": align})
                break
    return found
