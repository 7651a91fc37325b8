"""The versions that must be equal on all nodes, including the program's own code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from zerokit import __version__

_PACKAGE = Path(__file__).parent


@functools.cache
def program() -> str:
    """A hash of twelve digits over the names and contents of the package's Python files."""
    digest = hashlib.sha256()
    names = sorted(path.relative_to(_PACKAGE).as_posix() for path in _PACKAGE.rglob("*.py"))
    for name in names:
        for part in (name.encode(), (_PACKAGE / name).read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:12]


def installed(package: str) -> str | None:
    """The version of an installed package, by its metadata; None for one that is not installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def versions() -> dict[str, str]:
    """The versions that this process uses. torch's is read from its metadata, which is faster than importing it."""
    versions_here = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "zerokit": __version__,
        "zerokit's files": program(),
    }
    if (torch := installed("torch")) is not None:
        versions_here["torch"] = torch.partition("+")[0]
    return versions_here


def describe_difference(where: str, theirs: object) -> str | None:
    """The differences of another node, `where`, from this one; None if its `versions` are equal."""
    ours = versions()
    if theirs == ours:
        return None
    return f"{where} has {_say(theirs)}, but this machine has {_say(ours)}: install the same on every node"


def _say(versions: object) -> str:
    return (
        ", ".join(f"{name} {number}" for name, number in versions.items())
        if isinstance(versions, dict)
        else "no zerokit"
    )
