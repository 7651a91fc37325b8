"""The picture of a timeline in docs/architecture.md, from the file that `zerokit bench --timeline` writes.

zerokit bench --stage 3 --nodes 2 --timeline step.json
python benchmarks/timeline_picture.py step.json docs/pictures/timeline.svg
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import read_options

_INK, _QUIET, _PAPER = "#1b1f24", "#57606a", "#ffffff"
# Colours that differ also for those who do not see red and green apart, and on paper by their lightness.
_COLOURS = {
    "forward": "#9ecae1",
    "backward": "#fdd0a2",
    "recompute": "#fdae6b",
    "update": "#bdbdbd",
    "gathers": "#74c476",
    "reductions": "#9e9ac8",
    "waits": "#252525",
}
_WIDTH, _LEFT, _RIGHT, _LANE, _GAP = 1000, 120, 16, 22, 10
_CHARACTER = 6.2  # pixels, of a label
_MOST_SHOWN = 0.6  # pixels below which a wait cannot be seen


def _text(x: float, y: float, words: str, *, anchor: str = "start", ink: str = _INK, size: int = 11) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{ink}">{escape(words)}</text>'


def _lanes(content: dict[str, Any]) -> dict[int, tuple[str, list[dict[str, Any]]]]:
    """The threads of the file that are drawn, with their spans."""
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    found: dict[int, tuple[str, list[dict[str, Any]]]] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in ("compute", "update", "waits", "gathers", "reductions"):
            found.setdefault(event["tid"], (names[event["tid"]], []))[1].append(event)
    return found


def _kind(span: dict[str, Any]) -> str:
    return span["name"].partition(" ")[0] if span["cat"] == "compute" else str(span["cat"])


def _span(span: dict[str, Any], top: float, scale: float) -> Iterator[str]:
    """A span, with its name where there is room: of a unit the last part of its module's path."""
    x, width = _LEFT + span["ts"] * scale, span["dur"] * scale
    if width < _MOST_SHOWN:
        return
    colour = _COLOURS[_kind(span)]
    yield (
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_LANE}" fill="{colour}" stroke="{_PAPER}" '
        f'stroke-width="0.6"><title>{escape(span["name"])}: {span["dur"] / 1e3:.2f} ms</title></rect>'
    )
    path = span["name"].partition(" ")[2].partition(" .. ")[0].removesuffix(".weight")
    words = next((one for one in (path, path.rpartition(".")[2]) if len(one) * _CHARACTER < width - 4), "")
    if span["cat"] not in ("waits", "update") and words:
        yield _text(x + width / 2, top + 15, words, anchor="middle")


def picture(content: dict[str, Any]) -> str:
    """The drawing: of each rank compute, with its waits below, then gathers and reductions."""
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    end = max(span["ts"] + span["dur"] for span in spans)
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    parts: list[str] = []
    y, process = 34.0, None
    for name, own in _lanes(content).values():
        if own[0]["pid"] != process:
            process = own[0]["pid"]
            y += _GAP
            parts.append(_text(8, y + 15, f"rank {process - 1}", size=13))
        parts.append(_text(_LEFT - 8, y + 15, name, anchor="end", ink=_QUIET))
        for span in own:
            parts += _span(span, y, scale)
        y += _LANE + 3
    parts += _axis(end / 1e3, scale * 1e3, y)
    parts += _legend(
        sorted({_kind(span) for _, own in _lanes(content).values() for span in own}, key=list(_COLOURS).index)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 30:.0f}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="{_PAPER}"/>{"".join(parts)}</svg>\n'
    )


def _axis(end_ms: float, scale: float, y: float) -> Iterator[str]:
    step = next(one for one in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000) if end_ms / one <= 12)
    for tick in range(0, int(end_ms) + 1, step):
        x = _LEFT + tick * scale
        yield f'<line x1="{x:.1f}" y1="34" x2="{x:.1f}" y2="{y:.1f}" stroke="{_QUIET}" stroke-opacity="0.2"/>'
        yield _text(x, y + 16, f"{tick} ms" if tick else "0", anchor="middle", ink=_QUIET)


def _legend(kinds: Sequence[str]) -> Iterator[str]:
    x = float(_LEFT)
    for kind in kinds:
        yield f'<rect x="{x:.1f}" y="10" width="12" height="12" fill="{_COLOURS[kind]}"/>'
        yield _text(x + 17, 20, kind)
        x += 34 + len(kind) * _CHARACTER


def main(words: Sequence[str] | None = None) -> None:
    """Draw a file."""
    files = read_options(__doc__, words, _timeline=Path, _picture=Path)
    data = files.timeline.read_bytes()
    content = json.loads(gzip.decompress(data) if files.timeline.suffix == ".gz" else data)
    files.picture.write_text(picture(content), encoding="utf-8")


if __name__ == "__main__":
    main()
