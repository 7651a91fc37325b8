"""Kinds of pictures, from plain numbers: bars, stacked bars, strips of single values, points, lines.

Labels stand at what they name. Where a picture is too narrow for labels beside its rows, they move above them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerokit.bench.comparison.drawing import Dot, Drawing, Line, Rect, Text, text_width

SIZE = 12.0
"""Of text, in pixels."""
_BAR = 14.0
_GAP = 8.0
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar."""

    value: float
    role: str
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One bar: its pieces from left to right and what is written at its end.

    `error` draws a whisker around the end, `mark` a tick at a value of its own, `under` a thin bar below. A row without
    pieces says `text` alone. `extra` follows `text` in its own colour.
    """

    label: str
    parts: Sequence[Part]
    text: str
    extra: str = ""
    extra_role: str = "muted"
    error: float = 0.0
    mark: float | None = None
    under: Part | None = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where rows lie: labels beside them, or above where there is no room."""

    width: float
    left: float
    right: float
    above: bool
    pitch: float

    @classmethod
    def of(cls, labels: Sequence[str], width: float, reserved: float) -> _Rows:
        space = max((text_width(label, SIZE) for label in labels), default=0.0) + 12.0
        above = space > 0.36 * width
        return cls(width, 0.0 if above else space, width - reserved, above, 42.0 if above else 26.0)

    def height(self, count: int) -> float:
        return count * self.pitch + 4.0

    def top(self, place: int) -> float:
        """Of a row's bar."""
        return place * self.pitch + (19.0 if self.above else 6.0)

    def label(self, place: int, label: str) -> Text:
        if self.above:
            return Text(0.0, self.top(place) - 6.0, label, size=SIZE)
        return Text(self.left - 10.0, self.top(place) + 11.0, label, "end", SIZE)


def bars(rows: Sequence[Row], width: float) -> Drawing:
    """Horizontal bars from zero, one a row."""
    reserved = max(
        (
            text_width(row.text, SIZE) + (text_width(row.extra, SIZE) + _GAP if row.extra else 0.0)
            for row in rows
            if row.parts
        ),
        default=0.0,
    )
    layout = _Rows.of([row.label for row in rows], width, reserved + 12.0)
    ends = [sum(part.value for part in row.parts) for row in rows]
    reach = max(
        (max(end + row.error, row.mark or 0.0) for row, end in zip(rows, ends, strict=True)), default=0.0
    )
    scale = (layout.right - layout.left) / reach if reach > 0 else 0.0
    drawing = Drawing(width, layout.height(len(rows)))
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        top, x = layout.top(place), layout.left
        drawing.add(layout.label(place, row.label))
        for part in row.parts:
            length = part.value * scale
            drawing.add(Rect(x, top, length, _BAR, part.role, part.opacity, part.title))
            x += length
        if row.under is not None:
            drawing.add(
                Rect(
                    layout.left,
                    top + _BAR + 1.5,
                    row.under.value * scale,
                    3.0,
                    row.under.role,
                    1.0,
                    row.under.title,
                )
            )
        if row.error * scale > 1.0:
            low, high = (
                layout.left + max(end - row.error, 0.0) * scale,
                layout.left + (end + row.error) * scale,
            )
            middle = top + _BAR / 2
            drawing.add(Line(((low, middle), (high, middle)), "text", 1.25))
            drawing.add(*(Line(((at, middle - 3), (at, middle + 3)), "text", 1.25) for at in (low, high)))
        if row.mark is not None:
            at = layout.left + row.mark * scale
            drawing.add(Line(((at, top - 3), (at, top + _BAR + 3)), "text", 2.0))
        after = layout.left + max(end + row.error, row.mark or 0.0) * scale + 7.0
        drawing.add(Text(after, top + 11.0, row.text, size=SIZE, fill="text" if row.parts else "muted"))
        if row.extra:
            drawing.add(
                Text(
                    after + text_width(row.text, SIZE) + _GAP,
                    top + 11.0,
                    row.extra,
                    size=SIZE,
                    fill=row.extra_role,
                )
            )
    drawing.add(Line(((layout.left, 0.0), (layout.left, drawing.height - 2.0)), "soft"))
    return drawing


@dataclass(frozen=True, slots=True)
class Strip:
    """Single values of one row, with their median and the range that holds most."""

    label: str
    values: Sequence[float]
    median: float
    low: float
    high: float
    role: str
    text: str


def strips(rows: Sequence[Strip], width: float, unit: str) -> Drawing:
    """Every value a dot above a common axis; values far beyond the rest are drawn at the edge and counted there."""
    least = min(min(row.values) for row in rows)
    most = max(max(row.values) for row in rows)
    typical = max(row.high for row in rows)
    limit = most if most <= least + 1.8 * (typical - least) else least + 1.5 * (typical - least)
    beyond = [sum(value > limit for value in row.values) for row in rows]
    texts = [row.text + (f" (+{count} ▸)" if count else "") for row, count in zip(rows, beyond, strict=True)]
    reserved = max(text_width(text, SIZE) for text in texts) + 14.0
    layout = _Rows.of([row.label for row in rows], width, reserved)
    axis = _Axis.of(least, limit, layout.left + 6.0, layout.right - 6.0, room=layout.right - layout.left)
    bottom = layout.height(len(rows))
    drawing = Drawing(width, bottom + 22.0)
    _vertical_grid(drawing, axis, 0.0, bottom, unit)
    for place, row in enumerate(rows):
        top = layout.top(place)
        middle = top + _BAR / 2
        drawing.add(layout.label(place, row.label))
        low, high = axis.at(row.low), axis.at(min(row.high, limit))
        drawing.add(Rect(low, top - 1.0, high - low, _BAR + 2.0, row.role, 0.16))
        opacity = max(0.15, min(0.6, 12.0 / len(row.values)))
        for number, value in enumerate(row.values):
            # A low-discrepancy sequence spreads dots evenly and the same every time.
            offset = (((number + 1) * _GOLDEN) % 1.0 - 0.5) * _BAR
            drawing.add(Dot(axis.at(min(value, limit)), middle + offset, 2.0, row.role, opacity))
        drawing.add(
            Line(((axis.at(row.median), top - 3.0), (axis.at(row.median), top + _BAR + 3.0)), "text", 2.0)
        )
        drawing.add(Text(layout.right + 4.0, top + 11.0, texts[place], size=SIZE))
    return drawing


@dataclass(frozen=True, slots=True)
class Point:
    """One place in a plane; `front` points are filled and joined by a line."""

    x: float
    y: float
    label: str
    role: str
    front: bool
    title: str = ""


def scatter(points: Sequence[Point], width: float, x_title: str, y_title: str) -> Drawing:
    """Labelled points; neither axis starts at zero, because places beside each other are what is looked at."""
    height = max(260.0, 0.56 * width)
    x = _Axis.of(min(p.x for p in points), max(p.x for p in points), 50.0, width - 14.0, pad=0.1)
    y = _Axis.of(
        min(p.y for p in points), max(p.y for p in points), height - 42.0, 30.0, room=1.6 * height, pad=0.12
    )
    drawing = Drawing(width, height)
    _horizontal_grid(drawing, y, 46.0, width)
    _vertical_grid(drawing, x, 24.0, height - 38.0, "")
    drawing.add(Text(0.0, 12.0, y_title, size=SIZE, fill="muted"))
    drawing.add(Text(width - 2.0, height - 4.0, x_title, "end", SIZE, "muted"))
    front = sorted((p for p in points if p.front), key=lambda p: p.x)
    if len(front) > 1:
        drawing.add(Line(tuple((x.at(p.x), y.at(p.y)) for p in front), "soft", 1.5, dashed=True))
    taken = [_box(x.at(p.x) - 6, y.at(p.y) - 6, 12, 12) for p in points]
    for point in points:
        drawing.add(
            Dot(x.at(point.x), y.at(point.y), 5.0, point.role, ring=not point.front, title=point.title)
        )
    for point in sorted(points, key=lambda p: not p.front):
        if (label := _place(point, x.at(point.x), y.at(point.y), taken, width, height)) is not None:
            drawing.add(label)
    return drawing


@dataclass(frozen=True, slots=True)
class Series:
    """One line; a missing value breaks nothing, it is left out."""

    label: str
    points: Sequence[tuple[float, float]]
    role: str
    dots: bool = False


def lines(
    series: Sequence[Series],
    width: float,
    x_title: str,
    y_title: str,
    *,
    ticks: Sequence[tuple[float, str]] = (),
    zero: bool = False,
) -> Drawing:
    """Lines with their names at their ends; `ticks` replaces those of the x axis, `zero` starts the y axis there."""
    height = max(240.0, 0.5 * width)
    labels = max((text_width(one.label, SIZE) for one in series), default=0.0) + 10.0
    everything = [point for one in series for point in one.points]
    ys = [value for _, value in everything]
    xs = [value for value, _ in everything]
    x = _Axis.of(min(xs), max(xs), 52.0, width - min(labels, 0.45 * width) - 6.0, room=width - 60.0 - labels)
    y = _Axis.of(
        0.0 if zero else min(ys), max(ys), height - 42.0, 30.0, room=1.6 * height, pad=0.0 if zero else 0.05
    )
    drawing = Drawing(width, height)
    _horizontal_grid(drawing, y, 46.0, x.stop + 4.0)
    for value, text in ticks or [(tick, x.text(tick)) for tick in x.ticks]:
        drawing.add(Text(x.at(value), height - 22.0, text, "middle", SIZE - 1, "muted"))
    drawing.add(Text(0.0, 12.0, y_title, size=SIZE, fill="muted"))
    drawing.add(Text(x.stop, height - 4.0, x_title, "end", SIZE, "muted"))
    for one in series:
        path = tuple((x.at(a), y.at(b)) for a, b in one.points)
        drawing.add(Line(path, one.role, 2.0 if one.dots else 1.5))
        if one.dots:
            drawing.add(*(Dot(a, b, 3.0, one.role) for a, b in path))
    ends = [(y.at(one.points[-1][1]), x.at(one.points[-1][0]), one) for one in series if one.label]
    for (_, at, one), placed in zip(
        sorted(ends, key=lambda end: end[0]),
        _apart(sorted(end[0] for end in ends), 24.0, height - 42.0),
        strict=True,
    ):
        drawing.add(Text(max(at, x.stop) + 8.0, placed + 4.0, one.label, size=SIZE, fill=one.role))
    return drawing


@dataclass(slots=True)
class _Axis:
    """A linear scale with round ticks."""

    low: float
    high: float
    start: float
    stop: float
    ticks: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        low: float,
        high: float,
        start: float,
        stop: float,
        *,
        pad: float = 0.03,
        room: float | None = None,
    ) -> _Axis:
        spread = (high - low) or abs(high) * 0.2 or 1.0
        if high == low:
            low, high = low - spread / 2, high + spread / 2
        floor = low >= 0.0
        low, high = low - pad * spread, high + pad * spread
        if floor:
            low = max(low, 0.0)
        count = max(2, min(6, int((room or abs(stop - start)) / 70)))
        return cls(low, high, start, stop, nice_ticks(low, high, count))

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def text(self, tick: float) -> str:
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(tick) or 1.0
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{tick:,.{decimals}f}".replace("-", "−")


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten, within the interval."""
    power = 10.0 ** math.floor(math.log10((high - low) / max(count, 1)))
    found = []
    for step in (factor * power for factor in (1, 2, 5, 10)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        found.append([number * step for number in range(first, last + 1)])
    return min(found, key=lambda ticks: abs(len(ticks) - count))


def _vertical_grid(drawing: Drawing, axis: _Axis, top: float, bottom: float, unit: str) -> None:
    for place, tick in enumerate(axis.ticks):
        at = axis.at(tick)
        drawing.add(Line(((at, top), (at, bottom)), "grid"))
        last = f" {unit}" if unit and place == len(axis.ticks) - 1 else ""
        drawing.add(Text(at, bottom + 15.0, axis.text(tick) + last, "middle", SIZE - 1, "muted"))


def _horizontal_grid(drawing: Drawing, axis: _Axis, left: float, right: float) -> None:
    for tick in axis.ticks:
        at = axis.at(tick)
        drawing.add(Line(((left, at), (right, at)), "grid"))
        drawing.add(Text(left - 6.0, at + 4.0, axis.text(tick), "end", SIZE - 1, "muted"))


_Box = tuple[float, float, float, float]


def _box(x: float, y: float, width: float, height: float) -> _Box:
    return x, y, x + width, y + height


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _place(point: Point, x: float, y: float, taken: list[_Box], width: float, height: float) -> Text | None:
    """The label beside its point where nothing else is; None where there is no free place at all."""
    across, tall = text_width(point.label, SIZE), SIZE + 2.0
    places: list[tuple[float, float, str]] = [(9.0, 4.0, "start"), (-9.0, 4.0, "end")]
    for down in (-10.0, 19.0, -24.0, 33.0):
        places += [(0.0, down, "middle"), (7.0, down, "start"), (-7.0, down, "end")]
    for dx, dy, anchor in places:
        left = x + dx - {"start": 0.0, "middle": across / 2, "end": across}[anchor]
        box = _box(left, y + dy - SIZE + 1.0, across, tall)
        inside = box[0] >= 46.0 and box[2] <= width and box[1] >= 14.0 and box[3] <= height - 34.0
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            return Text(left, y + dy, point.label, size=SIZE)
    return None


def _apart(places: Sequence[float], low: float, high: float, pitch: float = SIZE + 3.0) -> list[float]:
    """Sorted places moved so that neighbours are `pitch` apart, between `low` and `high` where that is wide enough."""
    moved = list(places)
    for _ in range(50):
        for number in range(1, len(moved)):
            overlap = pitch - (moved[number] - moved[number - 1])
            if overlap > 1e-6:
                moved[number - 1] -= overlap / 2
                moved[number] += overlap / 2
    if not moved:
        return moved
    shift = min(0.0, high - moved[-1])
    shift = max(shift, low - moved[0])
    return [place + shift for place in moved]
