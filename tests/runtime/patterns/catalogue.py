"""All patterns; importing their modules registers them. And the table of them that stands beside the runtime."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.runtime.patterns.harness import PATTERNS, STAGES, Pattern

PATH = Path(__file__).resolve().parents[3] / "zerokit" / "runtime" / "PATTERNS.md"

_MODULES = """
    loops weights changes passing structure library autograd recomputation several ranks half objects
"""
SUBJECTS = {
    name: (importlib.import_module(f"{__package__}.{name}").__doc__ or "").strip().rstrip(".")
    for name in _MODULES.split()
}
"""Headings of the table, by the module's name."""

__all__ = ["PATH", "PATTERNS", "SUBJECTS", "render"]

INTRODUCTION = """\
# Training patterns

Each line is a way to train that people use. It was run at each stage beside plain torch (the same model, data and
optimizer, gradients averaged over ranks), with small and large buckets, SGD with momentum and AdamW, and every loss
and every final weight was compared. "right" means that they agree to {tolerance:g}, where nothing else is said in the
pattern; "refused" names the error and words of its message, which say what to do instead.
Two stages of one line agree to the last bit, but for the int8 and int4 wires, whose blocks follow the buckets.
The tests run each line at stage 3, at another stage by turns and at one of each refusal, with buckets and optimizers by
turns (`python -m tests.runtime.patterns --full` runs all products), and fail when this file is not what is declared:
the same with `--write` writes it. They also run each line the way that it takes on a device (`--device-way`), where
what ranks send each other arrives late, memory comes and goes, and autograd has a thread of its own.
"""


def render() -> str:
    """The whole file."""
    parts = [INTRODUCTION.format(tolerance=Pattern.tolerance)]
    for subject, title in SUBJECTS.items():
        rows = [pattern for pattern in PATTERNS.values() if pattern.subject == subject]
        parts.append(f"## {title}\n\n| pattern | stage 0 | 1 | 2 | 3 |\n|---|---|---|---|---|\n")
        parts[-1] += "".join(f"{_row(pattern)}\n" for pattern in rows)
    return "\n".join(parts)


def _row(pattern: Pattern) -> str:
    cells = [pattern.name, *(str(pattern.refused.get(stage, "right")) for stage in STAGES)]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
