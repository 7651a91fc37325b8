"""Training data on disk: text, and folders of images. The launcher checks them without importing torch.

Every byte of a text is a token: nothing is downloaded and no tokenizer is needed. Of images only paths and labels are
listed; pixels are read when a batch wants them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.measured import Data
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.own import find
from zerokit.errors import ZerokitError

STANDARD_LIBRARY = "standard-library"
SYNTHETIC = "synthetic"
# Far more than a bench reads in a run, and loaded by every rank in some ten milliseconds.
LIMIT_BYTES = 16 * 2**20
SYNTHETIC_BYTES = 2**20
# Third-party packages come and go; without them the text depends on Python's version alone.
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# More than a bench draws in a run, and read once by every rank for the digest in some hundred milliseconds.
LIMIT_FILES = 1024


class DataError(ZerokitError):
    """The training data cannot be read, or is too small."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training text; `source` is a path, `STANDARD_LIBRARY` or `SYNTHETIC`, `truncated` if there was more."""

    source: str
    content: bytes
    files: int
    truncated: bool = False

    @property
    def data(self) -> Data:
        """The record entry of the text."""
        return Data(self.source, len(self.content), self.files, self.truncated, digest(self.content))


@dataclass(frozen=True, slots=True)
class Folder:
    """Images: `paths` relative to `root`, sorted, the label of each, and the record entry."""

    root: Path
    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    data: Data


def digest(*contents: bytes) -> str:
    """BLAKE2b of all contents, 16 bytes in hexadecimal: equal digests mean equal data."""
    together = hashlib.blake2b(digest_size=16)
    for content in contents:
        together.update(content)
    return together.hexdigest()


def load_corpus(source: str, *, seed: int = 0, limit: int = LIMIT_BYTES) -> Corpus:
    """Read the training text.

    Args:
        source: a file, a folder (read recursively in the order of its sorted paths, without hidden files),
            `STANDARD_LIBRARY` (the .py files of the running Python) or `SYNTHETIC` (bytes drawn from `seed`:
            there is nothing to learn in them, the loss stays near ln 256).
        limit: bytes at which reading stops.

    Raises `DataError` where a path is missing, unreadable or empty.
    """
    if source == SYNTHETIC:
        return Corpus(source, random.Random(seed).randbytes(min(SYNTHETIC_BYTES, limit)), files=0)
    if source == STANDARD_LIBRARY:
        library = _walk(Path(sysconfig.get_path("stdlib")), _NOT_STANDARD)
        paths = (path for path in library if path.suffix == ".py")
    else:
        root = Path(source)
        if not root.exists():
            raise DataError(f"data: {root} does not exist; give a text file, a folder, or 'synthetic'")
        paths = (path for path in (_walk(root, _NOT_STANDARD) if root.is_dir() else [root]))
    pieces: list[bytes] = []
    size = 0
    for path in paths:
        pieces.append(_read(path, limit - size + 1))
        size += len(pieces[-1])
        if size > limit:
            return Corpus(source, b"".join(pieces)[:limit], len(pieces), truncated=True)
    if size == 0:
        raise DataError(f"data: {source} has no text; give a text file or a folder of them")
    return Corpus(source, b"".join(pieces), len(pieces))


def require_length(corpus: Corpus, length: int) -> None:
    """Raise `DataError` if the text is shorter than one sequence of `length` tokens and its targets."""
    if len(corpus.content) < length + 1:
        raise DataError(
            f"data: {corpus.source} holds {len(corpus.content)} bytes, but sequences of {length} tokens need "
            f"at least {length + 1}; give more text or a smaller --seq-len"
        )


def open_folder(source: str, classes: int, *, limit: int = LIMIT_FILES) -> Folder:
    """List the images below a folder, without hidden ones.

    Labels are the names of sub-folders in sorted order, as most collections have it; with more sub-folders than
    `classes` they start again at 0. Without sub-folders they come from a checksum of the file's name, which trains
    nothing worth having and costs the same. Every n-th is taken of more than `limit` images, so that all sub-folders
    have a part. Raises `DataError` where the folder or its images are missing, or Pillow is.
    """
    root = Path(source)
    if not root.is_dir():
        raise DataError(f"data: {root} is not a folder; image models take a folder of images, or 'synthetic'")
    if importlib.util.find_spec("PIL") is None:
        raise DataError(
            "data: images are read by Pillow, which is not installed here; pip install 'zerokit[images]'"
        )
    images = sorted(path.relative_to(root) for path in _walk(root) if path.suffix.lower() in SUFFIXES)
    if not images:
        raise DataError(
            f"data: {root} has no images; expected files with these endings: {', '.join(sorted(SUFFIXES))}"
        )
    every = -(-len(images) // limit)
    paths = tuple(images[::every])
    folders = sorted({path.parts[0] for path in images if len(path.parts) > 1})
    numbers = {name: number for number, name in enumerate(folders)}
    labels = tuple(
        (numbers[path.parts[0]] if len(path.parts) > 1 else zlib.crc32(str(path).encode())) % classes
        for path in paths
    )
    contents = [_read(root / path) for path in paths]
    size = sum(map(len, contents))
    return Folder(root, paths, labels, Data(str(root), size, len(paths), every > 1, digest(*contents)))


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below a folder, without hidden ones and those in folders of the `skipped` names."""

    def stop(error: OSError) -> None:
        raise DataError(f"data: cannot list {error.filename}: {error.strerror}") from error

    for directory, names, files in os.walk(root, onerror=stop):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in skipped)
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read(path: Path, most: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror}") from error


def read_inputs(settings: Settings) -> Corpus | Folder | None:
    """The data of a catalogued workload; None for synthetic data. Raises `DataError` for bad data."""
    workload = describe(settings.model)
    source = settings.data or workload.default_data
    if workload.text is not None:
        corpus = load_corpus(source, seed=settings.seed)
        require_length(corpus, settings.seq_len)
        return corpus
    if workload.images is not None and source != SYNTHETIC:
        return open_folder(source, workload.images.classes)
    return None


def check_inputs(settings: Settings) -> None:
    """Check the data and the model's factory in the launcher; raises as `read_inputs` and `own.find` do."""
    if describe(settings.model).config is None:
        find(settings.model)
    else:
        read_inputs(settings)
