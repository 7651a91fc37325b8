"""A workload in a rank: the model and its initialisation on meta, the batches, and their record entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.bench import record
from zerokit.bench.catalogue.sizes import Config
from zerokit.bench.catalogue.workloads import Workload, describe
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.initialise import init_module, materialise, name_modules
from zerokit.bench.workloads.models import MODELS
from zerokit.bench.workloads.own import Own, resolve
from zerokit.bench.workloads.sources import Batch, made_up, open_own, open_source
from zerokit.errors import UsageError


@dataclass
class Loaded:
    """A loaded workload: everything that a training loop needs.

    Attributes:
        settings: of the bench.
        workload: as the catalogue describes it.
        data: the record entry of the training data.
        batch: makes the micro-batch that starts at a sample of the job, on the CPU; it also depends on the seed.
        init_fn: initialises one module in place, as `ZeroOptimizer(init_fn=)` wants it for a model on meta. None for a
            model that can only be built where it is trained.
        own: the user's own workload; None for a catalogued one.
    """

    settings: Settings
    workload: Workload
    data: record.Data
    batch: Batch
    init_fn: Callable[[nn.Module], None] | None
    own: Own | None = None

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
            return self.own.build()

    @cached_property
    def model(self) -> record.Model:
        """The record entry of the model. The first call may build the model on meta, so do not time it."""
        settings, workload, own = self.settings, self.workload, self.own
        config: dict[str, Any] = {} if workload.config is None else asdict(workload.config)
        if workload.images is not None and settings.image_size:
            config["image_size"] = settings.image_size
        unit, units_per_sample = workload.unit, 1 if workload.text is None else settings.seq_len
        if own is not None:
            unit, units_per_sample = own.unit, own.units_per_sample
        flops, convention = self._flops(units_per_sample)
        return record.Model(
            name=workload.name,
            parameters=self._parameters(),
            config=config,
            unit=unit,
            units_per_sample=units_per_sample,
            flops_per_unit=flops,
            flops_convention=convention,
        )

    def _parameters(self) -> int:
        if self.workload.parameters is not None:
            return self.workload.parameters
        with torch.device("meta"):
            model = self.build()
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def _flops(self, units_per_sample: int) -> tuple[float | None, str | None]:
        if self.workload.text is not None:
            return self.workload.text.flops(self.settings.seq_len)
        try:
            a_sample, convention = count_flops(self.build, self.batch(0))
        except Exception as error:
            if self.own is None:
                raise
            # The user's own model may do what is impossible on meta; it is trained all the same.
            return None, f"not counted: {type(error).__name__} on meta"
        return a_sample / units_per_sample, convention


def load(settings: Settings) -> Loaded:
    """Load the workload of `settings`, ready to be built.

    Raises `UsageError` for one that is not known here or whose library is missing, `DataError` for bad data.
    """
    workload = describe(settings.model)
    if workload.missing is not None:
        raise UsageError(workload.missing)
    if workload.config is None:
        own = resolve(workload.name)
        return Loaded(settings, workload, made_up(settings), open_own(settings, own), own.init_fn, own)
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


def count_flops(build: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> tuple[float, str]:
    """A model's FLOPs per sample, forward and backward, and a note on how they were counted.

    Nothing is computed: model and batch are on meta. Raises whatever a model raises that cannot run there.

    Args:
        build: makes the model, whose `forward(*batch)` is the loss.
        batch: any of its micro-batches; the first dimension of its first tensor counts samples.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = build()
    counter = FlopCounterMode(display=False)
    with counter:
        loss = model(*(tensor.to("meta") for tensor in batch))
        loss.backward()
    return counter.get_total_flops() / len(batch[0]), (
        "counted by torch's FlopCounterMode over forward and backward: matrix products and convolutions only"
    )
