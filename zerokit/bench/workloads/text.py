"""Real text as tokens: every byte is a token, so nothing is downloaded and no tokenizer is needed.

Sample i of a job depends on (seed, i) alone: every engine, stage, world size and re-run sees the same one.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerokit.errors import ZerokitError

if TYPE_CHECKING:
    from torch import Tensor

STANDARD_LIBRARY = "standard-library"
SYNTHETIC = "synthetic"
# Far more than a bench reads in a run, and loaded by every rank in some ten milliseconds.
LIMIT_BYTES = 16 * 2**20
SYNTHETIC_BYTES = 2**20
# Third-party packages come and go; without them the text depends on Python's version alone.
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})


class DataError(ZerokitError):
    """The training text cannot be read, or there is too little of it."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training text.

    `source` is the path, or one of the two names above; `files` counts those read from; `truncated` says that
    there was more than the limit.
    """

    source: str
    content: bytes
    files: int
    truncated: bool = False

    @property
    def digest(self) -> str:
        """BLAKE2b of the content, 16 bytes in hexadecimal: equal digests mean equal text."""
        return hashlib.blake2b(self.content, digest_size=16).hexdigest()


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
        root = Path(sysconfig.get_path("stdlib"))
        paths: Iterator[Path] = (path for path in _walk(root) if path.suffix == ".py")
    else:
        root = Path(source)
        if not root.exists():
            raise DataError(f"data: {root} does not exist; give a text file, a folder, or 'synthetic'")
        paths = _walk(root) if root.is_dir() else iter([root])
    return _read(source, paths, limit)


def _walk(root: Path) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise DataError(f"data: cannot list {error.filename}: {error.strerror}") from error

    for directory, names, files in os.walk(root, onerror=stop):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in _NOT_STANDARD)
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read(source: str, paths: Iterator[Path], limit: int) -> Corpus:
    pieces: list[bytes] = []
    size = 0
    for path in paths:
        try:
            with path.open("rb") as file:
                piece = file.read(limit - size + 1)
        except OSError as error:
            raise DataError(f"data: cannot read {path}: {error.strerror}") from error
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            return Corpus(source, b"".join(pieces)[:limit], len(pieces), truncated=True)
    if size == 0:
        raise DataError(f"data: {source} holds no text; give a file or a folder with some")
    return Corpus(source, b"".join(pieces), len(pieces))


def require_length(corpus: Corpus, length: int) -> None:
    """Raise `DataError` if the text cannot fill one sequence of `length` tokens and its targets."""
    if len(corpus.content) < length + 1:
        raise DataError(
            f"data: {corpus.source} holds {len(corpus.content)} bytes, but sequences of {length} tokens need "
            f"at least {length + 1}; give more text or a smaller --seq-len"
        )


def draw_seed(*, seed: int, sample: int) -> int:
    """The seed of everything that is drawn for one sample of the job, below 2^64."""
    key = f"{seed}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def draw_offsets(size: int, *, seed: int, first: int, batch_size: int, length: int) -> list[int]:
    """Where the sequences of one micro-batch, whose first sample is number `first`, start in a text of `size` bytes."""
    return [
        random.Random(draw_seed(seed=seed, sample=sample)).randrange(size - length)
        for sample in range(first, first + batch_size)
    ]


def batch(corpus: Corpus, *, seed: int, first: int, batch_size: int, length: int) -> tuple[Tensor, Tensor]:
    """The micro-batch that begins with sample `first`: tokens and next tokens, int64 [batch_size, length] on the CPU.

    `corpus` must have passed `require_length(corpus, length)`.
    """
    import torch

    offsets = draw_offsets(len(corpus.content), seed=seed, first=first, batch_size=batch_size, length=length)
    joined = bytearray().join(corpus.content[offset : offset + length + 1] for offset in offsets)
    rows = torch.frombuffer(joined, dtype=torch.uint8).view(batch_size, length + 1).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
