# mypy: disable-error-code="no-any-return"
"""Half precision, to the bits of stage 0, and wires of int8 and int4, to 5 %."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zerokit
from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, USUAL, Subject, always, usage
from tests.runtime.patterns.models import WIDTH, Mlp, square

pattern = Subject(__name__)

# Beside stage 0: test_precision compares that with one process; the loss is scaled as zerokit does.
BF16: dict[str, Any] = {"options": {"precision": "bf16"}, "reference": "stage 0", "tolerance": 0.0}
FP16: dict[str, Any] = {"options": {"precision": "fp16"}, "reference": "stage 0", "tolerance": 0.0}
pattern("bf16", **BF16)(CLIPPED, "usual")
pattern("fp16, the loss scaled", **FP16)(CLIPPED, "scaled")


def _accumulated(engine: Engine) -> None:
    with engine.accumulate():
        engine.backward(engine.loss())
    engine.train()


pattern.each_step("bf16, accumulated over micro-batches", **BF16)(_accumulated, "accumulated")
# Two hops round twice.
HALF = BF16 | {"tolerance": 1e-2, "options": {"precision": zerokit.Precision(torch.bfloat16, torch.bfloat16)}}
pattern("`Precision(reduce=bf16)`", **HALF)(USUAL, "reduced_in_half")


def _narrow(name: Any) -> dict[str, Any]:
    # Other buckets are cut into other blocks.
    return {"options": {"precision": zerokit.Precision(wire=name)}, "tolerance": 5e-2, "equal_bits": False}


pattern('`Precision(wire="int8")`', **_narrow("int8"))(CLIPPED, "int8_wire")
pattern.each_step('`Precision(wire="int4")`, accumulated over micro-batches', **_narrow("int4"))(
    _accumulated, "int4_wire"
)


class Timed(Mlp):
    """A diffusion model's embedding of a time step, in fp32 whatever the weights are; and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
        self.count.add_(1)
        angles = time[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 8)
        embedded = torch.cat([angles.sin(), angles.cos()], -1)
        return self.head(self.features(x) + self.embed(embedded.to(self.embed.weight.dtype)))


@pattern.each_step("bf16: sines of an fp32 time step of 1001, a buffer that counts", Timed, **BF16)
def time_step(engine: Engine) -> None:
    time = torch.tensor([1001.0, 997.0 - engine.number, 3.0 + engine.rank])
    engine.update(square(engine.model(engine.data(3, 8), time)))


class Experts(Mlp):
    """Blocks whose shares a router gives, and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Sequential(nn.Linear(WIDTH, 3), nn.Softmax(-1))
        self.norm = nn.LayerNorm(WIDTH)

    def features(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        shares = self.router(x)
        return x + sum(shares[:, [k]] * block(x) for k, block in enumerate(self.blocks))


def _in_fp32(half: str) -> dict[str, Any]:
    options = {
        "precision": {"router": "fp32", "norm": "fp32", "*": half},
        "loss_scale": zerokit.LossScale(2.0**10),
    }
    return {
        "options": options,
        "reference": "stage 0",
        "tolerance": 1e-3,
    }  # on two axes fp32 adds up in another order


pattern("bf16, a router and a norm in fp32", Experts, **_in_fp32("bf16"))(CLIPPED, "router_in_fp32")
pattern("fp16, a router and a norm in fp32", Experts, **_in_fp32("fp16"))(CLIPPED, "scaled_router_in_fp32")


class Normed(nn.Module):
    """Convolutions with BatchNorm, by itself as a unit as well, and one that averages over all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.blocks = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 1),
            nn.BatchNorm2d(WIDTH, momentum=None),
            nn.ReLU(),
            nn.InstanceNorm2d(WIDTH),
        )
        self.last = nn.BatchNorm1d(WIDTH, affine=False)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.first(x)).relu())
        return self.head(self.last(x.mean((2, 3))))


def _with_statistics(engine: Engine, max_norm: float | None) -> None:
    model = engine.model
    for _ in range(STEPS):
        engine.update(engine.loss(4, 3, 6, 6), max_norm)
        statistics = {name: value for name, value in model.named_buffers() if "running" in name}
        assert {value.dtype for value in statistics.values()} == {torch.float32}
        for value in statistics.values():
            engine.record(value.sum())
    model.eval()
    engine.evaluate(engine.data(4, 3, 6, 6))
    model.train()


pattern("bf16: BatchNorm, whose running statistics stay in fp32", Normed, **BF16)(
    lambda engine: _with_statistics(engine, 0.1), "batch_norm"
)
pattern("fp16: BatchNorm", Normed, **FP16)(lambda engine: _with_statistics(engine, None), "batch_norm_fp16")


@pattern("fp16: a GAN whose generator's loss goes through the critic", **FP16)
def gan_fp16(engine: Engine) -> None:
    critic = engine.another(Mlp(2, 8, 1), precision="fp16")
    for _ in range(STEPS):
        fake = engine.model(engine.data())
        critic.update(square(critic.model(fake.detach()) - 1) + critic.loss())
        engine.update(square(critic.model(fake)))
        critic.zero_grad()


@pattern("fp16: one joint loss for two optimizers whose scales differ", **FP16)
def joint_fp16(engine: Engine) -> None:
    other = engine.another(Mlp(2), precision="fp16", loss_scale=zerokit.LossScale(2.0**4))
    for _ in range(STEPS):
        engine.update(square(other.model(engine.model(engine.data()))), 0.1)
        other.clip(0.1)
        other.finish()


@pattern(
    "fp16: gradients of two optimizers' losses in one of them, without `zero_grad()`",
    options={"precision": "fp16"},
    refused=always(usage("scaled by 16", "scaled by 65536", "zero_grad()")),
)
def mixed_fp16(engine: Engine) -> None:
    scale: Any = {} if engine.plain else {"loss_scale": zerokit.LossScale(2.0**4)}
    other = engine.another(Mlp(2), precision="fp16", **scale)
    engine.backward(engine.loss())
    other.update(square(other.model(engine.model(engine.data()))))
