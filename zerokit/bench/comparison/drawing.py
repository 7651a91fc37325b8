"""Pictures as lists of shapes in pixels, so that one picture becomes SVG for a page and PNG for where no SVG is shown.

Colours are roles ("zerokit", "muted"), which a page's style turns into colours for light and for dark, and `LIGHT` into
those of a PNG. The shapes are few on purpose: all that a chart needs can be said with them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from types import MappingProxyType
from typing import Literal

Anchor = Literal["start", "middle", "end"]

# Light and dark. Hues after Okabe and Ito, which colour-blind people tell apart, darker on white and lighter on black
# so that each has at least 3:1 of contrast with its ground.
COLOURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ground": ("#ffffff", "#14171c"),
        "panel": ("#f6f7f9", "#1c2027"),
        "text": ("#1b1f24", "#e6e9ee"),
        "muted": ("#5b6470", "#9aa4b2"),
        "grid": ("#dfe3e8", "#323944"),
        "zerokit": ("#0067b1", "#57b0f2"),
        "ddp": ("#c05500", "#f39a4a"),
        "zero-redundancy-optimizer": ("#9a7400", "#e0bd3d"),
        "fsdp2": ("#00805f", "#2fc79c"),
        "deepspeed": ("#a8457f", "#e48fbf"),
        "parameter-server": ("#5d55b0", "#a8a0f0"),
        "compute-only": ("#6b7480", "#98a2b0"),
        "first": ("#0067b1", "#57b0f2"),
        "second": ("#c05500", "#f39a4a"),
        "third": ("#00805f", "#2fc79c"),
        "fourth": ("#a8457f", "#e48fbf"),
        "soft": ("#c3cad3", "#454e5b"),
        "better": ("#00704f", "#3ecf9f"),
        "worse": ("#b3261e", "#ff8a80"),
    }
)
LIGHT = {role: colours[0] for role, colours in COLOURS.items()}

CHARACTER = 0.6
"""Width of a typical character of a proportional font, as a share of its size."""


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; `title` is shown when pointed at."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle, or a ring of the same size."""

    x: float
    y: float
    radius: float
    fill: str
    opacity: float = 1.0
    ring: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; `y` is its base line."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    size: float = 12.0
    fill: str = "text"
    bold: bool = False


Shape = Rect | Line | Dot | Text


@dataclass(slots=True)
class Drawing:
    """Shapes on a ground of this size; later ones cover earlier ones."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes += shapes


def text_width(text: str, size: float = 12.0) -> float:
    """About how wide a text will be."""
    return len(text) * size * CHARACTER


def svg(drawing: Drawing, label: str) -> str:
    """An `<svg>` for a page whose style has the classes `f-ROLE` and `s-ROLE`; `label` is its alternative text."""
    width, height = _number(drawing.width), _number(drawing.height)
    parts = [
        f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">'
    ]
    parts += [_element(shape) for shape in drawing.shapes]
    return "".join([*parts, "</svg>"])


def _element(shape: Shape) -> str:
    match shape:
        case Rect():
            attributes = (
                f'class="f-{shape.fill}" x="{_number(shape.x)}" y="{_number(shape.y)}" '
                f'width="{_number(max(shape.width, 0.0))}" height="{_number(shape.height)}"'
                + _opacity(shape.opacity)
            )
            return _titled("rect", attributes, shape.title)
        case Line():
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
            dashes = ' stroke-dasharray="3 3"' if shape.dashed else ""
            return (
                f'<polyline class="s-{shape.stroke}" fill="none" stroke-width="{_number(shape.width)}"{dashes} '
                f'points="{points}"/>'
            )
        case Dot():
            look = (
                f'class="s-{shape.fill} f-ground" stroke-width="1.75"'
                if shape.ring
                else f'class="f-{shape.fill}"'
            )
            attributes = (
                f'{look} cx="{_number(shape.x)}" cy="{_number(shape.y)}" r="{_number(shape.radius)}"'
                + _opacity(shape.opacity)
            )
            return _titled("circle", attributes, shape.title)
        case Text():
            anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
            weight = ' font-weight="600"' if shape.bold else ""
            return (
                f'<text class="f-{shape.fill}" x="{_number(shape.x)}" y="{_number(shape.y)}" '
                f'font-size="{_number(shape.size)}"{anchor}{weight}>{escape(shape.text)}</text>'
            )


def _titled(name: str, attributes: str, title: str) -> str:
    if not title:
        return f"<{name} {attributes}/>"
    return f"<{name} {attributes}><title>{escape(title)}</title></{name}>"


def _opacity(opacity: float) -> str:
    return "" if opacity == 1.0 else f' opacity="{_number(opacity)}"'


def _number(value: float) -> str:
    """Tenths of a pixel are enough, hundredths for small numbers."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:.1f}".removesuffix(".0")


def png(drawing: Drawing, title: str, scale: float = 2.0) -> bytes:
    """The same on white with a title above, `scale` dots a pixel."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle, Rectangle

    head = 36.0
    with (
        matplotlib.rc_context({"text.parse_math": False, "font.family": "sans-serif"}),
        warnings.catch_warnings(),
    ):
        # A label in a script that the font lacks is drawn as boxes; that is no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        # One inch has 72 points, so that sizes of text are pixels.
        figure = Figure(figsize=(drawing.width / 72, (drawing.height + head) / 72), dpi=72 * scale)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, drawing.width)
        axes.set_ylim(drawing.height, -head)
        axes.set_axis_off()
        axes.text(8, -12, title, fontsize=13, fontweight="bold", color=LIGHT["text"])
        for order, shape in enumerate(drawing.shapes):
            match shape:
                case Rect():
                    corner = (shape.x, shape.y)
                    axes.add_patch(
                        Rectangle(
                            corner,
                            max(shape.width, 0.0),
                            shape.height,
                            facecolor=LIGHT[shape.fill],
                            alpha=shape.opacity,
                            linewidth=0,
                            zorder=order,
                        )
                    )
                case Line():
                    xs, ys = zip(*shape.points, strict=True)
                    style = (0, (3, 3)) if shape.dashed else "solid"
                    axes.plot(
                        xs,
                        ys,
                        color=LIGHT[shape.stroke],
                        linewidth=shape.width,
                        linestyle=style,
                        zorder=order,
                    )
                case Dot():
                    face = LIGHT["ground"] if shape.ring else LIGHT[shape.fill]
                    axes.add_artist(
                        Circle(
                            (shape.x, shape.y),
                            shape.radius,
                            facecolor=face,
                            edgecolor=LIGHT[shape.fill],
                            linewidth=1.75 if shape.ring else 0,
                            alpha=shape.opacity,
                            zorder=order,
                        )
                    )
                case Text():
                    axes.text(
                        shape.x,
                        shape.y,
                        shape.text,
                        fontsize=shape.size * 0.92,  # matplotlib's own font is wider than those of browsers
                        fontweight="bold" if shape.bold else "normal",
                        color=LIGHT[shape.fill],
                        ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                        va="baseline",
                        zorder=order,
                    )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", facecolor=LIGHT["ground"], metadata={"Software": None})
    return buffer.getvalue()
