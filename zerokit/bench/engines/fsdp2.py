"""torch's FSDP2: `fully_shard` on every child of the outermost ModuleLists, and on the root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from zerokit.bench.engines.trainer import Trainer
from zerokit.bench.workloads.build import Loaded
from zerokit.errors import UsageError

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

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_is_last_backward(last)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def clip_to(self, largest: float) -> Tensor:
        norm = super().clip_to(largest)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def outermost_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The children of every outermost ModuleList: the layers of a transformer, the stages of a ResNet."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from outermost_blocks(child)


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
                assert isinstance(shard, DTensor)
                whole = wholes[name].detach()
                mesh = shard.device_mesh
                replica = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
                shard.copy_(replica.redistribute(mesh, shard.placements))
        finally:
            module._parameters.update(shards)
