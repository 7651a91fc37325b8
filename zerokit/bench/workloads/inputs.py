"""Where a workload's batches come from: one class a kind of data, each the same few lines around one drawing.

Samples are numbered through the job, over all its ranks and steps, and sample i depends on (seed, i) alone: every
engine, stage, world size and re-run sees the same ones in the same order (`batches` says who takes which). torch is
imported only where a batch is made, so that the launcher can look at the data beforehand.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zerokit.bench.catalogue.sizes import BertConfig, ImageConfig, LinearConfig
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.workloads import images
from zerokit.bench.workloads.own import Own, find
from zerokit.bench.workloads.text import (
    SYNTHETIC,
    Corpus,
    batch,
    draw_seed,
    load_corpus,
    require_length,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zerokit.bench.record import Data
    from zerokit.bench.record.settings import Settings


class Source(Protocol):
    """Where batches come from."""

    def data(self) -> Data:
        """What the record says of it."""
        ...

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """The micro-batch that begins with sample `first` of the job, on the CPU."""
        ...


def generator(settings: Settings, sample: int) -> torch.Generator:
    """A generator on the CPU for one sample of the job."""
    import torch

    return torch.Generator().manual_seed(draw_seed(seed=settings.seed, sample=sample) % 2**63)


def generators(settings: Settings, first: int) -> list[torch.Generator]:
    """Those of the samples of a micro-batch."""
    return [generator(settings, sample) for sample in range(first, first + settings.batch_size)]


def made_up(settings: Settings) -> Data:
    """What the record says of data that come from the seed."""
    from zerokit.bench.record import Data

    digest = hashlib.blake2b(f"seed {settings.seed}".encode(), digest_size=16).hexdigest()
    return Data(SYNTHETIC, 0, 0, False, digest)


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens and next tokens, each int64 (batch, length)."""

    settings: Settings
    corpus: Corpus

    def data(self) -> Data:
        """The corpus."""
        from zerokit.bench.record import Data

        corpus = self.corpus
        return Data(corpus.source, len(corpus.content), corpus.files, corpus.truncated, corpus.digest)

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """Stretches of the text, from places drawn anew each time."""
        return batch(
            self.corpus,
            seed=self.settings.seed,
            first=first,
            batch_size=self.settings.batch_size,
            length=self.settings.seq_len,
        )


# Of BERT (arXiv:1810.04805, §3.1): how much of a sequence is guessed, and how much of that is left as it was or
# replaced by another byte, so that a mask is not the only place to guess at.
_GUESSED, _KEPT, _REPLACED = 0.15, 0.1, 0.1
# The first token that is no byte stands for the mask.
MASK = 256


@dataclass(frozen=True, slots=True)
class MaskedText:
    """Tokens with some masked, and what these were, each int64 (batch, length); −100 where nothing is to be guessed.

    As many of every sequence, so that the mean over ranks is the mean over all guesses.
    """

    text: Text

    def data(self) -> Data:
        """The corpus."""
        return self.text.data()

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """The same stretches as for a causal model, with places to guess drawn anew each time."""
        import torch

        tokens, _ = self.text.batch(first)
        length = tokens.shape[1]
        count = max(1, round(_GUESSED * length))
        drawn = [
            (
                torch.rand(length, generator=one).argsort()[:count],
                torch.rand(count, generator=one),
                torch.randint(MASK, (count,), generator=one),
            )
            for one in generators(self.text.settings, first)
        ]
        places, chance, other = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        targets = torch.full_like(tokens, -100).scatter_(1, places, tokens.gather(1, places))
        shown = torch.where(chance < _KEPT, tokens.gather(1, places), torch.full_like(places, MASK))
        shown = torch.where(chance >= 1.0 - _REPLACED, other, shown)
        return tokens.scatter(1, places, shown), targets


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Images from files, fp32 (batch, channels, size, size), and labels, int64 (batch,)."""

    settings: Settings
    config: ImageConfig
    folder: images.Folder

    def data(self) -> Data:
        """The files."""
        from zerokit.bench.record import Data

        folder = self.folder
        return Data(str(folder.root), folder.size_bytes, len(folder.paths), folder.truncated, folder.digest)

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """Files drawn anew each time."""
        return images.batch(
            self.folder,
            seed=self.settings.seed,
            first=first,
            batch_size=self.settings.batch_size,
            size=self.settings.image_size or self.config.image_size,
            channels=self.config.channels,
        )


@dataclass(frozen=True, slots=True)
class SyntheticImages:
    """Images, fp32 (batch, channels, size, size), and labels, int64 (batch,).

    Each class has a coarse pattern of its own under the noise, so that there is something to learn.
    """

    settings: Settings
    config: ImageConfig

    def data(self) -> Data:
        """Made up."""
        return made_up(self.settings)

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """A pattern of 4×4 fields a channel, each of its class's sign, under noise as strong."""
        import torch
        from torch.nn.functional import interpolate

        size, channels = self.settings.image_size or self.config.image_size, self.config.channels
        drawn = [
            (
                torch.randint(self.config.classes, (), generator=one),
                torch.randn(channels, size, size, generator=one),
            )
            for one in generators(self.settings, first)
        ]
        labels, noise = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        fixed = torch.Generator().manual_seed(self.settings.seed % 2**63)
        signs = torch.randint(2, (self.config.classes, channels, 4, 4), generator=fixed) * 2.0 - 1.0
        return noise + interpolate(signs[labels], size=(size, size)), labels


@dataclass(frozen=True, slots=True)
class Regression:
    """Features, fp32 (batch, features), and what a fixed linear map makes of them, with a little noise, (batch,)."""

    settings: Settings
    config: LinearConfig

    def data(self) -> Data:
        """Made up."""
        return made_up(self.settings)

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """Normal features; the map is drawn from the seed alone."""
        import torch

        drawn = [
            (torch.randn(self.config.features, generator=one), torch.randn((), generator=one))
            for one in generators(self.settings, first)
        ]
        features, noise = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        fixed = torch.Generator().manual_seed(self.settings.seed % 2**63)
        weights = torch.randn(self.config.features, generator=fixed) / self.config.features**0.5
        # Not a product of matrices, whose bits may depend on how many samples there are.
        return features, (features * weights).sum(1) + 0.1 * noise


@dataclass(frozen=True, slots=True)
class OwnBatches:
    """Whatever the user's own workload makes of a micro-batch, whose samples may depend on each other."""

    settings: Settings
    own: Own

    def data(self) -> Data:
        """Made up."""
        return made_up(self.settings)

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """From the generator of its first sample."""
        drawn = generator(self.settings, first)
        return tuple(self.own.batch(drawn, self.settings.batch_size))


def open_source(settings: Settings) -> Source:
    """The data of a catalogued workload, read as far as needed to know that they suffice.

    Raises `DataError` where they are missing, unreadable or too few.
    """
    workload = describe(settings.model)
    source = settings.data or workload.default_data
    if workload.text is not None:
        corpus = load_corpus(source, seed=settings.seed)
        require_length(corpus, settings.seq_len)
        text = Text(settings, corpus)
        return MaskedText(text) if isinstance(workload.text, BertConfig) else text
    if workload.images is not None:
        if source == SYNTHETIC:
            return SyntheticImages(settings, workload.images)
        return ImageFolder(settings, workload.images, images.open_folder(source, workload.images.classes))
    assert isinstance(workload.config, LinearConfig)
    return Regression(settings, workload.config)


def check_inputs(settings: Settings) -> None:
    """What the launcher can tell beforehand, without torch: raises as `open_source` and `own.find` do."""
    if describe(settings.model).config is None:
        find(settings.model)
    else:
        open_source(settings)
