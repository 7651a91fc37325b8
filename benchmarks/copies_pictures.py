"""The pictures of docs/copies.md: which node holds the files of which, as `holders` computes it.

python benchmarks/copies_pictures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import read_options
from zerokit.checkpoint.nodes.holders import held_by, holders

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
# Colours that differ also for those who do not see red and green apart, and on paper by their lightness.
_COLOURS = ("#9ecae1", "#fdd0a2", "#c7e9c0", "#dadaeb")
_WIDTH, _HEIGHT, _GAP, _MARGIN = 150, 148, 14, 16
_INK, _QUIET = "#1b1f24", "#57606a"


def _text(x: float, y: float, words: str, *, size: int = 13, ink: str = _INK, weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" font-weight="{weight}" '
        f'text-anchor="middle">{words}</text>'
    )


def _node(x: float, y: float, node: int, held: list[int]) -> str:
    """A node's directory: the files of its ranks, copies of others', and what every node has."""
    middle = x + _WIDTH / 2
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#f6f8fa" stroke="{_QUIET}"/>',
        _text(middle, y + 22, f"node {node}", size=14, weight="bold"),
    ]
    for place, other in enumerate(held):
        top = y + 32 + 38 * place
        dash = "" if other == node else ' stroke-dasharray="4 3"'
        parts.append(
            f'<rect x="{x + 10:g}" y="{top:g}" width="{_WIDTH - 20}" height="32" rx="4" '
            f'fill="{_COLOURS[other]}" stroke="{_INK}"{dash}/>'
        )
        parts.append(
            _text(middle, top + 21, f"files of node {other}" if other == node else f"copy of node {other}")
        )
    parts.append(_text(middle, y + _HEIGHT - 22, "manifest.json, extra.json,", size=11, ink=_QUIET))
    parts.append(_text(middle, y + _HEIGHT - 8, "common, node.json", size=11, ink=_QUIET))
    return "".join(parts)


def picture(title: str, nodes: int, copies: int, groups: int = 1) -> str:
    """The nodes side by side; replica groups are framed."""
    found = holders(nodes, copies, groups)
    top, each = _MARGIN + 26 + (24 if groups > 1 else 0), nodes // groups
    between = _GAP if groups > 1 else 0  # between groups, beside the gap of nodes

    def left(node: int) -> float:
        return _MARGIN + 8 + node * (_WIDTH + _GAP) + (node // each) * 2 * between

    width = left(nodes - 1) + _WIDTH + _MARGIN + 8
    height = top + _HEIGHT + _MARGIN + (8 if groups > 1 else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" role="img"><title>{title}</title>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        _text(width / 2, _MARGIN + 8, title, size=14),
    ]
    for group in range(groups) if groups > 1 else ():
        x, last = left(group * each) - 8, left((group + 1) * each - 1) + _WIDTH + 8
        parts.append(
            f'<rect x="{x:g}" y="{top - 26:g}" width="{last - x:g}" height="{_HEIGHT + 34}" rx="10" fill="none" '
            f'stroke="{_QUIET}" stroke-dasharray="2 4"/>'
        )
        parts.append(_text((x + last) / 2, top - 9, f"replica group {group}: one whole model", ink=_QUIET))
    parts += [_node(left(node), top, node, held_by(found, node)) for node in range(nodes)]
    return "".join([*parts, "</svg>\n"])


def main() -> None:
    """Draw both."""
    read_options(__doc__, None)
    PICTURES.mkdir(exist_ok=True)
    for name, text in {
        "copies.svg": picture("Four nodes, copies=2: any one of them may be lost", 4, 2),
        "copies-groups.svg": picture(
            "Two replica groups, copies=2: a whole group, such as a rack, may be lost", 4, 2, 2
        ),
    }.items():
        (PICTURES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
