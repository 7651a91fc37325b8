"""Where a workload's batches come from: one class a kind of data, each the same few lines around one drawing.

A batch depends on (seed, step, rank, micro-batch) alone: every engine, stage and re-run sees the same one, and every
rank another. torch is imported only where a batch is made, so that the launcher can look at the data beforehand.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zerokit.bench.workloads import images
from zerokit.bench.workloads.catalogue import describe
from zerokit.bench.workloads.configs import BertConfig, ImageConfig, LinearConfig
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
    from zerokit.bench.settings import Settings


class Source(Protocol):
    """Where batches come from."""

    def data(self) -> Data:
        """What the record says of it."""
        ...

    def batch(self, step: int, rank: int, micro_batch: int) -> tuple[Tensor, ...]:
        """One rank's micro-batch of one step, on the CPU."""
        ...


def generator(settings: Settings, step: int, rank: int, micro_batch: int) -> torch.Generator:
    """A generator on the CPU for one micro-batch."""
    import torch

    seed = draw_seed(seed=settings.seed, step=step, rank=rank, micro_batch=micro_batch)
    return torch.Generator().manual_seed(seed % 2**63)


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

    def batch(self, step: int, rank: int, micro_batch: int) -> tuple[Tensor, ...]:
        """Stretches of the text, from places drawn anew each time."""
        return batch(
            self.corpus,
            seed=self.settings.seed,
            step=step,
            rank=rank,
            micro_batch=micro_batch,
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

    def batch(self, step: int, rank: int, micro_batch: int) -> tuple[Tensor, ...]:
        """The same stretches as for a causal model, with places to guess drawn anew each time."""
        import torch

        tokens, _ = self.text.batch(step, rank, micro_batch)
        drawn = generator(self.text.settings, step, rank, micro_batch)
        count = max(1, round(_GUESSED * tokens.shape[1]))
        places = torch.rand(tokens.shape, generator=drawn).argsort(1)[:, :count]
        targets = torch.full_like(tokens, -100).scatter_(1, places, tokens.gather(1, places))
        chance = torch.rand(places.shape, generator=drawn)
        other = torch.randint(MASK, places.shape, generator=drawn)
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

    def batch(self, step: int, rank: int, micro_batch: int) -> tuple[Tensor, ...]:
        """Files drawn anew each time."""
        return images.batch(
            self.folder,
            seed=self.settings.seed,
            step=step,
            rank=rank,
            micro_batch=micro_batch,
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

    def batch(self, step: int, rank: int, micro_batch: int) -> tuple[Tensor, ...]:
        """A pattern of 4×4 fields a channel, each of its class's sign, under noise as strong."""
        import torch
        from torch.nn.functional import interpolate

        size, channels = self.settings.image_size or self.config.image_size, self.config.channels
        drawn = generator(self.settings, step, rank, micro_batch)
        labels = torch.randint(self.config.classes, (self.settings.batch_size,), generator=drawn)
        fixed = torch.Generator().manual_seed(self.settings.seed % 2**63)
        signs = torch.randint(2, (self.config.classes, channels, 4, 4), generator=fixed) * 2.0 - 1.0
        noise = torch.randn(len(labels), channels, size, size, generator=drawn)
        return noise + interpolate(signs[labels], size=(size, size)), labels


@dataclass(frozen=True, slots=True)
class Regression:
    """Features, fp32 (batch, features), and what a fixed linear map makes of them, with a little noise, (batch,)."""

    settings: Settings
    config: LinearConfig

    def data(self) -> Data:
        """Made up."""
        return made_up(self.settings)

    def batch(self, step: int, rank: int, micro_batch: int) -> tuple[Tensor, ...]:
        """Normal features; the map is drawn from the seed alone."""
        import torch

        drawn = generator(self.settings, step, rank, micro_batch)
        features = torch.randn(self.settings.batch_size, self.config.features, generator=drawn)
        fixed = torch.Generator().manual_seed(self.settings.seed % 2**63)
        weights = torch.randn(self.config.features, generator=fixed) / self.config.features**0.5
        return features, features @ weights + 0.1 * torch.randn(len(features), generator=drawn)


@dataclass(frozen=True, slots=True)
class OwnBatches:
    """Whatever the user's own workload makes."""

    settings: Settings
    own: Own

    def data(self) -> Data:
        """Made up."""
        return made_up(self.settings)

    def batch(self, step: int, rank: int, micro_batch: int) -> tuple[Tensor, ...]:
        """From a generator for this micro-batch alone."""
        drawn = generator(self.settings, step, rank, micro_batch)
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
