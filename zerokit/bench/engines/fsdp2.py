"""torch's FSDP2: `fully_shard` on every child of the outermost ModuleLists, and on the root."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.engines.trainer import Trainer
from zerokit.bench.workloads.build import Loaded
from zerokit.errors import UsageError
from zerokit.planning.matrices import outermost_blocks

# It records events on streams, which torch 2.6 has not given to its stand-in for CPUs.
TRAINS_ON_CPU = hasattr(torch.cpu.Stream, "record_event")


class Fsdp2Trainer(Trainer):
    """FSDP2; gradients are reduced in the last micro-batch, and each rank sums whole gradients until then."""

    autocasts = False

    def make_model(self, loaded: Loaded) -> nn.Module:
        """The model, built on the meta device if the workload supports it.

        At stage 3 blocks are freed after the forward and the root, as by default, is not: backward begins with it. At
        stage 2 nothing is freed before the backward has used it.
        """
        device = self.accelerator.device
        if device.type == "cpu" and not TRAINS_ON_CPU:
            raise UsageError(
                f"FSDP2 of torch {torch.__version__} trains on GPUs only: install a later torch to train on CPUs"
            )
        shape, names = self.settings.shape or (dist.get_world_size(),), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names[-len(shape) :])
        options: dict[str, Any] = {"mesh": mesh}
        if self.settings.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        if self.settings.stage == 2:
            options["reshard_after_forward"] = False
        model = self.build(loaded, on_meta=loaded.init_fn is not None)
        for module in [*outermost_blocks(model), model]:
            fully_shard(module, **options)
        if loaded.init_fn is not None:
            model.to_empty(device=device)
            initialise(model, loaded.init_fn, device)
        return model

    def make_optimizers(self) -> Sequence[Optimizer]:
        """torch's classes, with `FullTensorMuon` for Muon."""
        return [
            FullTensorMuon(share.parameters, **share.options) if share.whole else share.build()
            for share in shares_of(self.model, self.settings)
        ]

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_is_last_backward(last)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def clip_to(self, largest: float) -> Tensor:
        norm = super().clip_to(largest)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class FullTensorMuon(Optimizer):
    """`torch.optim.Muon` on DTensors, as programs with FSDP2 run it: each rank gathers each matrix by `full_tensor()`.

    The momentum stays sharded, and what is gathered is the update before it is made orthogonal: one gather a matrix,
    where a step of the class on whole weights, gradients and momenta would take three. All ranks compute the same
    orthogonal matrix, and each updates its own shard.
    """

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        checked = torch.optim.Muon(params, **options)
        super().__init__(checked.param_groups, checked.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no bench has a closure
        """Update the shards from their gradients."""
        for group in self.param_groups:
            names = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
            options = {name: group[name] for name in names}
            for shard in group["params"]:
                if shard.grad is None:
                    continue
                momentum = self.state[shard].setdefault("momentum_buffer", torch.zeros_like(shard.grad))
                momentum.lerp_(shard.grad, 1 - group["momentum"])
                update = shard.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.add_(part_of(_orthogonal_step(update.full_tensor(), options), shard))


def _orthogonal_step(update: Tensor, options: dict[str, Any]) -> Tensor:
    """What torch's Muon adds to a weight for this update: its step from zero, without momentum and decay."""
    step = nn.Parameter(torch.zeros_like(update))
    step.grad = update
    torch.optim.Muon([step], momentum=0.0, nesterov=False, weight_decay=0.0, **options).step()
    return step.detach()


@torch.no_grad()
def initialise(model: nn.Module, init_fn: Callable[[nn.Module], None], device: torch.device) -> None:
    """Copy an unsharded model's values into the parameters, one module at a time.

    Each module is initialised with whole parameters instead of its shards, which then take their part. A buffer is
    whole, and is filled where it is.
    """
    for module in model.modules():
        shards = {name: shard for name, shard in module._parameters.items() if shard is not None}
        if not shards and not any(True for _ in module.buffers(recurse=False)):
            continue
        wholes = {
            name: nn.Parameter(torch.empty(shard.shape, dtype=shard.dtype, device=device))
            for name, shard in shards.items()
        }
        module._parameters.update(wholes)
        try:
            init_fn(module)
            for name, shard in shards.items():
                shard.copy_(part_of(wholes[name].detach(), shard))
        finally:
            module._parameters.update(shards)


def part_of(whole: Tensor, like: Tensor) -> DTensor:
    """This rank's part of a tensor that every rank has, cut as the DTensor `like` is; nothing is sent."""
    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    replica = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: DTensor = replica.redistribute(mesh, like.placements)
    return part
