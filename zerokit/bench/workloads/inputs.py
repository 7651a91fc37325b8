"""Training text. The launcher checks it without importing torch.

Every byte is a token: nothing is downloaded and no tokenizer is needed.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.measured import Data
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.own import find
from zerokit.errors import UsageError, ZerokitError

STANDARD_LIBRARY = "standard-library"
SYNTHETIC = "synthetic"
# Far more than a bench reads in a run, and loaded by every rank in some ten milliseconds.
LIMIT_BYTES = 16 * 2**20
SYNTHETIC_BYTES = 2**20
# Third-party packages come and go; without them the text depends on Python's version alone.
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})


class DataError(ZerokitError):
    """The training data cannot be read, or is too small."""


def digest(content: bytes) -> str:
    """BLAKE2b, 16 bytes in hexadecimal: equal digests mean equal data."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def load_text(source: str, *, seed: int = 0, limit: int = LIMIT_BYTES) -> tuple[bytes, Data]:
    """Read the training text; also returns its record entry.

    Raises `UsageError` for a path that does not exist, `DataError` for one without text or one that is unreadable.

    Args:
        source: a file, a folder (read recursively in the order of its sorted paths, without hidden files),
            `STANDARD_LIBRARY` (the .py files of the running Python) or `SYNTHETIC` (bytes drawn from `seed`:
            there is nothing to learn in them, the loss stays near ln 256).
        seed: for synthetic text.
        limit: bytes at which reading stops.
    """
    content, files, root = bytearray(), 0, Path(source)
    paths: Iterable[Path] = ()
    if source == SYNTHETIC:
        content += random.Random(seed).randbytes(min(SYNTHETIC_BYTES, limit))
    elif source == STANDARD_LIBRARY:
        library = _walk(Path(sysconfig.get_path("stdlib")))
        paths = (path for path in library if path.suffix == ".py")
    elif root.exists():
        paths = _walk(root) if root.is_dir() else [root]
    else:
        raise UsageError(f"data: {root} does not exist; give a text file, a folder, or 'synthetic'")
    for path in paths:
        content += _read(path, limit - len(content) + 1)
        files += 1
        if len(content) > limit:
            break
    if not content:
        raise DataError(f"data: {source} has no text; give a text file or a folder of them")
    text = bytes(content[:limit])
    return text, Data(source, len(text), files, len(content) > limit, digest(text))


def _walk(root: Path) -> Iterator[Path]:
    """The files below a folder, without hidden ones and those of third-party packages."""

    def stop(error: OSError) -> None:
        raise DataError(f"data: cannot list {error.filename}: {error.strerror}") from error

    for directory, names, files in os.walk(root, onerror=stop):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in _NOT_STANDARD)
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror}") from error


def read_inputs(settings: Settings) -> tuple[bytes, Data] | None:
    """The text of a language model; None for other models. Raises `DataError` for bad data."""
    workload = describe(settings.model)
    if workload.text is None:
        return None
    text, data = load_text(settings.data or workload.default_data, seed=settings.seed)
    if len(text) < settings.seq_len + 1:  # and its targets
        raise DataError(
            f"data: {data.source} holds {len(text)} bytes, but sequences of {settings.seq_len} tokens need "
            f"at least {settings.seq_len + 1}; give more text or a smaller --seq-len"
        )
    return text, data


def check_inputs(settings: Settings) -> None:
    """Check the data and the model's factory in the launcher; raises as `read_inputs` and `own.find` do."""
    if describe(settings.model).config is None:
        find(settings.model)
    else:
        read_inputs(settings)
