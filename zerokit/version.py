"""Which zerokit this is: its version, and its files where several programs bear the same version."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from zerokit import __version__


@functools.cache
def describe_version() -> str:
    """The version, and the beginning of a SHA-256 over the package's Python files: equal on equal installations."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{__version__} (files {digest.hexdigest()[:12]})"
