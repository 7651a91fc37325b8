"""Where batches come from: a class a kind of data, which makes one sample.

Samples are numbered through the job, over all its ranks and steps, and sample i depends on (seed, i) alone: every
engine, stage, world size and re-run sees the same ones in the same order (`worker.batches` says who takes which).
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
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


def draw_seed(*, seed: int, sample: int) -> int:
    """The seed of everything that is drawn for one sample of the job, below 2^64."""
    key = f"{seed}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


class Source(ABC):
    """Samples of one kind; by default they are made up from the seed.

    Attributes:
        data: what the record says of it.
    """

    def __init__(self, settings: Settings, data: Data | None = None) -> None:
        self.settings = settings
        self.data = data or Data(SYNTHETIC, 0, 0, False, digest(f"seed {settings.seed}".encode()))

    @abstractmethod
    def sample(self, number: int) -> tuple[Tensor, ...]:
        """Sample `number` of the job, on the CPU."""

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """The micro-batch that begins with sample `first` of the job; the first dimension counts samples."""
        samples = [self.sample(number) for number in range(first, first + self.settings.batch_size)]
        return tuple(torch.stack(parts) for parts in zip(*samples, strict=True))

    def generator(self, number: int) -> torch.Generator:
        """What the sample's random tensors are drawn from."""
        seed = draw_seed(seed=self.settings.seed, sample=number)
        return torch.Generator().manual_seed(seed % 2**63)

    def draw_below(self, limit: int, number: int) -> int:
        """A number below `limit`, of the sample: where its text begins, which file it is."""
        return random.Random(draw_seed(seed=self.settings.seed, sample=number)).randrange(limit)

    def fixed_generator(self) -> torch.Generator:
        """What is equal for all samples is drawn from this."""
        return torch.Generator().manual_seed(self.settings.seed % 2**63)


class Text(Source):
    """Tokens and next tokens, each int64 (length,): a stretch of the text from anywhere."""

    def __init__(self, settings: Settings, corpus: Corpus) -> None:
        super().__init__(settings, corpus.data)
        self._content = corpus.content

    def sample(self, number: int) -> tuple[Tensor, ...]:
        length = self.settings.seq_len
        start = self.draw_below(len(self._content) - length, number)
        stretch = bytearray(self._content[start : start + length + 1])
        row = torch.frombuffer(stretch, dtype=torch.uint8).long()
        return row[:-1], row[1:]


# Of BERT (arXiv:1810.04805, §3.1): how much of a sequence is guessed, and how much of that is left as it was or
# replaced by another byte, so that a mask is not the only one to guess at.
_GUESSED, _KEPT, _REPLACED = 0.15, 0.1, 0.1
# The first token that is no byte stands for the mask.
MASK = 256


class MaskedText(Text):
    """Tokens with some masked, and what these were, each int64 (length,); −100 where nothing is to be guessed.

    As many of every sequence, so that the mean over ranks is the mean over all guesses.
    """

    def sample(self, number: int) -> tuple[Tensor, ...]:
        tokens, _ = super().sample(number)
        count = max(1, round(_GUESSED * len(tokens)))
        generator = self.generator(number)
        guessed = torch.rand(len(tokens), generator=generator).argsort()[:count]
        chance = torch.rand(count, generator=generator)
        other = torch.randint(MASK, (count,), generator=generator)
        shown = torch.where(chance < _KEPT, tokens[guessed], MASK)
        shown = torch.where(chance >= 1.0 - _REPLACED, other, shown)
        targets = torch.full_like(tokens, -100).scatter(0, guessed, tokens[guessed])
        return tokens.scatter(0, guessed, shown), targets


class Images(Source):
    """An image from files, fp32 (channels, size, size) from −1 to 1, and its label, int64 ().

    The middle of each image is cut to a square and scaled.
    """

    def __init__(self, settings: Settings, config: ImageConfig, folder: Folder) -> None:
        super().__init__(settings, folder.data)
        self._size, self._channels = settings.image_size or config.image_size, config.channels
        self._folder = folder

    def sample(self, number: int) -> tuple[Tensor, ...]:
        """Raises `DataError` naming a file that is no image."""
        chosen = self.draw_below(len(self._folder.paths), number)
        pixels = bytearray(self._pixels(self._folder.root / self._folder.paths[chosen]))
        image = torch.frombuffer(pixels, dtype=torch.uint8).view(self._size, self._size, self._channels)
        scaled = image.permute(2, 0, 1).float().div_(127.5).sub_(1.0)
        return scaled, torch.tensor(self._folder.labels[chosen])

    def _pixels(self, path: Path) -> bytes:
        from PIL import Image, ImageOps

        try:
            with Image.open(path) as image:
                converted = image.convert("L" if self._channels == 1 else "RGB")
                return ImageOps.fit(converted, (self._size, self._size)).tobytes()
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"data: {path} cannot be read as an image: {error}") from error


class SyntheticImages(Source):
    """An image, fp32 (channels, size, size), and its label, int64 ().

    Each class has a coarse pattern of its own under noise as strong, so that there is something to learn: 4×4 fields a
    channel, each with a sign.
    """

    def __init__(self, settings: Settings, config: ImageConfig) -> None:
        super().__init__(settings)
        self._size = settings.image_size or config.image_size
        shape = (config.classes, config.channels, 4, 4)
        self._signs = torch.randint(2, shape, generator=self.fixed_generator()) * 2.0 - 1.0

    def sample(self, number: int) -> tuple[Tensor, ...]:
        generator = self.generator(number)
        classes, channels, _, _ = self._signs.shape
        label = torch.randint(classes, (), generator=generator)
        noise = torch.randn(channels, self._size, self._size, generator=generator)
        signs = self._signs.index_select(0, label[None])  # indexing would read the label
        return noise + interpolate(signs, size=(self._size, self._size))[0], label


class Regression(Source):
    """Normal features, fp32 (features,), and what a fixed linear map makes of them, with a little noise, ()."""

    def __init__(self, settings: Settings, config: LinearConfig) -> None:
        super().__init__(settings)
        self._map = torch.randn(config.features, generator=self.fixed_generator()) / config.features**0.5

    def sample(self, number: int) -> tuple[Tensor, ...]:
        generator = self.generator(number)
        features = torch.randn(len(self._map), generator=generator)
        return features, (features * self._map).sum() + 0.1 * torch.randn((), generator=generator)


class OwnBatches(Source):
    """Whatever the user's own workload makes of a micro-batch, whose samples may depend on each other."""

    def __init__(self, settings: Settings, own: Own) -> None:
        super().__init__(settings)
        self._own = own

    def sample(self, number: int) -> tuple[Tensor, ...]:
        raise NotImplementedError("the user makes whole batches")

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """From the generator of its first sample."""
        return tuple(self._own.batch(self.generator(first), self.settings.batch_size))


def open_source(settings: Settings) -> Source:
    """The data of a catalogued workload, read as far as needed to know that they suffice.

    Raises `DataError` where they are missing, unreadable or too few.
    """
    config, inputs = describe(settings.model).config, read_inputs(settings)
    if isinstance(inputs, Corpus):
        return (MaskedText if isinstance(config, BertConfig) else Text)(settings, inputs)
    if isinstance(config, ImageConfig):
        return SyntheticImages(settings, config) if inputs is None else Images(settings, config, inputs)
    assert isinstance(config, LinearConfig)
    return Regression(settings, config)
