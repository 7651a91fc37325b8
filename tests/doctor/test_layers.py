"""Who may import whom: the doctor stands above bench, launch and runtime, and only the command line above it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "zerokit"
BELOW = {"__init__", "bench", "doctor", "errors", "launch", "runtime", "text", "versions"}


def imported(path: Path) -> set[str]:
    """The rooms of zerokit that a module imports from, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return {[*name.split("."), "__init__"][1] for name in names if name.split(".")[0] == "zerokit"}


def test_the_doctor_imports_only_what_is_below_it() -> None:
    found = {path.name: imported(path) for path in PACKAGE.glob("doctor/*.py")}
    assert len(found) > 10
    assert {name: rooms - BELOW for name, rooms in found.items() if rooms - BELOW} == {}


def test_only_the_command_line_imports_the_doctor() -> None:
    outside = [
        path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ("doctor", "cli")
    ]
    assert len(outside) > 100
    assert [str(path) for path in outside if "doctor" in imported(path)] == []


def test_how_ranks_are_started_is_not_the_doctors_business() -> None:
    """Whoever calls it passes a launcher: of launch's functions it knows none, only how failures are answers."""
    for path in PACKAGE.glob("doctor/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerokit.launch"):
                assert {alias.name for alias in node.names} <= {"Failure", "WorkerFailed"}
