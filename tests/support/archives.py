"""Unpacks the fixtures, on every supported Python."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Extract everything of one of our own archives, with the filter that newer Pythons ask for."""
    with tarfile.open(archive) as content:
        if hasattr(tarfile, "data_filter"):  # Debian 12's Python 3.11.2 has none, and 3.12 warns without
            content.extraction_filter = tarfile.data_filter
        content.extractall(folder)
