"""The sources of batches: one function per kind of data, which makes one sample.

Samples are numbered through the job, over all its ranks and steps, and sample i depends on (seed, i) alone: every
engine, stage, world size and re-run sees the same ones in the same order (`worker.batches` says who takes which).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from zerokit.bench.catalogue.sizes import BertConfig, ImageConfig, LinearConfig
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record import Data
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.inputs import SYNTHETIC, Corpus, DataError, Folder, digest, read_inputs
from zerokit.bench.workloads.own import Own

Sample = Callable[[int], tuple[Tensor, ...]]
"""Makes a sample on the CPU from the seed of all that is drawn for it."""

# Of BERT (arXiv:1810.04805, §3.1): how much of a sequence is guessed, and how much of that is left as it was or
# replaced by another byte, so that a mask is not the only one to guess at.
_GUESSED, _KEPT, _REPLACED = 0.15, 0.1, 0.1
# The first token that is no byte stands for the mask.
MASK = 256


Batch = Callable[[int], tuple[Tensor, ...]]
"""Makes the micro-batch that starts at a sample of the job, on the CPU."""


def open_source(settings: Settings) -> tuple[Data, Batch]:
    """The data of a catalogued workload, read and checked for sufficient size, and its micro-batches.

    Raises `DataError` where they are missing, unreadable or too few.
    """
    config, inputs = describe(settings.model).config, read_inputs(settings)
    data = made_up(settings) if inputs is None else inputs.data
    if isinstance(inputs, Corpus):
        make = sample_masked_text if isinstance(config, BertConfig) else sample_text
        sample = make(inputs, settings.seq_len)
    elif isinstance(config, ImageConfig):
        size = settings.image_size or config.image_size
        if inputs is None:
            sample = sample_images(config, size, settings.seed)
        else:
            sample = sample_folder(inputs, config.channels, size)
    else:
        assert isinstance(config, LinearConfig)
        sample = sample_regression(config.features, settings.seed)

    def batch(first: int) -> tuple[Tensor, ...]:
        numbers = range(first, first + settings.batch_size)
        samples = [sample(draw_seed(seed=settings.seed, sample=number)) for number in numbers]
        return tuple(torch.stack(parts) for parts in zip(*samples, strict=True))

    return data, batch


def open_own(settings: Settings, own: Own) -> Batch:
    """The micro-batches of a user's own workload, whose samples may depend on each other."""

    def batch(first: int) -> tuple[Tensor, ...]:
        drawn = generator(draw_seed(seed=settings.seed, sample=first))
        return tuple(own.batch(drawn, settings.batch_size))

    return batch


def made_up(settings: Settings) -> Data:
    """The record entry of synthetic data."""
    return Data(SYNTHETIC, 0, 0, False, digest(f"seed {settings.seed}".encode()))


def draw_seed(*, seed: int, sample: int) -> int:
    """The seed of everything that is drawn for one sample of the job, below 2^64."""
    key = f"{seed}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def generator(seed: int) -> torch.Generator:
    """The generator from which random tensors are drawn."""
    return torch.Generator().manual_seed(seed % 2**63)


def sample_text(corpus: Corpus, length: int) -> Sample:
    """Tokens and next tokens, each int64 (length,), from a random place in the text."""
    content = corpus.content

    def sample(seed: int) -> tuple[Tensor, ...]:
        start = random.Random(seed).randrange(len(content) - length)
        stretch = bytearray(content[start : start + length + 1])
        row = torch.frombuffer(stretch, dtype=torch.uint8).long()
        return row[:-1], row[1:]

    return sample


def sample_masked_text(corpus: Corpus, length: int) -> Sample:
    """Tokens with some masked, and the masked tokens' originals, each int64 (length,); −100 elsewhere.

    As many of every sequence, so that the mean over ranks is the mean over all guesses.
    """
    whole, count = sample_text(corpus, length), max(1, round(_GUESSED * length))

    def sample(seed: int) -> tuple[Tensor, ...]:
        tokens, _ = whole(seed)
        drawn = generator(seed)
        guessed = torch.rand(length, generator=drawn).argsort()[:count]
        chance = torch.rand(count, generator=drawn)
        other = torch.randint(MASK, (count,), generator=drawn)
        shown = torch.where(chance < _KEPT, tokens[guessed], MASK)
        shown = torch.where(chance >= 1.0 - _REPLACED, other, shown)
        targets = torch.full_like(tokens, -100).scatter(0, guessed, tokens[guessed])
        return tokens.scatter(0, guessed, shown), targets

    return sample


def sample_folder(folder: Folder, channels: int, size: int) -> Sample:
    """An image from files, fp32 (channels, size, size) from −1 to 1, and its label, int64 ().

    The middle of each image is cut to a square and scaled. Raises `DataError` naming a file that is no image.
    """

    def sample(seed: int) -> tuple[Tensor, ...]:
        chosen = random.Random(seed).randrange(len(folder.paths))
        pixels = _pixels(folder.root / folder.paths[chosen], size, "L" if channels == 1 else "RGB")
        image = torch.frombuffer(pixels, dtype=torch.uint8).view(size, size, channels)
        scaled = image.permute(2, 0, 1).float().div_(127.5).sub_(1.0)
        return scaled, torch.tensor(folder.labels[chosen])

    return sample


def _pixels(path: Path, size: int, mode: str) -> bytearray:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return bytearray(ImageOps.fit(image.convert(mode), (size, size)).tobytes())
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"data: {path} cannot be read as an image: {error}") from error


def sample_images(config: ImageConfig, size: int, seed: int) -> Sample:
    """An image, fp32 (channels, size, size), and its label, int64 ().

    Each class has a coarse pattern of its own under noise as strong, so that there is something to learn: 4×4 fields a
    channel, each with a sign.
    """
    shape = (config.classes, config.channels, 4, 4)
    signs = torch.randint(2, shape, generator=generator(seed)) * 2.0 - 1.0

    def sample(seed: int) -> tuple[Tensor, ...]:
        drawn = generator(seed)
        label = torch.randint(config.classes, (), generator=drawn)
        noise = torch.randn(config.channels, size, size, generator=drawn)
        pattern = signs.index_select(0, label[None])  # indexing would read the label
        return noise + interpolate(pattern, size=(size, size))[0], label

    return sample


def sample_regression(features: int, seed: int) -> Sample:
    """Normal features, fp32 (features,), and their image under a fixed linear map with a little noise, ()."""
    weights = torch.randn(features, generator=generator(seed)) / features**0.5

    def sample(seed: int) -> tuple[Tensor, ...]:
        drawn = generator(seed)
        values = torch.randn(features, generator=drawn)
        return values, (values * weights).sum() + 0.1 * torch.randn((), generator=drawn)

    return sample
