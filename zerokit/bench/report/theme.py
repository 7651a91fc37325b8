"""The look of pictures, from `theme.json` next to this module: colours for light and dark, fonts and lines.

A specification names a colour by its role, as `var(--ddp)`: a page's style says what that is in light and in dark, and
one drawing follows the reader's setting. Hues are after Okabe and Ito, which colour-blind people tell apart.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_THEME = json.loads(Path(__file__).with_name("theme.json").read_text(encoding="utf-8"))
COLOURS: dict[str, list[str]] = _THEME["colours"]
CONFIG: dict[str, Any] = _THEME["config"]
"""Vega-Lite's configuration of every picture."""


def colour(role: str) -> str:
    """The name of a role in specifications."""
    return f"var(--{role})"


def in_light(text: str) -> str:
    """The text with every role replaced by its light colour, for drawings outside a page."""
    return re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: COLOURS[found[1]][0], text)
