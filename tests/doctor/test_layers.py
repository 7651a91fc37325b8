"""Who may import whom: the doctor stands above bench, launch and runtime, and only the command line above it."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "zerokit"
BELOW = {"bench", "doctor", "errors", "launch", "layout", "placement", "runtime", "text", "versions"}


def test_the_doctor_imports_only_what_is_below_it_and_only_the_command_line_imports_it() -> None:
    """How ranks are started is its caller's: of launch's functions it knows none, only how failures are answers."""
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        text = path.read_text()
        imported = set(re.findall(r"^ *(?:from|import) zerokit\.(\w+)", text, re.MULTILINE))
        if room == "doctor":
            assert imported <= BELOW, path
            names = re.findall(r"^ *from zerokit\.launch\S* import (.*)", text, re.MULTILINE)
            assert {name for line in names for name in line.split(", ")} <= {"Failure", "WorkerFailed"}, path
        elif room != "cli":
            assert "doctor" not in imported, path
