"""A workload in a rank: the model, what initialises it on meta, the batches, what the record says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

from torch import Tensor, nn

from zerokit.bench import record
from zerokit.bench.settings import Settings
from zerokit.bench.workloads.catalogue import Workload, describe
from zerokit.bench.workloads.configs import GPTConfig, LinearConfig, LlamaConfig, MLPConfig
from zerokit.bench.workloads.initialise import init_module
from zerokit.bench.workloads.inputs import Source, open_source
from zerokit.errors import UsageError


@dataclass(frozen=True)
class Loaded:
    """What `load` gives: everything that a training loop needs to know of a workload.

    Attributes:
        init_fn: initialises one module in place, as `ZeroOptimizer(init_fn=)` wants it for a model on meta. None for a
            model that can only be built where it is trained.
        data: what the record says of the training data.
    """

    settings: Settings
    workload: Workload
    source: Source
    init_fn: Callable[[nn.Module], None] | None

    def build(self) -> nn.Module:
        """The model, on the device that `torch.device` as a context asks for; `forward(*batch)` is the scalar loss.

        In memory it has its weights; on meta `init_fn` gives each module the same ones. They depend on the seed and
        the workload alone.
        """
        return build(self.workload.name, seed=self.settings.seed)

    def batch(self, step: int, rank: int, micro_batch: int) -> tuple[Tensor, ...]:
        """One rank's micro-batch of one step, on the CPU; it depends on these three and the seed alone."""
        return self.source.batch(step, rank, micro_batch)

    @property
    def data(self) -> record.Data:
        return self.source.data()

    @cached_property
    def model(self) -> record.Model:
        """What the record says of the model. Takes up to some seconds the first time: not for a timed step."""
        parameters = self.workload.parameters
        assert parameters is not None
        unit = self.workload.unit
        return record.Model(
            name=self.workload.name,
            parameters=parameters,
            config={} if self.workload.config is None else asdict(self.workload.config),
            unit=unit,
            units_per_sample=self.settings.seq_len if unit == "tokens" else 1,
            flops_per_unit=None,
            flops_convention=None,
        )


def load(settings: Settings) -> Loaded:
    """The workload of `settings`, ready to be built.

    Raises `UsageError` for one that is not known here or whose library is missing, `DataError` for bad data.
    """
    workload = describe(settings.model)
    if workload.missing is not None:
        raise UsageError(workload.missing)
    return Loaded(settings, workload, open_source(settings), init_module)


def build(name: str, *, seed: int = 0) -> nn.Module:
    """The model of a catalogued name, on the device that `torch.device` as a context asks for ("meta" too)."""
    config = describe(name).config
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
            raise UsageError(f"model {name!r} is not built in")
