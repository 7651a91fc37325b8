"""Where a workload's batches come from: one class a kind of data, each the same few lines around one drawing.

A batch depends on (seed, step, rank, micro-batch) alone: every engine, stage and re-run sees the same one, and every
rank another. torch is imported only where a batch is made, so that the launcher can look at the data beforehand.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zerokit.bench.data import (
    STANDARD_LIBRARY,
    SYNTHETIC,
    Corpus,
    batch,
    draw_seed,
    load_corpus,
    require_length,
)
from zerokit.bench.workloads.catalogue import describe
from zerokit.bench.workloads.configs import ImageConfig, LinearConfig

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


def open_source(settings: Settings) -> Source:
    """The data of a bench, read as far as needed to know that they suffice.

    Raises `DataError` where they are missing, unreadable or too few.
    """
    workload = describe(settings.model)
    if workload.text is not None:
        corpus = load_corpus(settings.data or STANDARD_LIBRARY, seed=settings.seed)
        require_length(corpus, settings.seq_len)
        return Text(settings, corpus)
    if workload.images is not None:
        return SyntheticImages(settings, workload.images)
    assert isinstance(workload.config, LinearConfig)
    return Regression(settings, workload.config)
