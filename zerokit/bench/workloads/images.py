"""A folder of images as training data: paths are listed once, pixels are read when a batch wants them.

Labels are the names of sub-folders in sorted order, as most collections have it; without sub-folders they come from a
checksum of the file's name, which trains nothing worth having and costs the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerokit.bench.workloads.text import DataError, draw_seed

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# More than a bench draws in a run, and read once by every rank for the digest in some hundred milliseconds.
LIMIT_FILES = 1024


@dataclass(frozen=True, slots=True)
class Folder:
    """Images: `paths` relative to `root`, sorted, and the label of each; `truncated` says that there were more."""

    root: Path
    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    size_bytes: int
    digest: str
    truncated: bool


def open_folder(source: str, classes: int, *, limit: int = LIMIT_FILES) -> Folder:
    """List the images below a folder, without hidden ones.

    Of more than `limit` every n-th is taken, so that all sub-folders have a part. With more sub-folders than `classes`
    labels start again at 0. Raises `DataError` where the folder or its images are missing, or Pillow is.
    """
    root = Path(source)
    if not root.is_dir():
        raise DataError(f"data: {root} is no folder; image models take a folder of images, or 'synthetic'")
    if importlib.util.find_spec("PIL") is None:
        raise DataError(
            "data: images are read by Pillow, which is not installed here; pip install 'zerokit[images]'"
        )
    found = sorted(_images(root))
    if not found:
        raise DataError(f"data: {root} holds no images; known by their names: {', '.join(sorted(SUFFIXES))}")
    every = -(-len(found) // limit)
    paths = tuple(found[::every])
    folders = {
        name: place
        for place, name in enumerate(sorted({path.parts[0] for path in found if len(path.parts) > 1}))
    }
    labels = tuple(
        (folders[path.parts[0]] if len(path.parts) > 1 else zlib.crc32(str(path).encode())) % classes
        for path in paths
    )
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    for path in paths:
        try:
            content = (root / path).read_bytes()
        except OSError as error:
            raise DataError(f"data: cannot read {root / path}: {error.strerror}") from error
        digest.update(content)
        size += len(content)
    return Folder(root, paths, labels, size, digest.hexdigest(), truncated=every > 1)


def _images(root: Path) -> list[Path]:
    def stop(error: OSError) -> None:
        raise DataError(f"data: cannot list {error.filename}: {error.strerror}") from error

    found = []
    for directory, names, files in os.walk(root, onerror=stop):
        names[:] = [name for name in names if not name.startswith(".")]
        for name in files:
            path = Path(directory, name)
            if not name.startswith(".") and path.suffix.lower() in SUFFIXES and path.is_file():
                found.append(path.relative_to(root))
    return found


def batch(
    folder: Folder,
    *,
    seed: int,
    first: int,
    batch_size: int,
    size: int,
    channels: int,
) -> tuple[Tensor, Tensor]:
    """The micro-batch that begins with sample `first` of the job.

    Images are fp32 (batch_size, channels, size, size) from −1 to 1, labels int64 (batch_size,). The middle of each
    image is cut to a square and scaled. Raises `DataError` naming a file that is no image.
    """
    import torch

    chosen = [
        random.Random(draw_seed(seed=seed, sample=sample)).randrange(len(folder.paths))
        for sample in range(first, first + batch_size)
    ]
    pixels = bytearray().join(_pixels(folder.root / folder.paths[place], size, channels) for place in chosen)
    images = torch.frombuffer(pixels, dtype=torch.uint8).view(batch_size, size, size, channels)
    labels = torch.tensor([folder.labels[place] for place in chosen])
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0).contiguous(), labels


def _pixels(path: Path, size: int, channels: int) -> bytes:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (size, size)).tobytes()
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"data: {path} cannot be read as an image: {error}") from error
