"""A workload in a rank: the model, what initialises it on meta, the batches, what the record says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.bench import record
from zerokit.bench.catalogue.sizes import Config, GPTConfig, LinearConfig, LlamaConfig, MLPConfig
from zerokit.bench.catalogue.workloads import Workload, describe
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.flops import count_flops, text_flops
from zerokit.bench.workloads.initialise import default_device, init_module
from zerokit.bench.workloads.inputs import OwnBatches, Source, open_source
from zerokit.bench.workloads.own import Own, resolve
from zerokit.errors import UsageError

InitFunction = Callable[[nn.Module], None]


class Loaded:
    """What `load` gives: everything that a training loop needs to know of a workload.

    Attributes:
        settings: of the bench.
        workload: as the catalogue describes it.
        init_fn: initialises one module in place, as `ZeroOptimizer(init_fn=)` wants it for a model on meta. None for a
            model that can only be built where it is trained.
    """

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        source: Source,
        make: Callable[[], nn.Module],
        init_fn: InitFunction | None,
    ) -> None:
        self.settings = settings
        self.workload = workload
        self.init_fn = init_fn
        self._source = source
        self._make = make

    def build(self) -> nn.Module:
        """The model, on the device that `torch.device` as a context asks for; `forward(*batch)` is the scalar loss.

        In memory it has its weights; on meta `init_fn` gives each module the same ones. They depend on the seed and
        the workload alone.
        """
        return self._make()

    def batch(self, first: int) -> tuple[Tensor, ...]:
        """The micro-batch that begins with sample `first` of the job, on the CPU; it depends on the seed besides."""
        return self._source.batch(first)

    @property
    def data(self) -> record.Data:
        """What the record says of the training data."""
        return self._source.data()

    @cached_property
    def model(self) -> record.Model:
        """What the record says of the model; the first time it may build it on meta: not for a timed step."""
        settings, workload = self.settings, self.workload
        config: dict[str, Any] = {} if workload.config is None else asdict(workload.config)
        if workload.images is not None:
            config["image_size"] = settings.image_size or workload.images.image_size
        flops, convention = self._flops()
        own = self._source.own if isinstance(self._source, OwnBatches) else None
        return record.Model(
            name=workload.name,
            parameters=self._parameters(),
            config=config,
            unit=workload.unit if own is None else own.unit,
            units_per_sample=self._units_per_sample(),
            flops_per_unit=flops,
            flops_convention=convention,
        )

    def _units_per_sample(self) -> int:
        if isinstance(self._source, OwnBatches):
            return self._source.own.units_per_sample
        return 1 if self.workload.text is None else self.settings.seq_len

    def _parameters(self) -> int:
        if self.workload.parameters is not None:
            return self.workload.parameters
        with torch.device("meta"):
            model = self.build()
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def _flops(self) -> tuple[float | None, str | None]:
        if self.workload.text is not None:
            return text_flops(self.workload.text, self.settings.seq_len)
        try:
            a_sample, convention = count_flops(self.build, self.batch(0))
        except Exception as error:
            if self.workload.config is not None:
                raise
            # The user's own model may do what is impossible on meta; it is trained all the same.
            return None, f"not counted: {type(error).__name__} on meta"
        return a_sample / self._units_per_sample(), convention


def load(settings: Settings) -> Loaded:
    """The workload of `settings`, ready to be built.

    Raises `UsageError` for one that is not known here or whose library is missing, `DataError` for bad data.
    """
    workload = describe(settings.model)
    if workload.missing is not None:
        raise UsageError(workload.missing)
    if workload.config is None:
        own = resolve(workload.name)
        return Loaded(
            settings, workload, OwnBatches(settings, own), lambda: _build_own(own, settings.seed), own.init_fn
        )
    source = open_source(settings)
    return Loaded(
        settings,
        workload,
        source,
        lambda: build(workload.name, seed=settings.seed),
        init_function(workload.name),
    )


def init_function(name: str) -> InitFunction:
    """What initialises one module of a catalogued model in place, its buffers as well."""
    workload = describe(name)
    if workload.library is None or workload.config is None:
        return init_module
    from zerokit.bench.workloads.library import init_library

    return init_library(workload.config)


def build(name: str, *, seed: int = 0) -> nn.Module:
    """The model of a catalogued name, on the device that `torch.device` as a context asks for ("meta" too)."""
    workload = describe(name)
    if workload.config is None:
        raise UsageError(f"model {name!r} is not in the catalogue: load() builds it")
    if workload.library is not None:
        from zerokit.bench.workloads.library import build_library

        return build_library(workload.config, seed=seed)
    return _build_here(workload.config, seed)


def _build_here(config: Config, seed: int) -> nn.Module:
    match config:
        case GPTConfig():
            from zerokit.bench.workloads.gpt import GPT

            return GPT(config, seed=seed)
        case LlamaConfig():
            from zerokit.bench.workloads.llama import Llama

            return Llama(config, seed=seed)
        case MLPConfig():
            from zerokit.bench.workloads.small import MLP

            return MLP(config, seed=seed)
        case LinearConfig():
            from zerokit.bench.workloads.small import Linear

            return Linear(config, seed=seed)
        case _:
            raise AssertionError(f"{config} is built by a library")


def _build_own(own: Own, seed: int) -> nn.Module:
    """The user's model, from random numbers that are the same on every rank and leave the others as they were."""
    on_cuda = default_device().type == "cuda"
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_cuda else []):
        torch.manual_seed(seed)
        return own.build()
