"""Checkpoints of the real frameworks: the fixtures that `tests/formats` reads, and runs that go on from ours.

    torchrun --nproc-per-node 2 tests/formats/make_fixtures.py OUT deepspeed STAGE PRECISION
    torchrun --nproc-per-node 2 tests/formats/make_fixtures.py OUT fsdp2 NAMING
    torchrun --nproc-per-node 2 tests/formats/make_fixtures.py OUT accelerate
    torchrun --nproc-per-node 2 tests/formats/make_fixtures.py CKPT resume-deepspeed STAGE PRECISION WORLD
    torchrun --nproc-per-node 2 tests/formats/make_fixtures.py CKPT resume-fsdp2 WORLD

`scripts/peers` makes the environment that this needs, and all fixtures. Beside each checkpoint,
`expected.safetensors` holds the weights, masters and moments that the framework itself had when it saved, and
`losses.json` those of its run, which went on after the save.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

STEPS = 3
WIDTH, TOKENS = 24, 37


class Model(nn.Module):
    """Tied, frozen, buffers, a parameter smaller than the world, and sizes that no world divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, 7)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * self.scale
        self.seen += len(tokens)
        self.running.mul_(0.9).add_(0.1)  # equal on all ranks: frameworks save that of any
        hidden = self.norm(hidden) + self.frozen(hidden).sum(-1, keepdim=True)
        return self.head(hidden)


def batch(step: int, rank: int) -> Tensor:
    """Tokens [8] of one rank's step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(TOKENS, (8,), generator=generator)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay and a learning rate of their own, and the rest."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    tokens = batch(step, rank)
    return nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))


def deepspeed_engine(stage: int, precision: str, accumulated: int = 1) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
    deepspeed.init_distributed("gloo")
    # A CPU's fp16 is slow, but there.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    config = {
        "gradient_accumulation_steps": accumulated,
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 300,  # elements: several sub-groups in the first group
        },
        "zero_allow_untrained_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 4},
    }
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(model: Any, learn: Callable[[Tensor], object], first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(model, step, dist.get_rank())
        learn(loss)
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def learner(engine: Any) -> Callable[[Tensor], object]:
    return lambda loss: (engine.backward(loss), engine.step())


def resume_deepspeed(path: Path, stage: int, precision: str, source_world: int) -> list[float]:
    """The losses of the steps after the checkpoint, with the batches of `source_world` ranks."""
    world = int(os.environ["WORLD_SIZE"])
    engine = deepspeed_engine(stage, precision, source_world // world)
    loaded, _ = engine.load_checkpoint(str(path))
    assert loaded is not None, f"DeepSpeed did not load {path}"
    losses = []
    for step in range(STEPS, 2 * STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for rank in range(dist.get_rank(), source_world, world):
            loss = loss_of(engine, step, rank)
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / source_world)
    return losses


def resume_fsdp2(path: Path, source_world: int) -> list[float]:
    """The same with FSDP2."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = fsdp2_model()
    weights, states = get_state_dict(model, optimizer)
    content = {"model": weights, "optim": states}
    dcp.load(content, checkpoint_id=str(path))
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"])
    world, losses = dist.get_world_size(), []
    for step in range(STEPS, 2 * STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for first in range(0, source_world, world):
            rank = first + dist.get_rank()
            there = rank < source_world  # a rank without a batch left takes part with a loss of nothing
            loss = loss_of(model, step, rank if there else 0)
            (loss * (world / source_world if there else 0.0)).backward()
            total += loss.detach().double() * there
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / source_world)
    return losses


def make_deepspeed(out: Path, stage: int, precision: str) -> None:
    engine = deepspeed_engine(stage, precision)
    import deepspeed

    losses = train(engine, learner(engine), 0, STEPS)
    engine.save_checkpoint(str(out), tag=f"global_step{STEPS}", client_state={"seen": 24, "name": "client"})
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if stage < 3:
        # What it linked before the first step has no moments.
        for flat, members in zip(
            engine.optimizer.single_partition_of_fp32_groups, engine.optimizer.bit16_groups, strict=True
        ):
            for member in members:
                if member._hp_mapping is not None:
                    member._hp_mapping.set_optim_state_fragment(flat, engine.optimizer.optimizer.state[flat])

    expected = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        expected[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            expected[f"{kind}/{name}"] = safe_get_full_optimizer_state(parameter, kind).clone()
    frozen = engine.module.frozen
    with deepspeed.zero.GatheredParameters(list(frozen.parameters()), enabled=stage == 3):
        expected |= {f"param/frozen.{n}": p.detach().clone() for n, p in frozen.named_parameters()}
    expected |= {
        f"buffer/{name}": value.clone() for name, value in engine.module.named_buffers() if name != "unsaved"
    }
    later = train(engine, learner(engine), STEPS, 2 * STEPS)
    finish(out, expected, losses + later)


def finish(out: Path, expected: dict[str, Tensor], losses: list[float]) -> None:
    """Write what the checkpoint must contain, and the losses of the run that went on."""
    if dist.is_initialized() and dist.get_rank():
        return
    save_file({name: value.contiguous() for name, value in expected.items()}, out / "expected.safetensors")
    (out / "losses.json").write_text(json.dumps(losses) + "\n")


def fsdp2_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(groups(model))


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    return train(model, lambda loss: (loss.backward(), optimizer.step(), optimizer.zero_grad()), first, last)


def fsdp2_expected(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    expected = {}
    for name, value in weights.items():
        if name.endswith(("seen", "running")):
            expected[f"buffer/{name}"] = value.clone()
        elif name != "head.weight":
            kind = "param" if name.startswith("frozen") else "master"
            expected[f"{kind}/{name}"] = value.clone()
    for name, state in states["state"].items():
        for kind in ("exp_avg", "exp_avg_sq"):
            expected[f"{kind}/{name}"] = state[kind].clone()
    return expected


def make_fsdp2(out: Path, naming: str) -> None:
    """`naming`: "plain" as torch's tutorial writes it, "titan" as torchtitan does, "accelerate" in its two folders,
    "weights" for the model alone, "safetensors" for it by DCP's Hugging Face writer.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = fsdp2_model()
    losses = train_plainly(model, optimizer, 0, STEPS)
    flat = StateDictOptions(flatten_optimizer_state_dict=naming == "titan")
    weights, states = get_state_dict(model, optimizer, options=flat)
    if naming == "plain":
        content = {"model": weights, "optim": states, "step": STEPS, "note": ("text", 1.5)}
        dcp.save(content, checkpoint_id=str(out))
    elif naming == "titan":
        content = {**weights, "optimizer": states, "train_state": {"step": torch.tensor(STEPS)}}
        dcp.save(content, checkpoint_id=str(out))
    elif naming == "accelerate":  # the two folders that its save_fsdp_model and save_fsdp_optimizer write
        dcp.save({"model": weights}, checkpoint_id=str(out / "pytorch_model_fsdp_0"))
        dcp.save({"optimizer": states}, checkpoint_id=str(out / "optimizer_0"))
    elif naming == "weights":
        dcp.save({"model": weights}, checkpoint_id=str(out))
    else:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        del weights["head.weight"]  # safetensors refuses tensors that share memory
        mapping = dict.fromkeys(weights, 1)
        dcp.save(
            weights,
            storage_writer=HuggingFaceStorageWriter(
                path=str(out), save_distributed=True, fqn_to_index_mapping=mapping
            ),
        )
    expected = fsdp2_expected(model, optimizer)
    later = train_plainly(model, optimizer, STEPS, 2 * STEPS)
    finish(out, expected, losses + later)


def make_accelerate(out: Path) -> None:
    """What `save_state` of accelerate's own writes for FSDP2, with sharded state dicts."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LayerNorm"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # Without a GPU accelerate leaves the plugin out by itself.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    torch.manual_seed(0)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups(model)))
    losses = train_plainly(model, optimizer, 0, STEPS)
    accelerator.save_state(str(out))
    expected = fsdp2_expected(model, optimizer.optimizer)
    finish(out, expected, losses + train_plainly(model, optimizer, STEPS, 2 * STEPS))


COMMANDS: dict[str, Callable[..., list[float] | None]] = {
    "deepspeed": make_deepspeed,
    "fsdp2": make_fsdp2,
    "accelerate": make_accelerate,
    "resume-deepspeed": resume_deepspeed,
    "resume-fsdp2": resume_fsdp2,
}

if __name__ == "__main__":
    target, what, *words = sys.argv[1:]
    resumed = COMMANDS[what](Path(target), *(int(word) if word.isdigit() else word for word in words))
    if resumed is not None and dist.get_rank() == 0:
        print("RESUMED", json.dumps(resumed))
