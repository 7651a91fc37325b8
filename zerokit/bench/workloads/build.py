"""A workload in a rank: the model and its initialisation on meta, the batches, and their record entries.

Samples are numbered through the job, over all its ranks and steps, and sample i depends on (seed, i) alone: every
engine, stage, world size and re-run sees the same ones in the same order (`worker.training` says who takes which).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from zerokit.bench.catalogue.workloads import (
    BertConfig,
    Config,
    ImageConfig,
    LinearConfig,
    Workload,
    describe,
)
from zerokit.bench.record.measured import Data, Model
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.inputs import SYNTHETIC, digest, read_inputs
from zerokit.bench.workloads.models import MODELS, init_module, materialise, name_modules
from zerokit.bench.workloads.own import Own, resolve
from zerokit.errors import UsageError

Sample = Callable[[int], tuple[Tensor, ...]]
"""Makes a sample on the CPU from the seed of all that is drawn for it."""

# From BERT (arXiv:1810.04805, §3.1): how much of a sequence is guessed, and how much of that is left as it was or
# replaced by another byte, so that a mask is not the only one to guess at.
_GUESSED, _KEPT, _REPLACED = 0.15, 0.1, 0.1
# The first token that is no byte stands for the mask.
MASK = 256


Batch = Callable[[Sequence[int]], tuple[Tensor, ...]]
"""Makes the micro-batch of these samples of the job, on the CPU."""


def open_source(settings: Settings) -> tuple[Data, Batch]:
    """The data of a catalogued workload, read and checked for sufficient size, and its micro-batches.

    Raises `DataError` where they are missing, unreadable or too few.
    """
    config, data = describe(settings.model).config, made_up(settings)
    if (found := read_inputs(settings)) is not None:
        text, data = found
        make = sample_masked_text if isinstance(config, BertConfig) else sample_text
        sample = make(text, settings.seq_len)
    elif isinstance(config, ImageConfig):
        sample = sample_images(config, settings.image_size or config.image_size, settings.seed)
    else:
        assert isinstance(config, LinearConfig)
        sample = sample_regression(config.features, settings.seed)

    def take(numbers: Sequence[int]) -> tuple[Tensor, ...]:
        samples = [sample(draw_seed(seed=settings.seed, sample=number)) for number in numbers]
        return tuple(torch.stack(parts) for parts in zip(*samples, strict=True))

    return data, take


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


def sample_text(text: bytes, length: int) -> Sample:
    """Tokens and next tokens, each int64 (length,), from a random place in the text."""

    def sample(seed: int) -> tuple[Tensor, ...]:
        start = random.Random(seed).randrange(len(text) - length)
        stretch = bytearray(text[start : start + length + 1])
        row = torch.frombuffer(stretch, dtype=torch.uint8).long()
        return row[:-1], row[1:]

    return sample


def sample_masked_text(text: bytes, length: int) -> Sample:
    """Tokens with some masked, and the masked tokens' originals, each int64 (length,); −100 elsewhere.

    As many of every sequence, so that the mean over ranks is the mean over all guesses.
    """
    whole, count = sample_text(text, length), max(1, round(_GUESSED * length))

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


@dataclass
class Loaded:
    """A loaded workload: everything that a training loop needs.

    `data` is the record entry of the training data. `init_fn` initialises one module in place, as
    `ZeroOptimizer(init_fn=)` wants it for a model on meta; None for one that can only be built where it is trained.
    `own` is None for a catalogued workload. `take` makes a micro-batch of any samples.
    """

    settings: Settings
    workload: Workload
    data: Data
    take: Batch
    init_fn: Callable[[nn.Module], None] | None
    own: Own | None = None
    _parameters: int | None = None

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """The micro-batch that starts at a sample of the job, on the CPU."""
        return self.take(range(first, first + self.settings.batch_size))

    def count(self, batch: Sequence[Tensor]) -> int | Tensor:
        """The number of samples, tokens or the like whose mean is the loss of this micro-batch."""
        if self.own is None or self.own.count is None:
            return len(batch[0])
        return self.own.count(*batch)

    def build(self) -> nn.Module:
        """Build the model on the device of the `torch.device` context; `forward(*batch)` returns the scalar loss.

        In memory it has its weights; on meta `init_fn` gives each module the same ones. They depend on the seed and
        the workload alone.
        """
        model = self._build()
        if self.settings.recompute:
            # It brings zerokit's runtime along, which is no part of other engines' memory.
            from zerokit.training.recomputation import recompute_blocks

            recompute_blocks(model)
        return model

    def _build(self) -> nn.Module:
        if self.own is None:
            return build(self.workload.name, seed=self.settings.seed)
        # From random numbers that are the same on every rank and leave the others as they were.
        on_cuda = _default_device().type == "cuda"
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_cuda else []):
            torch.manual_seed(self.settings.seed)
            model = self.own.build()
        self._parameters = sum(one.numel() for one in model.parameters() if one.requires_grad)
        return model

    @cached_property
    def model(self) -> Model:
        """The record entry of the model. The first call may build the model on meta, so do not time it."""
        settings, workload, own = self.settings, self.workload, self.own
        config: dict[str, Any] = {} if workload.config is None else asdict(workload.config)
        if workload.images is not None and settings.image_size:
            config["image_size"] = settings.image_size
        unit, units_per_sample = workload.unit, 1 if workload.text is None else settings.seq_len
        if own is not None:
            unit, units_per_sample = own.unit, own.units_per_sample
        flops, convention = self._flops(settings.batch_size * units_per_sample)
        if (parameters := workload.parameters or self._parameters) is None:
            with torch.device("meta"):
                self._build()
            parameters = self._parameters or 0
        return Model(
            name=workload.name,
            parameters=parameters,
            config=config,
            unit=unit,
            units_per_sample=units_per_sample,
            flops_per_unit=flops,
            flops_convention=convention,
        )

    def _flops(self, units: int) -> tuple[float | None, str | None]:
        """FLOPs of each of a micro-batch's `units`, forward and backward, and a note on how they were counted."""
        if self.workload.text is not None:
            return self.workload.text.flops(self.settings.seq_len)
        try:
            # Without recomputation, whose FLOPs are no work on the model.
            return count_flops(self._build, self.batch(0)) / units, (
                "counted by torch's FlopCounterMode over forward and backward: matrix products and convolutions only"
            )
        except Exception as error:
            if self.own is None:
                raise
            # The user's own model may do what is impossible on meta; it is trained all the same.
            return None, f"not counted: {type(error).__name__} on meta"


def load(settings: Settings) -> Loaded:
    """Load the workload of `settings`, ready to be built.

    Raises `UsageError` for one that is not known here or whose library is missing, `DataError` for bad data.
    """
    workload = describe(settings.model)
    if workload.missing is not None:
        raise UsageError(workload.missing)
    if workload.config is None:
        own = resolve(workload.name)
        if settings.pace and own.count is None:
            raise UsageError(
                f"{workload.name}: --pace gives ranks micro-batches of different sizes, and the mean over all ranks "
                "needs what each loss is a mean of: give Own(count=…), such as count=lambda x, y: len(y), or omit "
                "--pace"
            )

        def take(numbers: Sequence[int]) -> tuple[Tensor, ...]:  # whose samples may depend on each other
            drawn: Any = own.batch(generator(draw_seed(seed=settings.seed, sample=numbers[0])), len(numbers))
            parts = drawn if isinstance(drawn, tuple | list) else ()
            others = [type(one).__name__ for one in parts if not isinstance(one, Tensor)]
            if others or not parts:
                found = f"{type(drawn).__name__}{f' that holds a {others[0]}' if others else ''}"
                raise UsageError(f"{workload.name}: batch() returned a {found}: expected a tuple of tensors")
            return tuple(parts)

        return Loaded(settings, workload, made_up(settings), take, own.init_fn, own)
    return Loaded(settings, workload, *open_source(settings), init_module)


def build(name: str, *, seed: int = 0) -> nn.Module:
    """Build a model of the catalogue on the device of the `torch.device` context ("meta" too)."""
    workload = describe(name)
    if workload.config is None:
        raise UsageError(f"model {name!r} is not in the catalogue: load() builds it")
    return build_model(workload.config, workload.library, seed=seed)


def build_model(config: Config, library: str | None, *, seed: int) -> nn.Module:
    """Build the model of a configuration, with `library` or, if None, with `models`."""
    device = _default_device()
    with torch.device("meta"):
        if library is None:
            model = MODELS[type(config)](config)
        else:
            from zerokit.bench.workloads.library import make_library

            model = make_library(config)
    name_modules(model, seed)
    if device.type != "meta":
        materialise(model, device)
    return model


def _default_device() -> torch.device:
    """Where tensors are made, `torch.device` as a context included: torch 2.6's own function sees no context."""
    return torch.empty(0).device


def count_flops(build: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> int:
    """A model's FLOPs of a batch, forward and backward: nothing is computed, model and batch are on meta.

    Raises whatever a model raises that cannot run there.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = build()
    counter = FlopCounterMode(display=False)
    with counter:
        loss = model(*(tensor.to("meta") for tensor in batch))
        loss.backward()
    return counter.get_total_flops()
